"""This host's addresses and interfaces, as other hosts reach them."""

from __future__ import annotations

import fcntl
import socket
import struct
import sys
from collections.abc import Iterable, Sequence
from contextlib import suppress

from polytempo.engines.join.environment import parsed_url

_SIOCGIFADDR = 0x8915
_ANY_PORT = 9


def address_towards(url: str) -> str:
    """This host's address on the way to `tcp://host:port`. No packet is sent."""
    return address_to(*parsed_url(url))


def address_to(host: str, port: int = _ANY_PORT) -> str:
    """This host's address on the way to `host`. ValueError where there is no way."""
    try:
        family, _, _, _, where = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(where)
            return str(probe.getsockname()[0])
    except OSError as error:
        raise ValueError(f"there is no way from this host to {host} ({error.strerror or error})") from error


def common_address(hosts: Iterable[str]) -> str:
    """The one address of this host that all of `hosts` reach. ValueError where there are several."""
    found = {host: address_to(host) for host in hosts}
    addresses = set(found.values())
    if len(addresses) > 1:
        raise ValueError(
            f"hosts reach this one by several addresses ({', '.join(f'{host} by {at}' for host, at in found.items())})"
            "; give the address= that all of them reach"
        )
    return addresses.pop()


def check_hosts(hosts: Sequence[str], *, without: str = "", like: str) -> None:
    """ValueError for text in place of a list, a host twice, and names that a program takes for options."""
    if isinstance(hosts, str):
        raise ValueError(f'hosts={hosts!r} must be a list of names, such as ["n1", "n2"]')
    for host in hosts:
        if not host or host.startswith("-") or any(letter.isspace() or letter in without for letter in host):
            raise ValueError(f"{host!r} is not a host's name; give names as {like}")
    if len(set(hosts)) < len(hosts):
        raise ValueError(f"hosts={list(hosts)} names a host twice; each has one agent, which starts all there")


def refused(url: str, wait_s: float) -> bool:
    """True if the host of `tcp://host:port` answers that nothing listens there; False if it does not answer."""
    try:
        socket.create_connection(parsed_url(url), wait_s).close()
    except ConnectionRefusedError:
        return True
    except OSError:
        return False
    return False


def address_of(interface: str) -> str:
    """The IPv4 address of a network interface. ValueError where there is none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe, suppress(OSError):
        answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, struct.pack("256s", interface.encode()[:15]))
        return socket.inet_ntoa(answer[20:24])
    names = ", ".join(name for _, name in socket.if_nameindex())
    raise ValueError(f"network interface {interface!r} has no IPv4 address here; there are: {names}")


def interface_of(address: str) -> str | None:
    """The network interface with this IPv4 address; None where it is not found."""
    if sys.platform != "linux" or ":" in address:
        return None
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            with suppress(OSError):
                answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)
                if socket.inet_ntoa(answer[20:24]) == address:
                    return name
    return None
