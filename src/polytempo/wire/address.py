"""Addresses of mailboxes, and which of them are safe without keys."""

from __future__ import annotations

import ipaddress
import os
import re
import stat
from pathlib import Path

_TCP = re.compile(r"tcp://(?:\[(?P<six>[0-9A-Fa-f:.]+)\]|(?P<host>[^\[\]:/]+)):(?P<port>\*|[0-9]{1,5})")
_PATH_BYTES = 107
"""The longest path of a socket: `sun_path` without the zero at its end."""


def checked(address: str, has_keys: bool) -> bool:
    """Whether `address` is on this host by file (`ipc://`). Refuses addresses that other users can reach.

    Errors: ValueError for an `ipc://` path that is too long or in a folder that others may enter, for a `tcp://`
    address beyond loopback without keys, and for anything else.
    """
    if address.startswith("ipc://"):
        _check_folder(Path(address.removeprefix("ipc://")))
        return True
    match = _TCP.fullmatch(address)
    if match is None:
        raise ValueError(f"a mailbox is at ipc:///folder/name or tcp://host:port, not at {address!r}")
    if not has_keys and not _is_loopback(match["six"] or match["host"]):
        raise ValueError(f"{address} can be reached from other hosts, so it needs keys; without them use 127.0.0.1")
    return False


def _check_folder(path: Path) -> None:
    if not path.is_absolute() or len(os.fsencode(path)) > _PATH_BYTES:
        raise ValueError(f"{path} must be an absolute path of up to {_PATH_BYTES} bytes; use a shorter folder")
    status = os.stat(path.parent, follow_symlinks=False)
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o077:
        raise ValueError(f"{path.parent} must be a folder of this user that others cannot enter (chmod 700)")


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:  # a name or an interface: its address is not known here
        return False
