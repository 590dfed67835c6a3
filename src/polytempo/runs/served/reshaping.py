"""`Reshapes`: changes of the number of shards after some epochs. The same in both worlds.

epoch 0 … e   all tickets done, no worker holds one ──▶ start copies, add_shard / drain_shard ──▶ epoch e+1 …
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence

from polytempo.server.coordinator.coordinator import Coordinator
from polytempo.server.coordinator.resharding import Reshaper
from polytempo.server.message import Outbox

Chain = tuple[int, ...]


class Reshapes:
    """`wanted`: epochs done -> shards from then on. `spares`: the nodes for the copies of each new shard.

    `start(shard, nodes)` starts the processes of a shard's copies.
    """

    def __init__(
        self,
        coordinator: Coordinator,
        wanted: Mapping[int, int],
        spares: Sequence[Chain],
        start: Callable[[int, Chain], None],
    ) -> None:
        self._coordinator, self._start = coordinator, start
        self._spares = deque(spares)
        self._ahead = deque(sorted(wanted.items()))
        self._check()
        self._pause()

    def look(self, now_s: float) -> Outbox:
        """Begin a change as soon as the epoch before it is done."""
        coordinator, reshaper = self._coordinator, self._coordinator.reshaper
        if not self._ahead or reshaper.busy or not coordinator.scheduler.quiet:
            return []
        _, number = self._ahead.popleft()
        holders = [shard for shard, spans in enumerate(reshaper.spans) if spans]
        out: Outbox = []
        for shard in range(len(reshaper.spans), len(reshaper.spans) + number - len(holders)):
            nodes = self._spares.popleft()
            self._start(shard, nodes)
            out += coordinator.add_shard(now_s, nodes)
        for shard in reversed(holders[number:]):
            out += coordinator.drain_shard(now_s, shard)
        if number == len(holders):
            coordinator.scheduler.resume()
            self._pause()
        return out

    def hear(self, event: tuple[str, int]) -> None:
        """Take an event of the coordinator; after a change, wait for the epoch of the next change."""
        if event[0] == "reshaped" and not self._coordinator.reshaper.busy:
            self._pause()

    def _pause(self) -> None:
        if self._ahead:
            scheduler = self._coordinator.scheduler
            scheduler.pause(at=self._ahead[0][0] * scheduler.batches_per_epoch)

    def _check(self) -> None:
        """Refuse impossible changes before the first step."""
        scheduler, reshaper = self._coordinator.scheduler, self._coordinator.reshaper
        trial = Reshaper(reshaper.parameters, reshaper.spans)
        for epoch, number in self._ahead:
            if epoch * scheduler.batches_per_epoch >= scheduler.num_tickets:
                raise ValueError(
                    f"reshape says {number} shards after epoch {epoch}, but the run ends after "
                    f"{scheduler.num_tickets / scheduler.batches_per_epoch:g} epochs; give earlier epochs"
                )
            holders = [shard for shard, spans in enumerate(trial.last) if spans]
            for _ in range(number - len(holders)):
                trial.add((-1,))
            for shard in reversed(holders[number:]):
                trial.drain(shard)
