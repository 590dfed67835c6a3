"""Hosts and their slots, as `horovodrun` takes them or a user's program prints them, and the place of each rank."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from polytempo.runs.elastic.available_program import PolledProgram

_NAME = re.compile(r"[\w.@%][\w.@%-]*", re.ASCII)
_HOSTFILE_LINE = re.compile(r"(?P<name>[^\s:]+)(?:\s+slots\s*=\s*(?P<slots>\d+)|:(?P<short>\d+))?")


class SlotPlace(NamedTuple):
    """The place of a rank."""

    host: str
    rank: int
    size: int
    local_rank: int
    local_size: int
    cross_rank: int
    cross_size: int
    host_number: int
    """The number among the hosts that have a rank."""

    def environment(self) -> dict[str, str]:
        """The variables that Horovod's launcher sets for a rank, and the input of `polytempo.init`."""
        named = {
            "HOSTNAME": self.host,
            "RANK": str(self.rank),
            "SIZE": str(self.size),
            "LOCAL_RANK": str(self.local_rank),
            "LOCAL_SIZE": str(self.local_size),
            "CROSS_RANK": str(self.cross_rank),
            "CROSS_SIZE": str(self.cross_size),
        }
        return {f"HOROVOD_{name}": value for name, value in named.items()} | {
            "POLYTEMPO_RANK": str(self.rank),
            "POLYTEMPO_SIZE": str(self.size),
            "POLYTEMPO_LOCAL_RANK": str(self.local_rank),
            "POLYTEMPO_LOCAL_SIZE": str(self.local_size),
            "POLYTEMPO_HOST": str(self.host_number),
        }


def parsed_hosts(text: str) -> dict[str, int]:
    """Slots by host of `host1:2,host2:4,host3`; a host without a number has one. ValueError for another text."""
    return _some(counted(parsed_host(part) for part in text.split(",")))


def read_hostfile(path: Path) -> dict[str, int]:
    """Slots by host of a file with lines like `host1 slots=2`; `#` begins a comment. ValueError for other lines."""
    if not path.is_file():
        raise ValueError(f"hostfile {path}: there is no such file")
    lines = [line.partition("#")[0].strip() for line in path.read_text(encoding="utf-8").splitlines()]
    return _some(counted(_line(line, path) for line in lines if line))


def parsed_host(text: str, slots_else: int = 1) -> tuple[str, int]:
    """The host of `host1:2` and its slots; `slots_else` where it has no number. ValueError for another text."""
    name, colon, slots = text.strip().partition(":")
    if not _NAME.fullmatch(name) or (colon and not (slots.isdecimal() and int(slots) > 0)):
        raise ValueError(f"{text!r} is not a host with its slots; write hosts as host1:2,host2:4")
    return name, int(slots) if colon else slots_else


def _line(line: str, path: Path) -> tuple[str, int]:
    match = _HOSTFILE_LINE.fullmatch(line)
    if match is None or line.startswith("-"):
        raise ValueError(f"{path}: {line!r} is not a host with its slots; write lines as: host1 slots=2")
    return parsed_host(f"{match['name']}:{match['slots'] or match['short'] or 1}")


def counted(pairs: Iterable[tuple[str, int]]) -> dict[str, int]:
    """Slots by host. ValueError for a host that comes twice."""
    found: dict[str, int] = {}
    for name, slots in pairs:
        if name in found:
            raise ValueError(f"host {name} is named twice; name it once, with all of its slots")
        found[name] = slots
    return found


def _some(hosts: dict[str, int]) -> dict[str, int]:
    if not hosts:
        raise ValueError("no host is named; write hosts as host1:2,host2:4")
    return hosts


def places(hosts: Mapping[str, int], size: int) -> list[SlotPlace]:
    """The place of each of `size` ranks: the slots of the first host, then the slots of the next one, and so on.

    ValueError where there are fewer slots than ranks.
    """
    if size < 1:
        raise ValueError(f"-np {size} must be at least 1")
    if sum(hosts.values()) < size:
        listed = ", ".join(f"{name}:{slots}" for name, slots in hosts.items())
        raise ValueError(f"-np {size} needs so many slots, and there are {sum(hosts.values())} ({listed})")
    on: list[Sequence[int]] = []
    begin = 0
    for slots in hosts.values():
        on.append(range(begin, min(begin + slots, size)))
        begin += len(on[-1])
    used = [(name, ranks) for name, ranks in zip(hosts, on, strict=True) if ranks]
    found = []
    for number, (name, ranks) in enumerate(used):
        for local, rank in enumerate(ranks):
            with_it = [other for other, (_, those) in enumerate(used) if len(those) > local]
            found.append(SlotPlace(name, rank, size, local, len(ranks), with_it.index(number), len(with_it), number))
    return found


_EVERY_S = 1.0
_SAID = 80


class HostDiscovery(PolledProgram[Mapping[str, int]]):
    """Slots by host: lines like `host1:2`, or `host1`, which has `slots`. The program runs once a second.

    ValueError where there is no such program, or this user may not run it.
    """

    def __init__(self, program: Path, slots: int) -> None:
        super().__init__(
            "--host-discovery-script ", program, {}, lambda printed: discovered(printed, slots), _named, _EVERY_S
        )


def discovered(printed: str, slots: int) -> dict[str, int]:
    """Slots by host from the program's output; empty if it printed nothing. ValueError for another text."""
    lines = [line.strip() for line in printed.splitlines() if line.strip()]
    try:
        return counted(parsed_host(line, slots) for line in lines)
    except ValueError as error:
        raise ValueError(f"it printed {printed.strip()[:_SAID]!r}: {error}") from None


def _named(hosts: Mapping[str, int]) -> str:
    return ", ".join(f"{name}:{slots}" for name, slots in hosts.items()) or "no hosts"
