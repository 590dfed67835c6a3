"""`HostDiscovery`: the hosts that a program of the user's prints, as `horovodrun --host-discovery-script` asks it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from polytempo.horovod.launcher.hosts import counted, parsed_host
from polytempo.runs.elastic.available_program import PolledProgram

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
    """Slots by host of what the program has printed; empty where it printed nothing. ValueError for another text."""
    lines = [line.strip() for line in printed.splitlines() if line.strip()]
    try:
        return counted(parsed_host(line, slots) for line in lines)
    except ValueError as error:
        raise ValueError(f"it printed {printed.strip()[:_SAID]!r}: {error}") from None


def _named(hosts: Mapping[str, int]) -> str:
    return ", ".join(f"{name}:{slots}" for name, slots in hosts.items()) or "no hosts"
