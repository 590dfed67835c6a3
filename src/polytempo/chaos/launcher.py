"""The launcher: production's `Coordinator`, and an engine that restarts dead processes and ends deposed copies."""

from __future__ import annotations

from collections.abc import Callable

from polytempo.chaos.world import World
from polytempo.server.coordinator.coordinator import Coordinator
from polytempo.server.message import Message, Outbox


class ChaosLauncher:
    """The coordinator's process. `holders[s]` are the nodes that may hold a copy of shard s.

    `sees_deaths`: it sees within `LOOK_S` that a process has ended (its own child); otherwise only by silence.
    """

    LOOK_S = 0.02
    RESTART_S = 0.02
    SAVE_S = 0.3

    def __init__(
        self,
        coordinator: Coordinator,
        workers: int,
        holders: list[tuple[int, ...]],
        processes: World,
        sees_deaths: bool,
        on_wanted: Callable[[int, int], None],
        saves: bool,
        lingers_s: float,
    ) -> None:
        """`lingers_s`: the time that a copy that was given up may live on before another takes its node.

        `on_wanted(shard, node)` is called before a new, blank copy is started. `saves`: whether it takes snapshots.
        """
        self.coordinator = coordinator
        self._workers, self._holders = range(workers), holders
        self._processes, self._sees_deaths = processes, sees_deaths
        self._on_wanted = on_wanted
        self._saves, self._lingers_s = saves, lingers_s
        self._wanted_s: dict[int, float] = {}
        self._snapshot, self._saving = 0, set[int]()
        self._looked_s = 0.0
        self._reported: set[int] = set()

    @property
    def finished(self) -> bool:
        """True when the run is over."""
        return self.coordinator.finished

    def receive(self, now_s: float, source: int, message: Message) -> Outbox:
        """Take a message as the coordinator."""
        self._reported.discard(source)
        return self.coordinator.receive(now_s, source, message) + self._look(now_s)

    def tick(self, now_s: float) -> Outbox:
        """Run the coordinator's timers, and look at the processes."""
        return self.coordinator.tick(now_s) + self._look(now_s)

    def wait_s(self, now_s: float) -> float:
        """Seconds until the next timer or look."""
        return min(self.coordinator.wait_s(now_s), self._looked_s + self.LOOK_S - now_s)

    def _look(self, now_s: float) -> Outbox:
        if now_s < self._looked_s + self.LOOK_S:
            return []
        self._looked_s = now_s
        out: Outbox = []
        for worker in self._workers:
            out += self._look_at(now_s, worker)
            if not self._processes.alive(worker) and not self.finished:
                self._processes.restart(worker, self.RESTART_S)
        for node in {node for holders in self._holders for node in holders}:
            out += self._look_at(now_s, node)
        wanted = self.coordinator.wanted
        self._wanted_s = {shard: self._wanted_s.get(shard, now_s) for shard in wanted}
        for shard in wanted:
            if now_s >= self._wanted_s[shard] + self._lingers_s:
                self._recruit(shard)
        return out + self._save(now_s)

    def saved(self, shard: int) -> None:
        """Note that `shard` has the order to save."""
        self._saving.discard(shard)

    def _save(self, now_s: float) -> Outbox:
        """Order the next snapshot, when all shards have taken the last."""
        if not self._saves or self._saving or now_s < self.SAVE_S * (self._snapshot + 1) or self.coordinator._ending:
            return []
        self._snapshot += 1
        self._saving = set(range(len(self._holders)))
        return self.coordinator.save(now_s, self._snapshot)

    def _look_at(self, now_s: float, node: int) -> Outbox:
        if self._processes.alive(node):
            self._reported.discard(node)
            return []
        if not self._sees_deaths or node in self._reported:
            return []
        self._reported.add(node)
        return self.coordinator.lose(now_s, node)

    def _recruit(self, shard: int) -> None:
        """Start a blank copy on a node that holds none, and end the node's former process."""
        chain = self.coordinator.chains[shard]
        node = next(node for node in self._holders[shard] if node not in chain)
        self._processes.kill(node)
        self._on_wanted(shard, node)
        self._processes.restart(node, self.RESTART_S)
        self.coordinator.recruit(shard, node)
