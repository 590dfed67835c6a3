"""The page's address: a socket that listens, and the link to it, with its token."""

from __future__ import annotations

import errno
import ipaddress
import secrets
import socket
from typing import NamedTuple

PORT = 7440
_PORTS_TRIED = 20


class Address(NamedTuple):
    """A socket that listens at `host`, and the token that opens the page."""

    host: str
    listening: socket.socket
    token: str

    @property
    def port(self) -> int:
        """The port of the socket."""
        return int(self.listening.getsockname()[1])

    @property
    def link(self) -> str:
        """The link that opens the page."""
        shown = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{shown}:{self.port}/?token={self.token}"


def listen(host: str = "127.0.0.1", port: int | None = None) -> Address:
    """An address with a new token. port: None takes the first free port from 7440 on; 0 takes any.

    Errors: OSError that names the address, where it cannot be listened at.
    """
    wanted = range(PORT, PORT + _PORTS_TRIED) if port is None else [port]
    for number in wanted:
        found = socket.socket(socket.AF_INET6 if _is_v6(host) else socket.AF_INET, socket.SOCK_STREAM)
        try:
            found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            found.bind((host, number))
            found.listen(128)
        except OSError as error:
            found.close()
            if error.errno == errno.EADDRINUSE and number != wanted[-1]:
                continue
            said = f"{error.strerror or error}; name another --host or --port, or leave them out"
            raise OSError(error.errno, said, f"{host}:{number}") from error
        return Address(host, found, secrets.token_urlsafe(32))
    raise AssertionError("a range of ports is not empty")


def _is_v6(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).version == 6
    except ValueError:
        return False
