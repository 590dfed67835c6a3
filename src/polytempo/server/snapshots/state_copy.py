"""A shard's whole state as bytes, for a worker that keeps it: the training state of a loop of one's own.

rank 0 ──AskState──▶ head of each shard       while no worker has a batch in hand
       ◀─StateCopy──
later  a new shard begins with the bytes      the same weights, versions, moments and tickets
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from safetensors import SafetensorError
from torch import Tensor

from polytempo.core import Port, TimedOut
from polytempo.server.message import Message
from polytempo.server.shard.shard import Shard
from polytempo.server.snapshots.snapshot import FORGED, SnapshotPart, packed, unpacked
from polytempo.server.timing import Timing


class AskState(Message, frozen=True, eq=False):
    """To a shard's head: say what your state is."""

    shard: int


class StateCopy(Message, frozen=True, eq=False):
    """The answer, once every copy has all of it; see `packed`."""

    shard: int
    content: Tensor
    """As uint8: what `packed` has made."""


def copy_of(shard: Shard) -> StateCopy:
    """The state of `shard` as it is now."""
    return StateCopy(shard.number, torch.frombuffer(bytearray(packed(SnapshotPart(*shard.dump()))), dtype=torch.uint8))


def begin_with(shard: Shard, content: bytes) -> None:
    """Become the shard that `content` is of. ValueError where it is of another one."""
    try:
        found = unpacked(content)
        shard.load(found.state, found.tensors)
    except (SafetensorError, RuntimeError, *FORGED) as error:
        raise ValueError(
            f"the training state does not fit shard {shard.number} of this run ({type(error).__name__}: {error}); load "
            "one that a loop with the same model, stages and strategy has saved"
        ) from error


async def states_of(port: Port, heads: Sequence[int], timing: Timing) -> list[Tensor]:
    """The states of all shards, whose heads are these nodes. TimedOut where one does not answer."""
    found: dict[int, Tensor] = {}
    until_s = await port.now() + timing.deadline_s
    while len(found) < len(heads):
        for shard, head in enumerate(heads):
            if shard not in found:
                await port.post(AskState(shard), head)
        again_s = await port.now() + timing.retry_s
        while len(found) < len(heads) and (left_s := again_s - await port.now()) > 0:
            taken = await port.take(left_s)
            if taken is not None and isinstance(taken[1], StateCopy):
                found[taken[1].shard] = taken[1].content.clone()
        if await port.now() > until_s:
            missing = sorted(set(range(len(heads))) - set(found))
            raise TimedOut(port.world_rank, None, f"the state of shards {missing}", timing.deadline_s)
    return [found[shard] for shard in range(len(heads))]
