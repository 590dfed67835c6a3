"""`ModelGroup`: the ranks that hold the parts of one model's layers, and their exchanges.

Sums are formed in the order of ranks, so all ranks have the same bits of them, in every world. All exchanges are one
or two all-to-alls (`rounds`), because parts may have different sizes. With N ranks and K bytes of the whole tensor:

| exchange | rounds | bytes of all ranks |
|---|---|---|
| `gather` parts into the whole | 1 | (N-1) · K |
| `reduce` partial sums to parts of the sum | 1 | (N-1) · K |
| `total`: the sum on all ranks | 2 | 2(N-1) · K |

With `wires`, a codec Q for each way, K counts the wires of the pieces; each rank has, or gets, one:

    gather    [Q(x_0) │ Q(x_1) │ …]                            the sender, too, goes on with the decoded wire
    reduce    s_j = p_j[j] + Σ_{r≠j} Q(p_r[j])                 the sender encodes; the own piece is added as it is
    total     [Q(s_0) │ Q(s_1) │ …], with s_j as above         so a number is encoded at most twice

Gradients pass Q as if it were the identity, as in pipelines (`partition.wires`). Gradients of parameters that all ranks
hold, and exchanges of checks and losses, travel without codecs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import prod
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from polytempo.core import Port, Program
from polytempo.partition.tensor.rounds import AS_IT_IS, RoundCodec, to_all, to_owners
from polytempo.partition.wires import AS_THEY_ARE, Wires

Drive = Callable[[Program[Any]], Any]
"""Runs a coroutine to its end, while the caller waits: a process world's `drive`, or `core.suspension.drive`."""


class Occasion(NamedTuple):
    """An exchange's number in its pass, for codecs that draw random numbers; the same on all ranks."""

    step: int = 1
    number: int = 0


@dataclass(eq=False)
class ModelGroup:
    """One rank's place in a model's group. `sequence`: between split layers each rank has some of the positions."""

    port: Port
    drive: Drive
    sequence: bool = False
    wires: Wires = AS_THEY_ARE
    """The codecs of split layers' exchanges in forward passes, and in backward passes."""
    positions: tuple[int, ...] = field(default=(), init=False)
    """The division of the present pass's sequence."""
    passes: int = field(default=0, init=False)
    """Forward passes of the model so far."""
    layer: str | None = field(default=None, init=False)
    """The layer that computes now; its exchanges are counted."""
    sent: dict[str, list[float]] = field(default_factory=dict, init=False)
    """Layer's name -> bytes that all ranks have sent in forward and in backward passes."""
    _backward: Occasion | None = field(default=None, init=False)
    _occasion: Occasion = field(default=Occasion(), init=False)
    """The last exchange that has begun."""

    def __deepcopy__(self, memo: dict[int, Any]) -> ModelGroup:
        """Return this group: a copied model is of the same ranks."""
        return self

    @property
    def rank(self) -> int:
        """This rank's position."""
        return self.port.rank

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self.port.size

    def drawn(self, *, training: bool) -> int:
        """The number that codecs draw by in a pass: from torch's random state, as for dropouts, so that a pass that is
        computed again, or in a run that goes on, has the same bits. An evaluation takes none."""
        return 1 + int(torch.randint(2**31, ())) if training and self.wires.draws else 1

    def begin_pass(self, drawn: int) -> None:
        """Begin a forward pass; `drawn` is the same on all ranks."""
        self.passes += 1
        self._occasion = Occasion(drawn)

    @contextmanager
    def of_layer(self, name: str | None, *, backward: Occasion | None = None) -> Iterator[None]:
        """Count exchanges inside for the layer, unless it is in another one; with `backward`, as the way back of that
        occasion."""
        before = self.layer, self._backward
        self.layer, self._backward = self.layer or name, backward
        try:
            yield
        finally:
            self.layer, self._backward = before

    def next_occasion(self) -> Occasion:
        """The occasion of the next exchange, and of its way back."""
        self._occasion = Occasion(self._occasion.step, self._occasion.number + 1)
        return self._occasion

    def count(self, forward: float, backward: float = 0.0) -> None:
        """Count bytes that all ranks send for the layer that computes now."""
        if self.layer is not None:
            found = self.sent.setdefault(self.layer, [0.0, 0.0])
            found[0] += forward
            found[1] += backward

    def _passage(self, likes: Sequence[Tensor], wires: Wires | None) -> RoundCodec:
        """The codec of tensors like these; `wires` None: the group's."""
        codec = (wires or self.wires).common_codec(self._way, likes)
        if codec is None:
            return AS_IT_IS
        step, number = self._backward or self._occasion
        what = "gradients" if self._backward else "activations"
        return RoundCodec(codec, step, 4 * number + 2 * bool(self._backward), f"the {what} of layer {self.layer}")

    def _counted(self, likes: Sequence[Tensor], wires: Wires | None, rounds: int = 1) -> None:
        each = (self.size - 1) * rounds * (wires or self.wires).common_bytes(self._way, likes)
        self.count(0.0, each) if self._backward else self.count(each)

    @property
    def _way(self) -> Literal["forward", "backward"]:
        return "backward" if self._backward else "forward"

    def gather(self, part: Tensor, sizes: Sequence[int], dim: int, wires: Wires | None = None) -> Tensor:
        """The whole tensor; rank r has `sizes[r]` indices along `dim`."""
        if self.size == 1:
            return part
        likes = _flat_parts(part, sizes, dim)
        whole: Tensor = self.drive(gathered_parts(self.port, part, sizes, dim, self._passage(likes, wires)))
        self._counted(likes, wires)
        return whole

    def reduce(self, partial: Tensor, sizes: Sequence[int], dim: int, wires: Wires | None = None) -> Tensor:
        """This rank's part along `dim` of the sum of all ranks' tensors."""
        if self.size == 1:
            return partial
        pieces = [piece.contiguous() for piece in partial.split(list(sizes), dim)]
        flat = [piece.view(-1) for piece in pieces]
        part: Tensor = self.drive(to_owners(self.port, flat, self._passage(flat, wires)))
        self._counted(flat, wires)
        return part.view_as(pieces[self.rank])

    def total(self, partial: Tensor, wires: Wires | None = None) -> Tensor:
        """The sum of all ranks' tensors."""
        if self.size == 1:
            return partial
        pieces = partial.contiguous().view(-1).tensor_split(self.size)
        whole: Tensor = self.drive(_total(self.port, pieces, self._passage(pieces, wires)))
        self._counted(pieces, wires, rounds=2)
        return whole.view(partial.shape)

    def deal(
        self, sent: Mapping[int, Tensor], likes: Mapping[int, Tensor], all_likes: Sequence[Tensor]
    ) -> dict[int, Tensor]:
        """Send `sent[r]` to rank r for some ranks, and return a tensor like `likes[r]` from each rank r of these.

        `all_likes`: tensors like all that travel between any ranks, the same on all of them.
        """
        if not all_likes:
            return {}
        found: dict[int, Tensor] = self.drive(_dealt(self.port, sent, likes, self._passage(all_likes, None)))
        total = self.wires.common_bytes(self._way, all_likes)
        self.count(0.0, total) if self._backward else self.count(total)
        return found

    def all(self, mine: Tensor) -> list[Tensor]:
        """Every rank's tensor; all have one shape."""
        found: list[Tensor] = [mine] if self.size == 1 else self.drive(_all(self.port, mine))
        return found


async def gathered_parts(port: Port, part: Tensor, sizes: Sequence[int], dim: int, by: RoundCodec = AS_IT_IS) -> Tensor:
    """The whole tensor; rank r has `sizes[r]` indices along `dim`."""
    shapes = _shapes(part, sizes, dim)
    found = await to_all(port, part.contiguous().view(-1), _flat_parts(part, sizes, dim), by)
    return torch.cat([each.view(shape) for each, shape in zip(found, shapes, strict=True)], dim)


async def _total(port: Port, pieces: Sequence[Tensor], by: RoundCodec) -> Tensor:
    mine = await to_owners(port, pieces, by)
    return torch.cat(await to_all(port, mine, pieces, by._replace(number=by.number + 1)))


async def _dealt(
    port: Port, sent: Mapping[int, Tensor], likes: Mapping[int, Tensor], by: RoundCodec
) -> dict[int, Tensor]:
    """Messages between some pairs of ranks; all receives begin before the sends."""
    flat = {rank: like.new_empty(()).expand(like.numel()) for rank, like in likes.items()}
    rooms = {rank: by.room(like) for rank, like in flat.items()}
    coming = {rank: await port.start(port.recv(room, rank)) for rank, room in rooms.items()}
    wires = {rank: await by.wire(port, tensor.reshape(-1)) for rank, tensor in sent.items()}
    going = [await port.start(port.send(wire, rank)) for rank, wire in wires.items()]
    found = {rank: await by.opened(port, await each, flat[rank], rank) for rank, each in coming.items()}
    for sending in going:
        await sending
    return {rank: tensor.view(likes[rank].shape) for rank, tensor in found.items()}


async def _all(port: Port, mine: Tensor) -> list[Tensor]:
    return await port.all_gather(mine)


def _shapes(part: Tensor, sizes: Sequence[int], dim: int) -> list[list[int]]:
    return [[*part.shape[:dim], size, *part.shape[dim + 1 :]] for size in sizes]


def _flat_parts(part: Tensor, sizes: Sequence[int], dim: int) -> list[Tensor]:
    """Tensors like every rank's part, flat."""
    return [part.new_empty(()).expand(prod(shape)) for shape in _shapes(part, sizes, dim)]
