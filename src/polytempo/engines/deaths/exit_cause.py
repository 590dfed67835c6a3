"""Causes of an end as the kernel knows them: exit codes of processes that are not children, and kills for memory.

The exit code of another's child is in `/proc` from its end until its parent takes it; later its `pidfd` tells it.
Kills for memory are counted by the control group (cgroup): `memory.events` of version 2, `memory.oom_control` of
version 1.
"""

from __future__ import annotations

import fcntl
import os
import re
import signal
import struct
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

_ROOT = Path("/sys/fs/cgroup")
_NO_LIMIT = 1 << 60
_INFO_BYTES, _INFO_EXIT, _EXIT_CODE_AT = 64, 1 << 3, 60
"""Linux's `struct pidfd_info`: its size, the flag PIDFD_INFO_EXIT, and the place of the wait status."""
_GET_INFO = 3 << 30 | _INFO_BYTES << 16 | 0xFF << 8 | 11
"""PIDFD_GET_INFO."""


class MemoryGroup(NamedTuple):
    """The control group of a process: its kills for memory so far, and its limit."""

    events: Path
    limit: Path
    kills_before: int

    @classmethod
    def of(cls, pid: int | str = "self") -> MemoryGroup | None:
        """The group of the process `pid`; None where there is none, or it cannot be read."""
        with suppress(OSError, ValueError):
            for line in Path(f"/proc/{pid}/cgroup").read_text().splitlines():
                _, controllers, path = line.split(":", 2)
                inner = path.lstrip("/")
                if "memory" in controllers.split(","):
                    found = _first(_ROOT / "memory", inner, "memory.oom_control", "memory.limit_in_bytes")
                elif not controllers:
                    found = _first(_ROOT, inner, "memory.events", "memory.max")
                else:
                    continue
                if found is not None:
                    return found
        return None

    @property
    def kills(self) -> int:
        """Kills for memory since this object was made."""
        return _kills(self.events) - self.kills_before

    @property
    def cause(self) -> str:
        """The cause of a kill for memory."""
        limit_bytes = _NO_LIMIT
        with suppress(OSError, ValueError):
            limit_bytes = int(self.limit.read_text())
        allowed = f", which allows {limit_bytes / 2**20:,.0f} MiB" if limit_bytes < _NO_LIMIT else ""
        return f"was killed for memory: its control group{allowed}, had none left (SIGKILL)"


def _first(root: Path, inner: str, events: str, limit: str) -> MemoryGroup | None:
    """The group at the process's path, or at the root, where a container sees its own group."""
    for folder in (root / inner, root):
        path = folder / events
        if path.is_file():
            return MemoryGroup(path, folder / limit, _kills(path))
    return None


def _kills(events: Path) -> int:
    with suppress(OSError):
        found = re.search(r"^oom_kill (\d+)", events.read_text(), re.MULTILINE)
        return int(found[1]) if found else 0
    return 0


def state_of(pid: int) -> str:
    """The letter of the process's state, as in `/proc/PID/stat`; "" where it is gone."""
    return (_stat(pid) or [""])[0]


def exit_code_of_zombie(pid: int) -> int | None:
    """The exit code of a process that has ended and was not yet taken by its parent; a signal is negative.

    None: it still runs, or is gone.
    """
    fields = _stat(pid)
    if fields is None or fields[0] not in "ZX":
        return None
    return os.waitstatus_to_exitcode(int(fields[-1]))


def exit_code_by(descriptor: int) -> int | None:
    """The exit code of a process that has ended, by its `pidfd`, also after its parent has taken it.

    None where the kernel does not tell it (Linux before 6.15), or not yet.
    """
    info = bytearray(_INFO_BYTES)
    struct.pack_into("Q", info, 0, _INFO_EXIT)
    try:
        fcntl.ioctl(descriptor, _GET_INFO, info)
    except OSError:
        return None
    (known,) = struct.unpack_from("Q", info, 0)
    (status,) = struct.unpack_from("i", info, _EXIT_CODE_AT)
    return os.waitstatus_to_exitcode(status) if known & _INFO_EXIT else None


def _stat(pid: int) -> list[str] | None:
    """The fields behind the name, which may hold anything."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return None


def signal_name(number: int) -> str:
    """The name of a signal: "SIGKILL"."""
    return next((known.name for known in signal.Signals if known == number), f"signal {number}")


def cause_of_exit(code: int | None, memory: MemoryGroup | None = None) -> str:
    """The cause of an end with this exit code, which is None where no process could see it."""
    if code in (None, -signal.SIGKILL) and memory is not None and memory.kills > 0:
        return memory.cause
    if code is None:
        return "ended without a word (SIGKILL, a crash, or an exit of its program)"
    if code < 0:
        return f"was killed by {signal_name(-code)}"
    return f"ended its program with exit code {code} while others trained on"
