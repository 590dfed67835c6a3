"""`HostSlots`: which hosts have room for another process, and which must give processes up. A machine without I/O."""

from __future__ import annotations

from collections.abc import Mapping


class HostSlots:
    """Hosts with their slots, and those where a process has failed.

    Such a host gets no new processes: for ever, or with `cooldown_s` = (shortest, longest) for the shortest time,
    which doubles with each failure up to the longest. Processes that run there stay.
    """

    def __init__(self, cooldown_s: tuple[float, float] | None = None) -> None:
        self._cooldown_s = cooldown_s
        self._slots: dict[str, int] = {}
        self._failures: dict[str, int] = {}
        self._until_s: dict[str, float] = {}

    def found(self, hosts: Mapping[str, int]) -> None:
        """There are these hosts now. Those that were known keep their order, and come first."""
        self._slots = {name: hosts[name] for name in [*self._slots, *hosts] if name in hosts}

    def failed(self, now_s: float, host: str) -> None:
        """A process has failed there."""
        if self._until_s.get(host, 0.0) > now_s:
            return  # it failed with another one
        number = self._failures[host] = self._failures.get(host, 0) + 1
        if self._cooldown_s is None:
            self._until_s[host] = float("inf")
        else:
            shortest, longest = self._cooldown_s
            self._until_s[host] = now_s + min(shortest * 2 ** (number - 1), longest)

    def is_blacklisted(self, now_s: float, host: str) -> bool:
        """Whether it gets no new processes now."""
        return now_s < self._until_s.get(host, 0.0)

    def capacity(self, now_s: float, running: Mapping[str, int]) -> int:
        """How many processes there may be, those included that run: `running` has their number by host."""
        return sum(
            min(slots, running.get(name, 0)) if self.is_blacklisted(now_s, name) else slots
            for name, slots in self._slots.items()
        )

    def room(self, now_s: float, running: Mapping[str, int]) -> str | None:
        """The first host that has a free slot; None where there is none."""
        for name, slots in self._slots.items():
            if running.get(name, 0) < slots and not self.is_blacklisted(now_s, name):
                return name
        return None

    def surplus(self, running: Mapping[str, int]) -> dict[str, int]:
        """How many processes each host has beyond its slots; one that is no longer there has none."""
        beyond = {name: number - self._slots.get(name, 0) for name, number in running.items()}
        return {name: number for name, number in beyond.items() if number > 0}

    @property
    def is_hopeless(self) -> bool:
        """Whether there are hosts, and none of them will ever get a new process."""
        return bool(self._slots) and all(self._until_s.get(name) == float("inf") for name in self._slots)
