"""`ServerRanks`: those of a launcher's processes that hold a parameter server's shards instead of training."""

from __future__ import annotations

from typing import NamedTuple

from torch._C._distributed_c10d import Store


class ServerRanks(NamedTuple):
    """What a worker knows of them. See `engines.server_ranks`."""

    ranks: tuple[int, ...]
    """As the launcher numbers its processes."""
    store: Store
    """Where they wait for a ticket."""
    spread: bool
    """Whether the launcher's processes are on several hosts."""

    def worker(self, rank: int) -> int:
        """The rank among workers of the launcher's `rank`; -1 for one that serves."""
        return -1 if rank in self.ranks else rank - sum(server < rank for server in self.ranks)
