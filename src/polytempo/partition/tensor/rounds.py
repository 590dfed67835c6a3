"""The all-to-alls that make up exchanges between split layers, without or with a codec Q.

    to_all       x̂_r = Q(x_r) for each rank r's tensor x_r                on all ranks, on r itself, too
    to_each      Q(p_r[j]) for each rank r, of its p_r in pieces p_r[j]   on rank j, which takes its p_j[j] as it is
    to_owners    s_j = Σ_r Q(p_r[j])                                      the sum of these

`to_owners` and then `to_all` of the s_j make the sum of all p_r on all ranks. A tensor that all ranks hold alike is
decoded from one wire on all of them, and sums are formed in the order of ranks, in the tensors' dtype: so all ranks
have the same bits, in every world. A number is encoded once in a `to_all` or a `to_owners`, and twice in a sum on all
ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from polytempo.core import Codec, EncodeContext, Port
from polytempo.core.coding import decoded, encoded, wire_like


class RoundCodec(NamedTuple):
    """The codec of one exchange; the same on all ranks. Without a codec, tensors travel as they are."""

    codec: Codec | None = None
    step: int = 1
    """The seed of codecs that draw: another one in each pass."""
    number: int = 0
    """The number of the exchange in its pass, and of its round."""
    what: str = ""
    """The name of the tensors in errors."""

    def when(self, port: Port, sender: int) -> EncodeContext:
        """The context of tensors that the rank at position `sender` encodes."""
        return EncodeContext(step=self.step, rank=port.members[sender], tensor=self.number)

    async def wire(self, port: Port, mine: Tensor) -> Tensor:
        """A flat tensor as it travels."""
        if self.codec is None:
            return mine
        if not mine.numel():
            return mine.new_empty(0, dtype=self.codec.wire_dtype(mine))
        where = f"{self.what} on rank {port.world_rank}"
        return await encoded(port, mine, self.codec, self.when(port, port.rank), where)

    def room(self, like: Tensor) -> Tensor:
        """A receive buffer for a tensor like this."""
        if self.codec is None:
            return like
        return wire_like(self.codec, like) if like.numel() else like.new_empty(0, dtype=self.codec.wire_dtype(like))

    async def opened(self, port: Port, wire: Tensor, like: Tensor, sender: int) -> Tensor:
        """The tensor that travelled, shaped like `like`."""
        if self.codec is None:
            return wire
        own = torch.empty(like.shape, dtype=like.dtype, device=like.device)
        return await decoded(port, wire, own, self.codec, self.when(port, sender)) if like.numel() else own


AS_IT_IS = RoundCodec()


async def to_all(port: Port, mine: Tensor, likes: Sequence[Tensor], by: RoundCodec) -> list[Tensor]:
    """Every rank's flat tensor; rank r's is like `likes[r]`.

    Cost: each rank sends its wire to all others; all of them together (N-1) · Σ_r bytes of the wire of likes[r].
    """
    wire = await by.wire(port, mine)
    found = await port.all_to_all([wire] * port.size, [by.room(like) for like in likes])
    return [await by.opened(port, each, likes[sender], sender) for sender, each in enumerate(found)]


async def to_owners(port: Port, pieces: Sequence[Tensor], by: RoundCodec) -> Tensor:
    """The sum over ranks of `pieces[j]`, which is flat, at rank j.

    Cost: each rank sends wires to all others; all of them together (N-1) · Σ_j bytes of the wire of pieces[j].
    """
    return _sum(await to_each(port, pieces, [pieces[port.rank]] * port.size, by))


async def to_each(port: Port, pieces: Sequence[Tensor], likes: Sequence[Tensor], by: RoundCodec) -> list[Tensor]:
    """The ranks' pieces for this one: `pieces[j]`, which is flat, is for rank j, and rank r's piece is like `likes[r]`.
    The own piece stays as it is.

    Cost: each rank sends wires to all others.
    """
    if by.codec is None:
        return list(await port.all_to_all(pieces, likes))
    mine = pieces[port.rank]
    stays = mine.new_empty(0, dtype=by.codec.wire_dtype(mine))
    others = [position for position in range(port.size) if position != port.rank]
    wires, rooms = [stays] * port.size, [stays] * port.size
    for position in others:
        wires[position], rooms[position] = await by.wire(port, pieces[position]), by.room(likes[position])
    found = list(await port.all_to_all(wires, rooms))
    for position in others:
        found[position] = await by.opened(port, found[position], likes[position], position)
    found[port.rank] = mine
    return found


def _sum(found: Sequence[Tensor]) -> Tensor:
    total = found[0].clone()
    for each in found[1:]:
        total += each
    return total
