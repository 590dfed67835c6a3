"""`Chains`: which nodes hold the copies of each shard, as the coordinator decides it.

shard 0   [ head | next | tail ]       a copy that is lost leaves its chain; the next one moves up
shard 1   [ head ]  ◀─ starting        a node that was started joins at the end, blank until it has the state
"""

from __future__ import annotations

from collections.abc import Sequence

from polytempo.core.errors import PolytempoError


class ShardLost(PolytempoError):
    """Every copy of a shard is gone, and with them its part of the parameters."""

    def __init__(self, shard: int, replicas: int) -> None:
        self.shard = shard
        remedy = "resume from the last snapshot" if replicas else "use replicas=1, or resume from the last snapshot"
        super().__init__(f"shard {shard} is lost with every copy of it; {remedy}")


class Chains:
    """`nodes[s]`: the nodes of shard s, the head first; () for a shard that was drained. Other parts may change it."""

    def __init__(self, chains: Sequence[Sequence[int]]) -> None:
        self.nodes = [tuple(chain) for chain in chains]
        self._copies = max(len(chain) for chain in chains)
        self._starting: dict[int, int] = {}
        """Nodes that were started to hold a copy and have not sent a message -> shard."""
        self._blank: set[int] = set()
        """Copies that do not have their shard's state yet."""

    @property
    def starting(self) -> set[int]:
        """The nodes that were started to hold a copy and have not sent a message."""
        return set(self._starting)

    def start(self, shard: int, node: int) -> None:
        """A process was started on `node` to hold a copy of `shard`."""
        self._starting[node] = shard

    def join(self, node: int) -> int | None:
        """`node` is alive. Returns its shard, which now has it in the chain; None if it was not being started."""
        shard = self._starting.pop(node, None)
        if shard is not None:
            self.nodes[shard] = (*self.nodes[shard], node)
            self._blank.add(node)
        return shard

    def take_state(self, node: int) -> None:
        """`node` has its shard's state."""
        self._blank.discard(node)

    def shard_of(self, node: int) -> int | None:
        """The shard with a copy on `node`; None if there is none."""
        return next((shard for shard, chain in enumerate(self.nodes) if node in chain), None)

    def cancel(self, node: int) -> None:
        """`node`, if it was being started, does not come."""
        self._starting.pop(node, None)

    def remove(self, node: int) -> None:
        """The copy on `node` is lost. Raises `ShardLost` where it was the last one."""
        if (shard := self.shard_of(node)) is None:
            return
        self.nodes[shard] = tuple(other for other in self.nodes[shard] if other != node)
        if not self.nodes[shard]:
            raise self.lost(shard)

    def lost(self, shard: int) -> ShardLost:
        """The error for a shard without a copy that has its state."""
        return ShardLost(shard, self._copies - 1)

    @property
    def lacking(self) -> list[int]:
        """The shards that lack a copy; copies being started count."""
        starting = list(self._starting.values())
        return [s for s, chain in enumerate(self.nodes) if chain and len(chain) + starting.count(s) < self._copies]

    @property
    def replaceable(self) -> set[int]:
        """The copies that are not the last one of their shard that has its state."""
        return {node for chain in self.nodes for node in chain if set(chain) - self._blank - {node}}
