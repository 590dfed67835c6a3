"""Tickets of clients, and the roster of their server: one key pair for each client, so that one can be revoked alone.

    keys/roster.json       the server's: its secret key, and each client's public key, bound and state
    keys/client-0.ticket   one client's: the server's address and public key, and the client's pair

All are files that their owner alone can read. A ticket is a secret: any process that has it is that client.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import stat
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import msgspec
from zmq.utils import z85

from polytempo.core.calls.refusals import refuse
from polytempo.wire.keys import ClientKeys, Keys, make_client_keys, make_keys

ROSTER = "roster.json"
MOST_CLIENTS, MOST_SAMPLES = 100_000, 1 << 40
_FORMAT, _ROSTER_FORMAT = "polytempo-client-1", "polytempo-roster-1"
_MOST_TICKET_BYTES, _MOST_ROSTER_BYTES = 4096, 64 << 20


class ClientTicket(NamedTuple):
    """The secret of one client."""

    server: str
    """`tcp://host:port`"""
    number: int
    keys: ClientKeys

    def written(self) -> bytes:
        """The ticket as one line."""
        told = {"format": _FORMAT, "server": self.server, "number": self.number, "keys": self.keys.to_plain()}
        return json.dumps(told).encode()

    @classmethod
    def read(cls, path: str | Path) -> ClientTicket:
        """The ticket of a file. ValueError (PT2517) where it is none, or where others can read it."""
        path = Path(path)
        try:
            told = json.loads(_read_private(path, _MOST_TICKET_BYTES))
            if told["format"] != _FORMAT:
                raise ValueError("format")
            return cls(str(told["server"]), int(told["number"]), ClientKeys.from_plain(told["keys"]))
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            problem = error.strerror if isinstance(error, OSError) else "it is not a ticket, or others can read it"
            refuse({"real clients", "no ticket"}, path=path, problem=problem)
            raise AssertionError from error


class TicketHolder(msgspec.Struct, frozen=True):
    """A client as its server knows it."""

    public: str
    most_samples: int
    revoked: bool = False


class _RosterFile(msgspec.Struct, frozen=True):
    format: str
    keys: dict[str, str]
    members: list[TicketHolder]


class TicketRoster:
    """The clients that may come, by number. It follows its file: a revoked client is out within a second or two."""

    def __init__(self, folder: str | Path) -> None:
        """PT2517 (a ValueError) where the folder holds no roster, or others can read it."""
        self._path = Path(folder) / ROSTER
        self._lock, self._seen = threading.Lock(), (0, 0)
        self.keys: Keys
        self.members: list[TicketHolder] = []
        self._numbers: dict[bytes, int] = {}
        self.follow()

    def follow(self) -> None:
        """Read the file again where it has changed."""
        try:
            status = os.stat(self._path)
            now = status.st_mtime_ns, status.st_ino
            if now == self._seen:
                return
            told = msgspec.json.decode(_read_private(self._path, _MOST_ROSTER_BYTES), type=_RosterFile)
            if told.format != _ROSTER_FORMAT:
                raise ValueError("format")
            keys = Keys.from_plain(told.keys)
        except (OSError, ValueError, TypeError) as error:
            problem = error.strerror if isinstance(error, OSError) else "it is not a roster, or others can read it"
            refuse({"real clients", "no ticket"}, path=self._path, problem=problem)
            raise AssertionError from error
        numbers = {z85.decode(each.public.encode()): i for i, each in enumerate(told.members) if not each.revoked}
        with self._lock:
            self.keys, self.members, self._numbers, self._seen = keys, told.members, numbers, now

    def known(self, key: bytes) -> str | None:
        """The number of the client with a public key, as text; None for a stranger and a revoked client."""
        with self._lock:
            number = self._numbers.get(key)
        return None if number is None else str(number)

    def admits(self, number: int) -> bool:
        """True for a client that may take part."""
        return 0 <= number < len(self.members) and not self.members[number].revoked


def name_of(number: int) -> str:
    """A client in messages and files."""
    return f"client-{number}"


def make_tickets(folder: str | Path, clients: int, server: str, most_samples: int = 1_000_000) -> list[Path]:
    """See `polytempo.federated.make_tickets`."""
    if not 1 <= clients <= MOST_CLIENTS or not 1 <= most_samples <= MOST_SAMPLES:
        raise ValueError(
            f"tickets are for 1 to {MOST_CLIENTS:,} clients of at least a sample; got clients={clients}, "
            f"most_samples={most_samples}"
        )
    url, folder = url_of(server), Path(folder)
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if os.path.lexists(folder / ROSTER):
        raise FileExistsError(errno.EEXIST, "this folder has tickets already; name another one", str(folder / ROSTER))
    keys = make_keys()
    tickets = [ClientTicket(url, number, make_client_keys(keys.server_public)) for number in range(clients)]
    members = [TicketHolder(each.keys.client_public.decode(), most_samples) for each in tickets]
    roster = _RosterFile(_ROSTER_FORMAT, keys.to_plain(), members)
    _write_private(folder / ROSTER, msgspec.json.encode(roster))
    paths = [folder / f"{name_of(each.number)}.ticket" for each in tickets]
    for path, each in zip(paths, tickets, strict=True):
        _write_private(path, each.written())
    return paths


def revoke(folder: str | Path, client: int) -> None:
    """See `polytempo.federated.revoke`."""
    path = Path(folder) / ROSTER
    with _alone(Path(folder)):
        roster = TicketRoster(folder)
        if not 0 <= client < len(roster.members):
            raise ValueError(f"{path} has clients 0 to {len(roster.members) - 1}, and no {client}")
        members = list(roster.members)
        members[client] = msgspec.structs.replace(members[client], revoked=True)
        aside = path.with_name(f".{ROSTER}.new")
        aside.unlink(missing_ok=True)  # of a process that has died here
        _write_private(aside, msgspec.json.encode(_RosterFile(_ROSTER_FORMAT, roster.keys.to_plain(), members)))
        os.replace(aside, path)


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Inside, no other process is inside for the same folder."""
    folder_file = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(folder_file, fcntl.LOCK_EX)
        yield
    finally:
        os.close(folder_file)


def url_of(address: str) -> str:
    """`tcp://host:port` of "host:port". ValueError for anything else."""
    text = address.removeprefix("tcp://")
    host, _, port = text.rpartition(":")
    if not host or "/" in host or not (port.isdecimal() and int(port) < 1 << 16):
        raise ValueError(f"{address!r} is not an address; write host:port, as 127.0.0.1:7777")
    return f"tcp://{text}"


def _read_private(path: Path, most_bytes: int) -> bytes:
    with open(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOFOLLOW), "rb") as file:
        mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
        if mode & 0o077:
            raise ValueError(f"mode {mode:04o}")
        return file.read(most_bytes)


def _write_private(path: Path, content: bytes) -> None:
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    with open(os.open(path, flags, 0o600), "wb") as file:
        file.write(content)
