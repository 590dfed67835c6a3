"""PowerSGD: the mean of matrices, sent as the product of two thin ones.

    M (n, m)  ──·Q──▶  P (n, r)  ──all-reduce──▶  orthonormal columns P̂
                                                      │
    M̂ = P̂ Qᵀ  ◀──all-reduce──  Q = Mᵀ P̂ (m, r)  ◀─────┘          the next step begins with this Q

The rest of M stays with the ranks, and goes with the next gradient. In memory P and Q are transposed, with r long rows:
torch multiplies M by a thin matrix of columns at a quarter to a tenth of the speed of Qᵀ Mᵀ and P̂ᵀ M.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, NoReturn
from zlib import crc32

import torch
from torch import Tensor

from polytempo.core import (
    Bundle,
    Cost,
    Exchange,
    NotFinite,
    Port,
    Promise,
    Residual,
    Route,
    Sum,
    Transform,
    averaging,
    call_name,
    native,
)
from polytempo.core.arithmetic.kernel_use import KernelUse, Uses
from polytempo.core.calls.typed_arguments import check_whole
from polytempo.core.route import check_route
from polytempo.core.state import narrowed, wide

EXACT_BELOW = 1024
"""The default: tensors of fewer elements travel as they are."""


class Remembered(NamedTuple):
    """One matrix: this rank's residual, shaped like the parameter, and Qᵀ, shape (r, m); None: not kept.

    Both are of the dtype that is computed with: a residual of 16 bits would lose a part of M in every step.
    """

    memory: Residual
    right: Tensor | None


class LowRankState(NamedTuple):
    """The number of exchanges, and the memory of each compressed matrix, by name."""

    step: int
    matrices: dict[str, Remembered]


class MatrixShape(NamedTuple):
    """A tensor seen as a matrix (n, m), and the rank r that it travels by."""

    name: str
    rows: int
    columns: int
    rank: int

    @property
    def pays(self) -> bool:
        """True if P and Q together are smaller than the matrix."""
        return (self.rows + self.columns) * self.rank < self.rows * self.columns


def low_rank(
    rank: int = 2,
    route: Route = native,
    *,
    exact_below: int = EXACT_BELOW,
    warm_start: bool = True,
    seed: int = 0,
) -> Transform:
    """The mean of all ranks, weighted by samples, each tensor of it by a matrix of rank r = `rank`; the rest stays.

    A tensor is seen as a matrix [shape[0], rest]. On rank i, with residual eᵢ:

        Mᵢ = shareᵢ · gᵢ + eᵢ;  P = Σ Mᵢ Q;  P̂ = orthonormal columns of P;  Q ← Σ Mᵢᵀ P̂;  M̂ = P̂ Qᵀ;
        eᵢ ← Mᵢ - shareᵢ · M̂

    so Σ eᵢ = Σ Mᵢ - M̂: over the steps nothing is lost. M̂ is the projection of ΣM on the span of P, exact where ΣM has
    no more than r independent directions that Q sees. For P, each column of Q is divided by its largest entry, which P̂
    does not notice: gradients near 1e-30 and 1e30 are projected as those near 1. With `warm_start` each step goes on
    from the Q of the one before, a power iteration over the steps; without it Q is drawn each time. The first Q is a
    pure function of `seed` and the parameter's name, so ranks agree on it for any buckets.

    Vectors, tensors of fewer than `exact_below` elements, and matrices that r makes no smaller ((n + m) · r ≥ n · m)
    travel as they are, with the Ps: two all-reduces a step by `route`, never three. At r ≥ min(n, m) that is all of
    them, and the mean is exact.

    All ranks end with the same bits where they compute alike: P̂ comes from the same sum by QR in float64, which also
    finds orthonormal columns for a P with dependent or zero ones, so Q comes back to life after a gradient of zeros.
    With one rank nothing is left out; the residual from a time with several is given.

    Cost: the route's for r (n + m) numbers where n · m would travel, in two messages; 6 r n m operations; memory for
    the residual and Q. 16-bit tensors are computed, sent and held back in float32, so they gain half as much.

    Raises ValueError for a rank below 1, NotFinite on every rank where one of them has NaN or an infinity in a matrix
    (before anything is remembered; tensors that travel as they are pass it on).

    Source: T. Vogels, S. P. Karimireddy and M. Jaggi, "PowerSGD: practical low-rank gradient compression for
    distributed optimization", 2019, Algorithms 1 and 2. There all ranks keep M - M̂ of their unscaled gradients, which
    is N times our eᵢ for equal shares; momentum comes after the exchange, as here. The paper's code makes P orthogonal
    by Gram-Schmidt, which divides by zero where columns depend on each other. Its later package (`powersgd` on PyPI)
    uses QR as here, sends P in one step and Q in the next, and begins after 100 uncompressed steps.
    """
    check_whole(rank=rank, exact_below=exact_below, seed=seed)
    check_route(route)
    if rank < 1:
        raise ValueError(f"low_rank needs a rank of at least 1, got {rank}")
    if exact_below < 0:
        raise ValueError(f"exact_below must be a number of elements >= 0, got {exact_below}")

    made = _LowRank(call_name(low_rank, {"rank": rank}), rank, route, exact_below, warm_start, seed)
    return Transform(made.init, made.apply, Promise.SEPARABLE | Promise.WEIGHS, made.cost, averaging(route))


@dataclass(frozen=True)
class _LowRank:
    """See `low_rank`."""

    name: str
    rank: int
    route: Route
    exact_below: int
    warm_start: bool
    seed: int

    def init(self, parameters: Bundle) -> LowRankState:
        found = {}
        for shape in self._compressed(parameters):
            right = drawn_right(shape, self.seed, 0, parameters.tensors[shape.name]) if self.warm_start else None
            found[shape.name] = Remembered(Residual(), right)
        return LowRankState(0, found)

    async def apply(self, port: Port, bundle: Bundle, state: LowRankState) -> tuple[Bundle, LowRankState]:
        if port.size == 1 or not bundle.tensors:
            return _given(bundle, state)
        work = _Step(port, bundle, self._compressed(bundle), self.name)
        rights = {s.name: state.matrices[s.name].right for s in work.shapes}
        for s in work.shapes:
            if rights[s.name] is None:
                rights[s.name] = drawn_right(s, self.seed, state.step + 1, bundle.tensors[s.name])
        first = await port.compute(
            lambda: work.project(state.matrices, rights), work.flops / 3, uses=work.uses("project")
        )
        first = await self.route(port, first)
        second = await port.compute(lambda: work.answer(first), work.flops / 3, uses=work.uses("answer"))
        if work.shapes:
            second = await self.route(port, second)
        matrices = await port.compute(
            lambda: work.settle(second, state.matrices, self.warm_start), work.flops / 3, uses=work.uses("settle")
        )
        return work.out, LowRankState(state.step + 1, state.matrices | matrices)

    def cost(self, parameters: Bundle, num_ranks: int) -> Cost:
        """Two sums, and M for each matrix with, where it is kept, Q."""
        tensors, shapes = parameters.tensors, self._compressed(parameters)
        first = next(iter(tensors.values()), torch.empty(0))
        itemsize = wide(first.dtype).itemsize
        matrices = sum(shape.rows * shape.columns for shape in shapes)
        lefts, rights = (
            sum(n * s.rank for n, s in zip(each, shapes, strict=True))
            for each in ([s.rows for s in shapes], [s.columns for s in shapes])
        )
        if num_ranks == 1:
            return Cost(memory_bytes=itemsize * rights if self.warm_start else 0)
        rest = sum(tensor.numel() for tensor in tensors.values()) - matrices
        sums = [Sum(self.route, lefts + rest, itemsize), *([Sum(self.route, rights, itemsize)] if shapes else [])]
        flops = float(sum(6 * s.rank * s.rows * s.columns for s in shapes))
        memory = itemsize * (matrices + (rights if self.warm_start else 0))
        return Cost((Exchange(self.name, sums=tuple(sums), flops=flops),), memory)

    def _compressed(self, bundle: Bundle) -> list[MatrixShape]:
        return [shape for shape in matrix_shapes(bundle.tensors, self.rank, self.exact_below) if shape.pays]


class _Step:
    """One exchange on one rank: the three computations around the two all-reduces."""

    def __init__(self, port: Port, bundle: Bundle, shapes: Sequence[MatrixShape], name: str) -> None:
        self.shapes, self.name, self.rank = shapes, name, port.rank
        self.share = 1 / port.size if bundle.share is None else bundle.share
        scaled = bundle.scaled(self.share) if self.share else torch.zeros_like(bundle.flat)
        self.out = bundle.with_flat(scaled)
        self.dtype = wide(scaled.dtype)
        """The dtype of computations and messages."""
        matrices = {shape.name for shape in shapes}
        self.exact = [view for name, view in self.out.views.items() if name not in matrices]
        self.sums: dict[str, Tensor] = {}
        """Mᵢ of each matrix, shape (n, m)."""
        self.lefts: list[Tensor] = []
        """P̂ᵀ of each matrix, shape (r, n)."""
        self._begin = sum(shape.rows * shape.rank for shape in shapes)
        """The place in the first message after the Ps."""
        self.flops = float(sum(6 * s.rank * s.rows * s.columns for s in shapes))

    def uses(self, part: Literal["project", "answer", "settle"]) -> Uses:
        """The load of one of the three computations: bytes of the matrices, operations of their products by P or Q."""
        num_bytes = self.dtype.itemsize * sum(s.rows * s.columns for s in self.shapes)
        return (KernelUse(f"low_rank {part}", len(self.shapes), num_bytes, self.flops / 3),)

    def project(self, before: Mapping[str, Remembered], rights: Mapping[str, Tensor | None]) -> Tensor:
        """The first message: P of each matrix, then the uncompressed tensors."""
        message = self._message([s.rows * s.rank for s in self.shapes] + [view.numel() for view in self.exact])
        for shape, left in zip(self.shapes, self._matrices(message, left=True), strict=True):
            residual = before[shape.name].memory.residual
            matrix = self._sum(shape, residual)
            self.sums[shape.name] = matrix
            right = rights[shape.name]
            assert right is not None
            torch.mm(_without_scale(right).to(matrix), matrix.t(), out=left)
        for view, place in zip(self.exact, self._rest(message), strict=True):
            place.copy_(view.reshape(-1))
        return message

    def answer(self, message: Tensor) -> Tensor:
        """The second message, Q of each matrix, from the summed first one. Uncompressed tensors are put in their
        places."""
        for view, place in zip(self.exact, self._rest(message), strict=True):
            view.copy_(narrowed(place.view(view.shape), view))
        lefts = list(self._matrices(message, left=True))
        if lefts and not message.is_meta and not bool(message[: self._begin].isfinite().all()):
            self._refuse(lefts)
        self.lefts = [orthonormal_rows(left) for left in lefts]
        answer = self._message([s.columns * s.rank for s in self.shapes])
        for shape, left, right in zip(self.shapes, self.lefts, self._matrices(answer, left=False), strict=True):
            torch.mm(left, self.sums[shape.name], out=right)
        return answer

    def settle(self, message: Tensor, before: Mapping[str, Remembered], keep: bool) -> dict[str, Remembered]:
        """Put M̂ into its place, and the rest into the residual's memory."""
        after = {}
        rights = self._matrices(message, left=False)
        for shape, left, right in zip(self.shapes, self.lefts, rights, strict=True):
            view, matrix = self.out.views[shape.name], self.sums.pop(shape.name)
            residual = before[shape.name].memory.residual
            if residual is None or residual.dtype is not self.dtype:
                residual = torch.empty_like(view, dtype=self.dtype)
            if view.dtype is self.dtype:  # matrix is view
                residual.copy_(view)
                torch.mm(left.t(), right, out=matrix)
                residual.sub_(view, alpha=self.share)
            else:
                view.copy_(narrowed(torch.mm(left.t(), right).view(view.shape), view))
                torch.sub(matrix.view(view.shape), view, alpha=self.share, out=residual)
            after[shape.name] = Remembered(Residual(residual), right.clone() if keep else None)
        return after

    def _sum(self, shape: MatrixShape, residual: Tensor | None) -> Tensor:
        """Mᵢ, in the gradient's memory if its dtype allows."""
        view = self.out.views[shape.name]
        if view.dtype is not self.dtype:
            view = view.to(self.dtype)
        if residual is not None:
            view.add_(residual)
        return view.view(shape.rows, shape.columns)

    def _message(self, sizes: Sequence[int]) -> Tensor:
        return torch.empty(sum(sizes), dtype=self.dtype, device=self.out.flat.device)

    def _matrices(self, message: Tensor, *, left: bool) -> list[Tensor]:
        """The message's Pᵀs (`left`) or Qᵀs, as windows into it."""
        found, place = [], 0
        for shape in self.shapes:
            length = shape.rows if left else shape.columns
            found.append(message[place : place + length * shape.rank].view(shape.rank, length))
            place += length * shape.rank
        return found

    def _rest(self, message: Tensor) -> list[Tensor]:
        """The windows after the Ps in the first message."""
        return list(message[self._begin :].split([view.numel() for view in self.exact]))

    def _refuse(self, lefts: Sequence[Tensor]) -> NoReturn:
        """Raise on every rank: an infinity or NaN of any of them is in a column of Pᵀ on all."""
        shape, left = next((s, p) for s, p in zip(self.shapes, lefts, strict=True) if not bool(p.isfinite().all()))
        wrong = int((~left.isfinite()).any(dim=0).nonzero()[0])
        row = self.sums[shape.name][wrong]
        own = (~row.isfinite()).nonzero()
        if len(own):
            column = int(own[0])
            place, value = f"{shape.name} on rank {self.rank}", float(row[column])
        else:
            column = 0
            place, value = f"{shape.name} (or of its row) in the sum over all ranks", float(left[:, wrong].sum())
        raise NotFinite(self.name, wrong * shape.columns + column, value, place)


def matrix_shapes(tensors: Mapping[str, Tensor], rank: int, exact_below: int) -> list[MatrixShape]:
    """The tensors that could be compressed."""
    found = []
    for name, tensor in tensors.items():
        if tensor.dim() >= 2 and tensor.numel() >= max(1, exact_below):
            rows, columns = tensor.shape[0], tensor.numel() // tensor.shape[0]
            found.append(MatrixShape(name, rows, columns, min(rank, rows, columns)))
    return found


def drawn_right(shape: MatrixShape, seed: int, step: int, like: Tensor) -> Tensor:
    """Qᵀ from a normal distribution, the same on all ranks and devices, shape (r, m)."""
    random = torch.Generator().manual_seed(crc32(f"{seed},{step},{shape.name}".encode()))
    return torch.randn(shape.rank, shape.columns, generator=random, dtype=wide(like.dtype)).to(like.device)


def _without_scale(right: Tensor) -> Tensor:
    """Qᵀ with ±1 as each row's largest entry (rows of zeros stay), shape (r, m). The span of P = M Q stays the same.

    Q = Mᵀ P̂ is as large as M, so M Q would be as its square: beyond float32 long before M is.
    """
    largest = right.abs().amax(dim=1, keepdim=True)
    return right / torch.where(largest > 0, largest, 1)


def orthonormal_rows(left: Tensor) -> Tensor:
    """Orthonormal rows with the same span (a larger one, where rows depend on each other), shape (r, n)."""
    columns: Tensor = torch.linalg.qr(left.double().t()).Q
    return columns.t().to(left.dtype, memory_format=torch.contiguous_format)


def _given(bundle: Bundle, state: LowRankState) -> tuple[Bundle, LowRankState]:
    """Give a lone rank's residual from a time with others."""
    after = {}
    for name, (memory, right) in state.matrices.items():
        if memory.residual is not None:
            bundle = bundle.with_flat(bundle.flat)
            view = bundle.views[name]
            view.copy_(narrowed(view + memory.residual, view))
        after[name] = Remembered(Residual(), right)
    return bundle, LowRankState(state.step, after)
