"""CURVE keys, made for one run, and the file that hands them to its processes.

All processes of a run hold the same keys, and no other process has them. Each process is server to processes that
connect to it (by the server pair) and client where it connects (by the client pair). Keys travel in a file that only
their owner can read; never in arguments or logs.
"""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path

import zmq
from zmq.utils import z85

_KEY_LENGTH, _LEAST_TOKEN_BYTES = 40, 32


@dataclass(frozen=True, repr=False)
class Keys:
    """Two CURVE key pairs in Z85, 40 characters each. Its `repr` shows none of them."""

    server_public: bytes
    server_secret: bytes
    client_public: bytes
    client_secret: bytes

    def __post_init__(self) -> None:
        """Refuse anything but two key pairs."""
        for public, secret in ((self.server_public, self.server_secret), (self.client_public, self.client_secret)):
            if len(secret) != _KEY_LENGTH or not _pair(public, secret):
                raise ValueError("these are not CURVE key pairs; make them with make_keys()")

    def __repr__(self) -> str:
        return "Keys(…)"

    def to_plain(self) -> dict[str, str]:
        """The keys for JSON, to be written to the standard input of a process and nowhere else."""
        return {field.name: getattr(self, field.name).decode("ascii") for field in fields(self)}

    @classmethod
    def from_plain(cls, plain: Mapping[str, str]) -> Keys:
        """The keys in an answer of `to_plain`. ValueError where it holds no keys."""
        return cls(**{name: text.encode("ascii") for name, text in plain.items()})

    @property
    def client(self) -> bytes:
        """The client's public key as it stands in a request for authentication: 32 bytes."""
        return z85.decode(self.client_public)


@dataclass(frozen=True, repr=False)
class ClientKeys:
    """The keys of one client among others that the server tells apart: its own pair, and the server's public key."""

    server_public: bytes
    client_public: bytes
    client_secret: bytes

    def __post_init__(self) -> None:
        """Refuse anything but keys."""
        right = len(self.client_secret) == len(self.server_public) == _KEY_LENGTH
        if not right or not _pair(self.client_public, self.client_secret):
            raise ValueError("these are not a client's CURVE keys; make them with make_client_keys(server_public)")

    def __repr__(self) -> str:
        return "ClientKeys(…)"

    def to_plain(self) -> dict[str, str]:
        """The keys for JSON, to be written to a file that its owner alone can read."""
        return {field.name: getattr(self, field.name).decode("ascii") for field in fields(self)}

    @classmethod
    def from_plain(cls, plain: Mapping[str, str]) -> ClientKeys:
        """The keys in an answer of `to_plain`. ValueError where it holds no keys."""
        return cls(**{name: text.encode("ascii") for name, text in plain.items()})


def make_client_keys(server_public: bytes) -> ClientKeys:
    """New keys of a client, from the system's random numbers."""
    return ClientKeys(server_public, *zmq.curve_keypair())


def make_keys() -> Keys:
    """New keys, from the system's random numbers."""
    return Keys(*zmq.curve_keypair(), *zmq.curve_keypair())


def keys_of(token: bytes) -> Keys:
    """The keys that all processes make of one secret: each secret key is a SHA-256 of it, as CURVE takes any 32 bytes.

    ValueError for a token that could be guessed.
    """
    if len(token) < _LEAST_TOKEN_BYTES:
        raise ValueError(f"a token of {len(token)} bytes could be guessed; it has at least {_LEAST_TOKEN_BYTES}")
    pairs: list[bytes] = []
    for end in (b"server", b"client"):
        secret = z85.encode(hashlib.sha256(b"polytempo " + end + b" " + token).digest())
        pairs += [zmq.curve_public(secret), secret]
    return Keys(*pairs)


def write_keys(path: Path, keys: Keys) -> None:
    """Write `keys` to a new file of mode 0600 in a folder that only this user can enter.

    Errors: ValueError if others may look into the folder; FileExistsError if there is a file, or a link, already.
    """
    _refuse_unless_private(path.parent, os.stat(path.parent, follow_symlinks=False), stat.S_ISDIR)
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    with open(os.open(path, flags, 0o600), "wb") as file:
        os.fchmod(file.fileno(), 0o600)  # whatever the umask
        file.write(b"\n".join(getattr(keys, field.name) for field in fields(Keys)))


def read_keys(path: Path) -> Keys:
    """The keys in the file that `write_keys` has written.

    Errors: ValueError if others may read or write the file, if it is not this user's, or holds no keys; OSError if it
    cannot be opened, or is a link.
    """
    with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK), "rb") as file:
        _refuse_unless_private(path, os.fstat(file.fileno()), stat.S_ISREG)
        lines = file.read((_KEY_LENGTH + 1) * len(fields(Keys))).split(b"\n")
    if len(lines) != len(fields(Keys)):
        raise ValueError(f"{path} holds no keys of a run")
    return Keys(*lines)


def _refuse_unless_private(path: Path, status: os.stat_result, right_kind: Callable[[int], bool]) -> None:
    mode = stat.S_IMODE(status.st_mode)
    if not right_kind(status.st_mode):
        raise ValueError(f"{path} must be a plain file in a plain folder")
    if status.st_uid != os.geteuid() or mode & 0o077:
        raise ValueError(
            f"{path} belongs to user {status.st_uid} and has mode {mode:04o}: others could get at the keys; "
            "it must be this user's alone (chmod go-rwx)"
        )


def _pair(public: bytes, secret: bytes) -> bool:
    try:
        return zmq.curve_public(secret) == public
    except (ValueError, KeyError, zmq.ZMQError):
        return False
