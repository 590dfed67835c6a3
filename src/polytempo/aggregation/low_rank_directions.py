"""Dion: an orthogonal step of low rank along momenta that stay with their ranks.

Source: K. Ahn, B. Xu, N. Abreu et al., "Dion: distributed orthonormalized updates", 2025.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from polytempo.aggregation.low_rank import (
    LowRankState,
    MatrixShape,
    Remembered,
    drawn_right,
    matrix_shapes,
    orthonormal_rows,
)
from polytempo.core import Bundle, Cost, Exchange, NotFinite, Port, Promise, Residual, Route, Sum, Transform, native
from polytempo.core.route import check_route
from polytempo.core.state import narrowed, wide
from polytempo.core.transform import averaging


def low_rank_directions(
    rank: int = 8,
    momentum: float = 0.95,
    scale: float = 0.2,
    but: Sequence[str] = (),
    route: Route = native,
    *,
    exact_below: int = 1024,
) -> Transform:
    """An orthogonal direction of rank r = `rank` for each matrix (n, m), from two sums of thin matrices.

        Mᵢ ← Mᵢ + shareᵢ gᵢ;  P = Σ Mᵢ Q;  P̂ = orthonormal columns of P;  R = Σ Mᵢᵀ P̂;  Mᵢ ← Mᵢ - (1 - μ) shareᵢ P̂ Rᵀ;
        Q ← R with columns of length 1;  the answer is scale √(n/m) P̂ Qᵀ

    μ = `momentum`. All is linear in Mᵢ, so N ranks make the step of one with the mean gradient, to rounding. Vectors,
    tensors of fewer than `exact_below` elements, and tensors with a part of `but` in their name, get the mean gradient.
    Mᵢ is a residual: a rank that leaves hands it on. QR is in float64, and Q the same on all ranks.

    Cost: the route's for r (n + m) numbers in two messages; 8 r n m operations; memory for M and Q.
    Errors: ValueError for a rank below 1 and a momentum not in [0, 1); NotFinite on every rank for NaN and infinities.
    """
    check_route(route)
    if rank < 1 or not 0 <= momentum < 1 or not 0 < scale < math.inf:
        raise ValueError(f"rank is at least 1, momentum in [0, 1), scale over 0; got {rank}, {momentum} and {scale}")
    made = _Directions(rank, momentum, scale, tuple(but), route, exact_below)
    return Transform(made.init, made.apply, Promise.SEPARABLE | Promise.WEIGHS, made.cost, averaging(route))


@dataclass(frozen=True)
class _Directions:
    """See `low_rank_directions`."""

    rank: int
    momentum: float
    scale: float
    but: tuple[str, ...]
    route: Route
    exact_below: int

    def shapes(self, bundle: Bundle) -> list[MatrixShape]:
        found = matrix_shapes(bundle.tensors, self.rank, self.exact_below)
        return [shape for shape in found if not any(part in shape.name for part in self.but)]

    def init(self, parameters: Bundle) -> LowRankState:
        found = {
            shape.name: Remembered(Residual(), drawn_right(shape, 0, 0, parameters.tensors[shape.name]))
            for shape in self.shapes(parameters)
        }
        return LowRankState(0, found)

    async def apply(self, port: Port, bundle: Bundle, state: LowRankState) -> tuple[Bundle, LowRankState]:
        if not bundle.tensors:
            return bundle, state
        share = 1 / port.size if bundle.share is None else bundle.share
        out = bundle.with_flat(bundle.scaled(share) if share else torch.zeros_like(bundle.flat))
        work = _Work(self, out, self.shapes(bundle), share)
        first = await port.compute(lambda: work.project(state.matrices), work.flops / 4)
        if port.size > 1:
            first = await self.route(port, first)
        second = await port.compute(lambda: work.answer(first), work.flops / 4)
        if port.size > 1 and work.shapes:
            second = await self.route(port, second)
        after = await port.compute(lambda: work.settle(second), work.flops / 2)
        return out, LowRankState(state.step + 1, after)

    def cost(self, parameters: Bundle, num_ranks: int) -> Cost:
        """Two sums; M and Q of each matrix."""
        shapes = self.shapes(parameters)
        itemsize = wide(next(iter(parameters.tensors.values()), torch.empty(0)).dtype).itemsize
        matrices = sum(s.rows * s.columns for s in shapes)
        rights = sum(s.columns * s.rank for s in shapes)
        rest = sum(tensor.numel() for tensor in parameters.tensors.values()) - matrices
        memory = itemsize * (matrices + rights)
        if num_ranks == 1:
            return Cost(memory_bytes=memory)
        sums = [Sum(self.route, sum(s.rows * s.rank for s in shapes) + rest, itemsize)]
        sums += [Sum(self.route, rights, itemsize)] if shapes else []
        return Cost((Exchange("low_rank_directions", sums=tuple(sums), flops=_flops(shapes)),), memory)


def _flops(shapes: Sequence[MatrixShape]) -> float:
    return float(sum(8 * s.rank * s.rows * s.columns for s in shapes))


class _Work:
    """The computations of one rank before, between and after the two sums; `out` holds its scaled gradient."""

    def __init__(self, directions: _Directions, out: Bundle, shapes: list[MatrixShape], share: float) -> None:
        self.directions, self.out, self.shapes, self.share = directions, out, shapes, share
        self.dtype = wide(out.flat.dtype)
        chosen = {shape.name for shape in shapes}
        self.exact = [view for name, view in out.views.items() if name not in chosen]
        self.sums: list[Tensor] = []
        """Mᵢ of each matrix, shape (n, m)."""
        self.lefts: list[Tensor] = []
        """P̂ᵀ of each matrix, shape (r, n)."""
        self.flops = _flops(shapes)

    def project(self, before: Mapping[str, Remembered]) -> Tensor:
        """The first message: Pᵀ of each matrix, then the other tensors."""
        found = []
        for shape in self.shapes:
            (residual,), right = before[shape.name].memory, before[shape.name].right
            assert right is not None
            gradient = self.out.views[shape.name].to(self.dtype)
            held = torch.zeros_like(gradient) if residual is None else residual
            self.sums.append(held.add_(gradient).view(shape.rows, shape.columns))
            found.append((right @ self.sums[-1].t()).reshape(-1))
        return torch.cat([*found, *(view.reshape(-1).to(self.dtype) for view in self.exact)])

    def answer(self, message: Tensor) -> Tensor:
        """The second message: Rᵀ of each matrix. Other tensors are put in their places."""
        sizes = [shape.rank * shape.rows for shape in self.shapes] + [view.numel() for view in self.exact]
        pieces = message.split(sizes)
        for view, piece in zip(self.exact, pieces[len(self.shapes) :], strict=True):
            view.copy_(narrowed(piece.view(view.shape), view))
        for shape, piece in zip(self.shapes, pieces, strict=False):
            if not piece.is_meta and not bool(piece.isfinite().all()):
                raise NotFinite("low_rank_directions", 0, float(piece.sum()), f"the sum over all ranks of {shape.name}")
            self.lefts.append(orthonormal_rows(piece.view(shape.rank, shape.rows)))
        found = [(left @ held).reshape(-1) for left, held in zip(self.lefts, self.sums, strict=True)]
        return torch.cat(found) if found else message.new_empty(0)

    def settle(self, message: Tensor) -> dict[str, Remembered]:
        """Put each direction into its place, and take the sent part off Mᵢ."""
        after = {}
        pieces = message.split([shape.rank * shape.columns for shape in self.shapes])
        for shape, left, held, piece in zip(self.shapes, self.lefts, self.sums, pieces, strict=True):
            r, view = piece.view(shape.rank, shape.columns), self.out.views[shape.name]
            held.sub_(left.t() @ r, alpha=(1 - self.directions.momentum) * self.share)
            lengths = r.norm(dim=1, keepdim=True)
            right = r / torch.where(lengths > 0, lengths, 1)
            factor = self.directions.scale * math.sqrt(shape.rows / shape.columns)
            view.copy_(narrowed((left.t() @ right * factor).view(view.shape), view))
            after[shape.name] = Remembered(Residual(held.view(view.shape)), right)
        return after
