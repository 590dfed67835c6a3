"""`run_elastic_ranks`: a command on hosts that come and go, as `horovodrun --min-np 2 --host-discovery-script …` does.

launcher   RunMembership ── orders ──▶ the board ──▶ processes      who takes part (as in all elastic runs)
           HostSlots     ── where a process may be started          discovery, failures, cool-down
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Protocol

from polytempo.engines.engine import EngineProcess, Role
from polytempo.engines.join.rendezvous import Rendezvous
from polytempo.engines.processes.command_process import CommandRun
from polytempo.horovod.elastic_place import LIFE, MEETING
from polytempo.horovod.launcher.host_engines import HostEngines
from polytempo.horovod.launcher.hosts import HostDiscovery
from polytempo.horovod.launcher.run_ranks import OutputRelay, RanksFailed, code_of, ended, said, status
from polytempo.horovod.launcher.settings import ElasticSettings, LaunchSettings
from polytempo.membership.message import Dismiss, Fail, GroupView, Order, Report
from polytempo.membership.run_membership import RunMembership
from polytempo.runs.elastic.conductor import MembershipConductor
from polytempo.runs.elastic.member_board import LauncherBoard

_LOOK_S = 0.02
_MOST_LIVES = 1 << 20

Discover = Callable[[], Mapping[str, int]]
"""The slots of the hosts that there are now. It is called many times a second, and does not wait."""


def run_elastic_ranks(
    words: Sequence[str],
    discover: Discover,
    settings: LaunchSettings,
    elastic: ElasticSettings,
    standard_input: str = "",
    watch: Callable[[ElasticRanks], object] = lambda ranks: None,
) -> list[str | None]:
    """Run the command `words` until one of its processes has ended well, and all others with it.

    Returns what each process of the last group left as its answer. `watch` is called as often as the launcher looks
    for news. Errors: `RanksFailed` where all are lost, fewer than the minimum can be had, or a process fails after
    another one has ended well; ValueError where discovery names no host.
    """
    with ExitStack() as stack:
        if isinstance(discover, HostDiscovery):
            stack.callback(discover.close)
        hosts = _first_hosts(discover, elastic)
        run = CommandRun(tuple(words), os.getcwd(), settings.environment(), standard_input)
        engines = stack.enter_context(HostEngines(run, settings, hosts, _MOST_LIVES))
        for name, slots in hosts.items():
            engines.begin(name, slots)
        rendezvous = Rendezvous.held(engines.address)
        stack.callback(rendezvous.close)
        relay = OutputRelay(settings.output, timestamps=settings.timestamps)
        ranks = ElasticRanks(engines, rendezvous, relay, discover, settings, elastic)
        try:
            return ranks.conduct(watch)
        finally:
            engines.stop()
            engines.poll(0.0)
            relay.forward(last=True)


def _first_hosts(discover: Discover, elastic: ElasticSettings) -> Mapping[str, int]:
    """The hosts, once they have slots for `minimum` processes."""
    until_s = time.monotonic() + elastic.timeout_s
    while sum((hosts := discover()).values()) < elastic.minimum:
        if time.monotonic() > until_s:
            raise ValueError(
                f"min-np {elastic.minimum} needs so many slots, and after {elastic.timeout_s:g} s discovery names "
                f"{dict(hosts) or 'no hosts'}"
            )
        time.sleep(_LOOK_S)
    return hosts


class ElasticRanks:
    """The run's processes, each by its life, and where they are."""

    def __init__(
        self,
        engines: LifeStarter,
        rendezvous: Rendezvous,
        relay: OutputRelay,
        discover: Discover,
        settings: LaunchSettings,
        elastic: ElasticSettings,
    ) -> None:
        self._engines, self._url, self._relay, self._discover = engines, rendezvous.url, relay, discover
        self._settings, self._elastic, self._slots = settings, elastic, HostSlots(elastic.cooldown_s)
        machine = RunMembership(
            elastic.minimum, elastic.maximum, elastic.num_proc, restarts=_MOST_LIVES, answer_s=elastic.timeout_s
        )
        self._members = MembershipConductor(machine, LauncherBoard(rendezvous), engines.stop, self._heed_order)
        self.processes = self._members.processes
        self._hosts: dict[int, tuple[str, int]] = {}
        """Each process's host, and its slot there."""
        self._last_failed: EngineProcess | None = None
        self._is_over = False
        """Whether a process has ended well: then no other is started."""

    @property
    def view(self) -> GroupView | None:
        """The present view."""
        return self._members.machine.view

    def host_of(self, life: int) -> str:
        """Where a process is."""
        return self._hosts[life][0]

    def conduct(self, watch: Callable[[ElasticRanks], object]) -> list[str | None]:
        """Decide and act until the run is over; returns the answers of the last group."""
        members = self._members
        self._look_for_hosts()
        while not (self._is_over and not members.running):
            for process in self._engines.poll(_LOOK_S):
                self._take_end(process)
            self._relay.forward()
            members.stop_late()
            for message in members.hear():
                if self._is_over and isinstance(message, Report):
                    why = f"process {message.life} needs the others at the end, and one of them has ended well already"
                    raise self._failure(None, why)
            if not self._is_over:
                self._look_for_hosts()
                members.tick()
                self._begin_waiting()
                self._check_hope()
            watch(self)
        return [json.loads(self.processes[life].result or b"{}").get("answer") for life in members.members]

    def _take_end(self, process: EngineProcess) -> None:
        life = process.role.life
        if life not in self._members.dismissed:
            if code_of(process) == 0:
                self._finish()
            elif self._is_over:
                raise self._failure(process, f"process {life} on {self.host_of(life)} {ended(process)} at the end")
            else:
                self._last_failed = process
                print(f"horovodrun: process {life} on {self.host_of(life)} {ended(process)}", file=sys.stderr)
                self._slots.failed(time.monotonic(), self.host_of(life))
        if not self._is_over:
            self._members.lose(life)

    def _finish(self) -> None:
        """The script has come to its end in one process: the group's others come to theirs, and all else leaves."""
        if self._is_over:
            return
        self._is_over = True
        others = {*self._members.to_begin, *self._members.running} - set(self._members.members)
        self._members.perform([Dismiss(life) for life in sorted(others)])

    def _look_for_hosts(self) -> None:
        members, running = self._members, self._numbers()
        self._slots.found(dict(self._discover()))
        for host, number in self._slots.surplus(running).items():
            there = [life for life in members.running if self.host_of(life) == host and life not in members.dismissed]
            members.perform(members.machine.send_away(there[::-1][:number]))
        members.want(max(self._slots.capacity(time.monotonic(), running), self._elastic.minimum))

    def _check_hope(self) -> None:
        number = len(self._members.running)
        if self._slots.is_hopeless and number < self._elastic.minimum:
            raise self._failure(
                self._last_failed,
                f"{number} processes are left, min-np is {self._elastic.minimum}, and processes have "
                "failed on all hosts; --blacklist-cooldown-range lets hosts be used again",
            )

    def _failure(self, process: EngineProcess | None, why: str) -> RanksFailed:
        return RanksFailed(f"{why}; the run has ended", 1 if process is None else status(process))

    def _heed_order(self, order: Order) -> None:
        if isinstance(order, Fail):
            raise self._failure(self._last_failed, order.reason)
        if isinstance(order, GroupView):
            limit = self._elastic.reset_limit
            if limit is not None and order.generation - 1 > limit:
                raise self._failure(self._last_failed, f"the group has changed more than reset-limit {limit} times")
            numbers = ", ".join(map(str, order.members))
            said(self._settings, f"{len(order.members)} processes take part: {numbers}")

    def _numbers(self) -> Counter[str]:
        """The number of processes on each host, without dismissed processes."""
        running = (life for life in self._members.running if life not in self._members.dismissed)
        return Counter(map(self.host_of, running))

    def _begin_waiting(self) -> None:
        to_begin = self._members.to_begin
        while to_begin and (host := self._slots.room(time.monotonic(), self._numbers())) is not None:
            self._engines.begin(host, max(1, self._discover().get(host, 1)))
            if (problem := self._engines.problem(host)) is not None:
                print(f"horovodrun: {problem}", file=sys.stderr)
                self._slots.failed(time.monotonic(), host)
            elif self._engines.is_open(host):
                self._begin(to_begin.pop(0), host)
            else:
                return  # a thread opens it

    def _begin(self, life: int, host: str) -> None:
        taken = {self._hosts[other][1] for other in self._members.running if self.host_of(other) == host}
        slot = min(set(range(len(taken) + 1)) - taken)
        self._hosts[life] = (host, slot)
        environment = {
            MEETING: self._url,
            LIFE: str(life),
            "POLYTEMPO_RENDEZVOUS": self._url,
            "HOROVOD_ELASTIC": "1",
            "HOROVOD_HOSTNAME": host,
            "HOROVOD_LOCAL_RANK": str(slot),
        }
        process = self._engines.start(host, Role("member", life, life), str(life), environment)
        self.processes[life] = process
        self._relay.follow(process)
        said(self._settings, f"process {life} is started on {host}")


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


class LifeStarter(Protocol):
    """Starts processes on hosts by name, sees them end, and ends them."""

    def begin(self, name: str, slots: int) -> None:
        """Get ready for processes on a host with so many slots; it does not wait."""

    def is_open(self, name: str) -> bool:
        """Whether processes can be started there."""

    def problem(self, name: str) -> Exception | None:
        """Why they cannot; the next `begin` tries again."""

    def start(self, name: str, role: Role, label: str, environment: Mapping[str, str]) -> EngineProcess:
        """Start a process there, with these variables. `label` begins the lines of its output."""

    def poll(self, wait_s: float) -> list[EngineProcess]:
        """The processes that have ended since the last poll; waits for one at most for `wait_s`."""

    def stop(self, process: EngineProcess | None = None) -> None:
        """End one process for certain; None: all."""
