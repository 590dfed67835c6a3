"""The processors of a virtual world: each rank computes one thing after the other, at its own pace.

Ranks that have no processor of their own share the cores of a machine:

2 cores    rank 0  ███████████──────────      while three compute, each has two thirds of a core
           rank 1  ───███████████───────
           server  ──────███────────────
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any, NamedTuple

from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from polytempo.cluster import Cluster, CorrelatedStragglers, Stragglers, constant
from polytempo.core.arithmetic.kernel_use import KernelUse
from polytempo.core.op import Alone, Compute
from polytempo.worlds.virtual.clockwork import Clockwork, Flight

Begun = Callable[[float], None]
"""Called with the begin of a computation."""
Over = Callable[[], None]


class _Waiting(NamedTuple):
    full_speed_s: float
    varies: bool
    begun: Begun
    over: Over


class Processors:
    """Computations run when they are asked for, and end `Cluster.computing_s` times the straggler's factor later.

    A machine with more ranks than `Cluster.cores` is slower while more ranks compute than it has cores.
    """

    def __init__(self, world: Clockwork, cluster: Cluster, hosts: Sequence[int], seed: int) -> None:
        self._world, self._cluster, self._hosts = world, cluster, hosts
        self._first_server = len(hosts) - cluster.servers
        self._pace = Pace(cluster.stragglers, hosts, seed)
        self.computed_s = [0.0] * len(hosts)
        """Seconds that each rank has computed so far."""
        self._free_s = [0.0] * len(hosts)
        """The end of the computations of each rank with a processor of its own."""
        cores = cluster.cores
        self._machines = [host // cluster.hosts_per_machine for host in hosts]
        crowded = [] if cores is None else [each for each, ranks in Counter(self._machines).items() if ranks > cores]
        self._cores = {machine: Cores(world, cores or 1) for machine in crowded}
        self._computed = WeakTensorKeyDictionary()
        """Results of computations that are the same on all ranks, by their sources."""
        self._waiting: dict[int, deque[_Waiting]] = defaultdict(deque)
        """Computations of each rank without one; the first is under way."""
        self._alone: dict[int, deque[tuple[Flight, Alone[Any]]]] = defaultdict(deque)
        """Computations that must be alone on a host, in the order of asking; the first one is under way."""

    @property
    def crowded(self) -> bool:
        """True if ranks of some machine share its cores: then the time of a computation depends on the others."""
        return bool(self._cores)

    def begin_step(self, rank: int, step: int) -> None:
        """Draw another factor for a rank that marks `step`."""
        self._pace.begin(rank, step, self._world.now_s)

    def begin_step_alike(self, step: int) -> bool:
        """Mark `step` for all ranks. True if they are equally fast in it."""
        return self._pace.begin_all(step, self._world.now_s)

    def compute(self, flight: Flight, op: Compute[Any], after: Over | None = None) -> None:
        """Compute after the rank's other computations, and then call `after`."""
        world, rank = self._world, flight.rank
        value, error = None, None

        def begun(start_s: float) -> None:
            flight.started_s = start_s

        def over() -> None:
            self.computed_s[rank] += world.now_s - flight.started_s
            world.end(flight, op.name, 0, value, error=error)
            if after is not None:
                after()

        self._occupy(rank, self._cluster.computing_s(op.flops, op.uses, server=rank >= self._first_server), begun, over)
        try:
            value = op.work() if op.source is None else self._common(op, op.source)
        except Exception as raised:
            error = raised

    def _common(self, op: Compute[Any], source: Tensor) -> Tensor:
        """The tensor that all ranks with this source compute, in memory of the rank's own."""
        if source not in self._computed:
            self._computed[source] = op.work()
        found: Tensor = self._computed[source]
        return found.clone()

    def handle(self, rank: int, use: KernelUse, over: Over) -> None:
        """Take a rank's processor for work other than its computations, on a cluster with measured kernels.

        No straggler's factor counts. It is drawn for a step's computations: a delay of some milliseconds is a large
        factor where steps are short, and would be taken again for each of many messages.
        """
        self._occupy(rank, self._cluster.computing_s(0.0, (use,)), lambda start_s: None, over, varies=False)

    def handle_beside(self, rank: int, use: KernelUse, over: Over) -> None:
        """Take a part of the cores that the rank's machine shares for work of other threads of the rank.

        Nothing where ranks have processors of their own, or where the kernel was not measured.
        """
        cores, speeds = self._cores.get(self._machines[rank]), self._cluster.speeds
        if cores is None or speeds is None or not speeds.measured(use.kernel):
            over()
        else:
            cores.run(speeds.seconds((use,)), over)

    def _occupy(self, rank: int, full_speed_s: float, begun: Begun, over: Over, *, varies: bool = True) -> None:
        cores = self._cores.get(self._machines[rank])
        if cores is None:
            start_s = max(self._world.now_s, self._free_s[rank])
            begun(start_s)
            self._free_s[rank] = start_s + full_speed_s * (self._pace.factor(rank, start_s) if varies else 1.0)
            return self._world.at(self._free_s[rank], over)
        self._waiting[rank].append(_Waiting(full_speed_s, varies, begun, over))
        if len(self._waiting[rank]) == 1:
            self._begin_first(rank, cores)

    def _begin_first(self, rank: int, cores: Cores) -> None:
        """Let the rank's core, or its part of one, begin the first computation."""
        queue, now_s = self._waiting[rank], self._world.now_s
        first = queue[0]
        first.begun(now_s)

        def over() -> None:
            queue.popleft()
            if rank in self._world.lost:
                queue.clear()
            if queue:
                self._begin_first(rank, cores)
            first.over()

        cores.run(first.full_speed_s * (self._pace.factor(rank, now_s) if first.varies else 1.0), over)

    def compute_alone(self, flight: Flight, op: Alone[Any]) -> None:
        """Compute when no other rank of the host is in one of these."""
        queue = self._alone[self._hosts[flight.rank]]
        queue.append((flight, op))
        if len(queue) == 1:
            self._let_in(queue)

    def _let_in(self, queue: deque[tuple[Flight, Alone[Any]]]) -> None:
        """Let the first that still waits compute alone, and the next one when that is over."""
        while queue and (queue[0][0].done or queue[0][0].rank in self._world.lost):
            queue.popleft()
        if queue:

            def leave() -> None:
                queue.popleft()
                self._let_in(queue)

            self.compute(*queue[0], after=leave)


_DONE_S = 1e-12
"""The rest of a computation that is over, by rounding."""


@dataclass(slots=True, eq=False)
class _Computation:
    left_s: float
    then: Callable[[], None]


class Cores:
    """Computations that are under way together share `cores` evenly, none of them with more than one core."""

    def __init__(self, world: Clockwork, cores: int) -> None:
        self._world, self._cores = world, cores
        self._running: list[_Computation] = []
        self._since_s = 0.0
        """The time of the last update of the rests."""
        self._plan = 0
        """The number of the last plan of the next end; earlier plans are void."""

    def run(self, seconds: float, then: Callable[[], None]) -> None:
        """Compute for `seconds` on a core of its own; `then` is called at the end."""
        self._pass()
        self._running.append(_Computation(seconds, then))
        self._look_ahead()

    def _pass(self) -> None:
        """Subtract the work that has been done until now."""
        now_s = self._world.now_s
        if self._running:
            done_s = (now_s - self._since_s) * self._rate()
            for each in self._running:
                each.left_s -= done_s
        self._since_s = now_s

    def _rate(self) -> float:
        return min(1.0, self._cores / len(self._running))

    def _look_ahead(self) -> None:
        """Plan the end of the next computation; another begin changes the plan."""
        self._plan += 1
        if self._running:
            plan, soonest_s = self._plan, max(0.0, min(each.left_s for each in self._running))
            self._world.at(self._world.now_s + soonest_s / self._rate(), lambda: self._end(plan))

    def _end(self, plan: int) -> None:
        if plan != self._plan:
            return
        self._pass()
        least_s = max(_DONE_S, min(each.left_s for each in self._running))
        over = [each for each in self._running if each.left_s <= least_s]
        self._running = [each for each in self._running if each.left_s > least_s]
        self._look_ahead()
        for each in over:
            each.then()


class Pace:
    """Draws how many times longer than at full speed a rank computes: once for each step that it marks.

    All computations of a step share the draw (forward, backward of each bucket, codec, update), so a slow step is as
    slow as the distribution says, and their sum does not average it away. A rank that marks no steps, such as a
    parameter server's, draws for each computation, which is a request. Every rank has a stream of its own.
    Distributions that remember (`CorrelatedStragglers`) are asked at the same places.
    """

    def __init__(self, stragglers: Stragglers, hosts: Sequence[int], seed: int) -> None:
        self._stragglers, self._hosts, self._seed = stragglers, hosts, seed
        self._varies = stragglers is not constant()
        self._draws: dict[int, Callable[[float], float]] = {}
        self._steps: list[int | None] = [None] * len(hosts)
        self._factors = [1.0] * len(hosts)

    def begin(self, rank: int, step: int, now_s: float) -> None:
        """Mark `step` for a rank. To mark it again changes nothing."""
        if self._varies and self._steps[rank] != step:
            self._steps[rank], self._factors[rank] = step, self._drawn(rank, now_s)

    def begin_all(self, step: int, now_s: float) -> bool:
        """Mark `step` for all ranks. True if they are equally fast in it."""
        if not self._varies:
            return True
        for rank in range(len(self._hosts)):
            self.begin(rank, step, now_s)
        return len(set(self._factors)) == 1

    def factor(self, rank: int, now_s: float) -> float:
        """The factor of a computation that begins now."""
        if not self._varies:
            return 1.0
        return self._drawn(rank, now_s) if self._steps[rank] is None else self._factors[rank]

    def _drawn(self, rank: int, now_s: float) -> float:
        draw = self._draws.get(rank)
        if draw is None:
            random = Random(f"{self._seed}/{rank}")
            draw = self._draws[rank] = _drawing(self._stragglers, random, self._hosts[rank])
        return draw(now_s)


def _drawing(stragglers: Stragglers, random: Random, host: int) -> Callable[[float], float]:
    if isinstance(stragglers, CorrelatedStragglers):
        return stragglers.begun(random, host)
    return lambda now_s: stragglers(random, host)
