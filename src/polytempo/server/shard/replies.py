"""The replies of a shard to pushes and pulls."""

from __future__ import annotations

from typing import Literal

from torch import Tensor

from polytempo.server.message import Pulled, Push, Pushed, Rows
from polytempo.server.snapshots.state import Waiting


def refused(shard: int, push: Push, version: int, verdict: Literal["dropped", "refused"], reason: str) -> Pushed:
    """The reply to a push that the rule does not see, from a shard whose weights are of `version`."""
    return Pushed(
        shard=shard,
        worker=push.worker,
        incarnation=push.incarnation,
        sequence=push.sequence,
        version=version,
        staleness=version - push.basis,
        verdict=verdict,
        reason=reason,
    )


def pushed(shard: int, worker: int, waiting: Waiting, version: int, difference: Tensor | None) -> Pushed:
    """The reply to a push on which the rule has decided. `difference`: that of elastic averaging."""
    return Pushed(
        shard=shard,
        worker=worker,
        incarnation=waiting.incarnation,
        sequence=waiting.sequence,
        version=version,
        staleness=waiting.staleness,
        verdict=waiting.verdict,
        reason=waiting.reason,
        difference=difference,
    )


def pulled(
    shard: int,
    worker: int,
    waiting: Waiting,
    version: int,
    values: Tensor,
    *,
    rows: tuple[Rows, ...],
    running: Tensor | None,
) -> Pulled:
    """The reply to a pull: the weights `values` of `version`, rows of tables, running statistics of norm layers."""
    return Pulled(
        shard=shard,
        worker=worker,
        incarnation=waiting.incarnation,
        sequence=waiting.sequence,
        version=version,
        values=values,
        rows=rows,
        running=running,
    )
