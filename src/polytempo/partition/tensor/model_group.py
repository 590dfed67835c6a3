"""`ModelGroup`: the ranks that hold the parts of one model's layers, and what they exchange.

Sums are formed in the order of ranks, so all ranks have the same bits of them, in every world. All exchanges are one
or two all-to-alls, because parts may have different sizes. With N ranks and K bytes of the whole tensor:

| exchange | rounds | bytes of all ranks |
|---|---|---|
| `gather` parts into the whole | 1 | (N-1) · K |
| `reduce` partial sums to parts of the sum | 1 | (N-1) · K |
| `total`: the sum on all ranks | 2 | 2(N-1) · K |
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch
from torch import Tensor

from polytempo.core import Port, Program

Drive = Callable[[Program[Any]], Any]
"""Runs a coroutine to its end, while the caller waits: a process world's `drive`, or `core.suspension.drive`."""


@dataclass(eq=False)
class ModelGroup:
    """One rank's place among those of a model. `sequence`: between split layers each rank has some of the positions."""

    port: Port
    drive: Drive
    sequence: bool = False
    positions: tuple[int, ...] = field(default=(), init=False)
    """How the sequence of the pass under way is divided."""
    passes: int = field(default=0, init=False)
    """Forward passes of the model so far."""
    layer: str | None = field(default=None, init=False)
    """That which computes now, whose exchanges are counted."""
    sent: dict[str, list[float]] = field(default_factory=dict, init=False)
    """By layers' names: bytes that all ranks have sent in forward and in backward passes."""
    _backward: bool = field(default=False, init=False)

    def __deepcopy__(self, memo: dict[int, Any]) -> ModelGroup:
        """A copied model is of the same ranks."""
        return self

    @property
    def rank(self) -> int:
        """This rank's position."""
        return self.port.rank

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self.port.size

    @contextmanager
    def of_layer(self, name: str | None, *, backward: bool = False) -> Iterator[None]:
        """Inside, exchanges count as those of the layer, unless it lies in another one that computes."""
        before = self.layer, self._backward
        self.layer, self._backward = self.layer or name, backward
        try:
            yield
        finally:
            self.layer, self._backward = before

    def count(self, forward: float, backward: float = 0.0) -> None:
        """Bytes that all ranks send for the layer that computes now."""
        if self.layer is not None:
            found = self.sent.setdefault(self.layer, [0.0, 0.0])
            found[0] += forward
            found[1] += backward

    def _counted(self, num_bytes: float) -> None:
        each = (self.size - 1) * num_bytes
        self.count(0.0, each) if self._backward else self.count(each)

    def gather(self, part: Tensor, sizes: Sequence[int], dim: int) -> Tensor:
        """The whole tensor, of which rank r has `sizes[r]` indices along `dim`."""
        if self.size == 1:
            return part
        whole: Tensor = self.drive(gathered_parts(self.port, part, sizes, dim))
        self._counted(whole.nbytes)
        return whole

    def reduce(self, partial: Tensor, sizes: Sequence[int], dim: int) -> Tensor:
        """This rank's part along `dim` of the sum of all ranks' tensors."""
        if self.size == 1:
            return partial
        part: Tensor = self.drive(_reduced(self.port, partial, sizes, dim))
        self._counted(partial.nbytes)
        return part

    def total(self, partial: Tensor) -> Tensor:
        """The sum of all ranks' tensors."""
        if self.size == 1:
            return partial
        whole: Tensor = self.drive(_total(self.port, partial))
        self._counted(2 * partial.nbytes)
        return whole

    def all(self, mine: Tensor) -> list[Tensor]:
        """Every rank's tensor; all have one shape."""
        found: list[Tensor] = [mine] if self.size == 1 else self.drive(_all(self.port, mine))
        return found


async def gathered_parts(port: Port, part: Tensor, sizes: Sequence[int], dim: int) -> Tensor:
    """The whole tensor, of which rank r has `sizes[r]` indices along `dim`."""
    flat = part.contiguous().view(-1)
    shapes = [[*part.shape[:dim], size, *part.shape[dim + 1 :]] for size in sizes]
    likes = [flat.new_empty(()).expand(prod(shape)) for shape in shapes]
    found = await port.all_to_all([flat] * port.size, likes)
    return torch.cat([each.view(shape) for each, shape in zip(found, shapes, strict=True)], dim)


async def _reduced(port: Port, partial: Tensor, sizes: Sequence[int], dim: int) -> Tensor:
    pieces = [piece.contiguous() for piece in partial.split(list(sizes), dim)]
    mine = pieces[port.rank]
    found = await port.all_to_all([piece.view(-1) for piece in pieces], [mine.view(-1)] * port.size)
    return _sum(found).view_as(mine)


async def _total(port: Port, partial: Tensor) -> Tensor:
    pieces = partial.contiguous().view(-1).tensor_split(port.size)
    mine = _sum(await port.all_to_all(pieces, [pieces[port.rank]] * port.size))
    return torch.cat(await port.all_to_all([mine] * port.size, pieces)).view(partial.shape)


async def _all(port: Port, mine: Tensor) -> list[Tensor]:
    return await port.all_gather(mine)


def _sum(found: Sequence[Tensor]) -> Tensor:
    total = found[0].clone()
    for each in found[1:]:
        total += each
    return total
