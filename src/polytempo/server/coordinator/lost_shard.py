"""The error with which the coordinator ends a run whose parameters are lost."""

from __future__ import annotations

from polytempo.core.errors import PolytempoError


class ShardLost(PolytempoError):
    """Every copy of a shard is gone, and with them its part of the parameters."""

    def __init__(self, shard: int, replicas: int) -> None:
        self.shard = shard
        remedy = "resume from the last snapshot" if replicas else "use replicas=1, or resume from the last snapshot"
        super().__init__(f"shard {shard} is lost with every copy of it; {remedy}")
