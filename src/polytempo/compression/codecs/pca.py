"""Weights as their principal components: the mean row, and a few directions of the rows' largest differences from it.

    W [m, n] ≈ 1 · mean + scores · components      wire  mean (n) | scores (m · k) | components (k · n), float32

Source: textbook PCA (K. Pearson, "On lines and planes of closest fit to systems of points in space", 1901; I. T.
Jolliffe, "Principal component analysis", 2002, chapter 3); the bound is C. Eckart and G. Young, "The approximation of
one matrix by another of lower rank", 1936.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import sqrt

import torch
from torch import Tensor

from polytempo.compression.encoding.coded import Coded, WireSize
from polytempo.compression.encoding.entries import padded
from polytempo.compression.encoding.values import check_f32, check_flat, fitted, opened
from polytempo.core import EncodeContext, Facts, Law
from polytempo.core.calls.call_name import codec_name
from polytempo.core.calls.typed_arguments import check_real, check_whole

_HEADER_BYTES = 4
_LARGEST = torch.finfo(torch.float32).max


def pca(rank: int | None = None, error: float | None = None) -> Coded:
    """Ŵ = mean row + the `rank` principal components of the rows around it: the best such matrix in ‖W - Ŵ‖.

    Or, with `error`, as few components as keep ‖W - Ŵ‖ ≤ error · ‖W‖, for each tensor and each time: the basis is
    always the one of the tensor that travels. Where that saves nothing, the tensor travels exactly. Such a codec may
    encode pulls from a parameter server up to error=0.3. Without both, rank is 4.

    A tensor is seen as [shape[0], rest], m rows of n. ‖W - Ŵ‖² is the sum of the eigenvalues that are left out, so at
    most (1 - k / min(m - 1, n)) · ‖W - mean‖² ≤ (1 - k / min(m - 1, n)) · ‖W‖². For weights before they are sent,
    which change slowly and have a spectrum that falls; gradients have their own method, `aggregation.low_rank`.

    k is min(rank, m - 1, n), for more there cannot be. The law leaves room for a wire in float32,
    (2 + √k) · 2^-24 · ‖W‖, which counts where k is as large as can be, and for Ŵ's own rounding.

    Cost: 4 · (n + k · (m + n)) bytes, with `error` 4 more. Encoding takes min(m, n)² · max(m, n) multiplications for
    the Gram matrix and about 10 · min(m, n)³ for its eigenvectors, in float64: for matrices of some thousand rows that
    is seconds, so it is for rare transmissions, not for every step. Vectors, and matrices where this saves nothing,
    travel exactly.
    Beyond 1e38 scores may be clamped to float32's range, and the law does not hold; Ŵ is finite.
    Deterministic on one kind of machine. Raises ValueError for a rank < 1, an error not between 0 and 1, and for both,
    NotFinite for NaN, infinities, and float64 values beyond float32's range.

    Unusual: PCA is made for many samples of one kind. Here the samples are the rows of one weight matrix, the inputs of
    one unit or the kernels of one channel, and the components travel with them, since there is no other context to
    agree on them. We know of no paper that is *the* source of this; it is low-rank approximation with a mean.
    """
    if error is not None:
        check_real(error=error)
        if rank is not None:
            raise ValueError(f"pca takes a rank, or an error that decides the rank, got rank={rank}, error={error}")
        if not 0 < error < 1:
            raise ValueError(f"error is a share of the norm, between 0 and 1, got {error}")
        return Coded(PcaWithin(error))
    rank = 4 if rank is None else rank
    check_whole(rank=rank)
    if rank < 1:
        raise ValueError(f"rank must be a number of components >= 1, got {rank}")
    return Coded(Pca(rank))


@dataclass(frozen=True)
class Pca:
    """See `pca`."""

    rank: int

    @cached_property
    def facts(self) -> Facts:
        """‖W - Ŵ‖² ≤ (1 - k / p) · ‖W - mean‖², p = min(m - 1, n): the k largest of p eigenvalues are k / p of all.

        Operations are counted for the scores and the reconstruction; the Gram matrix takes the shorter side's length.
        """
        return Facts(codec_name(pca, self), Law("contraction", self._kept), flops=4.0 * self.rank + 100.0)

    def size(self, like: Tensor, terms: int = 1) -> WireSize:
        """4 · (n + k · (m + n)) bytes of float32; or all of the tensor, where that is less."""
        if self._saves(like):
            return WireSize(4 * self._numbers(like), torch.float32)
        return WireSize(like.numel() * like.element_size(), like.dtype)

    def encode(self, x: Tensor, when: EncodeContext) -> Tensor:
        """Mean, scores and components."""
        check_f32(self.facts.name, x)
        if not self._saves(x):
            return x.reshape(-1)
        parts = principal(x.reshape(_shape(x)), self.num_components(x))
        return torch.cat([part.reshape(-1).clamp(-_LARGEST, _LARGEST) for part in parts]).float()

    def decode(self, wire: Tensor, like: Tensor, when: EncodeContext) -> Tensor:
        """1 · mean + scores · components, in float64."""
        num_bytes, dtype = self.size(like)
        check_flat(f"a wire of {self.facts.name}", wire, like.device, dtype)
        count = num_bytes // dtype.itemsize
        if wire.numel() < count:
            raise ValueError(
                f"a wire of {self.facts.name} for {tuple(like.shape)} has {count} numbers, not {wire.numel()}"
            )
        if not self._saves(like):
            return wire[:count].view(like.shape)
        (rows, columns), k = _shape(like), self.num_components(like)
        mean, scores, components = wire[:count].to(torch.float64).split([columns, rows * k, k * columns])
        return fitted(torch.addmm(mean, scores.view(rows, k), components.view(k, columns)), like)

    def _kept(self, like: Tensor) -> float:
        """The bound, with room for the rounding of the wire, and of Ŵ to the dtype of `like`; see `pca`."""
        if not self._saves(like):
            return 1.0
        k, unit = self.num_components(like), _unit(like)
        left_out = sqrt(max(0.0, 1 - k / _most(like))) + _wire_rounding(k)
        return max(0.0, 1 - (left_out + unit * (1 + left_out)) ** 2)

    def num_components(self, like: Tensor) -> int:
        """k: as many as there can be, where `rank` is more."""
        return min(self.rank, _most(like))

    def _saves(self, like: Tensor) -> bool:
        return like.dim() > 1 and 4 * self._numbers(like) < like.numel() * like.element_size()

    def _numbers(self, like: Tensor) -> int:
        rows, columns = _shape(like)
        return columns + self.num_components(like) * (rows + columns)


@dataclass(frozen=True)
class PcaWithin:
    """See `pca`.

    wire   k (4 bytes) | mean (n) | scores (m · k) | components (k · n), float32        or   -1 | the tensor | padding
    """

    error: float

    @cached_property
    def facts(self) -> Facts:
        """‖W - Ŵ‖² ≤ error² · ‖W‖². The tensor decides k, so operations are counted for 64 components."""
        law = Law("contraction", lambda like: 1 - self.error**2)
        return Facts(codec_name(pca, self), law, flops=4.0 * 64 + 100.0, fixed=False)

    def size(self, like: Tensor, terms: int = 1) -> WireSize:
        """4 bytes more than the tensor, the most."""
        return WireSize(_HEADER_BYTES + padded(like.numel() * like.element_size()))

    def encode(self, x: Tensor, when: EncodeContext) -> Tensor:
        """Mean, scores and components, or the tensor."""
        check_f32(self.facts.name, x)
        parts = None if x.dim() < 2 or not x.numel() else self._parts(x.reshape(_shape(x)), _unit(x))
        count = -1 if parts is None else parts[2].shape[0]
        body = x.reshape(-1) if parts is None else torch.cat([part.reshape(-1) for part in parts]).float()
        if parts is not None and (body.nbytes >= x.nbytes or not body.isfinite().all()):  # scores beyond float32
            count, body = -1, x.reshape(-1)
        wire = torch.zeros(_HEADER_BYTES + padded(body.nbytes), dtype=torch.uint8, device=x.device)
        wire[:_HEADER_BYTES].view(torch.int32).fill_(count)
        wire[_HEADER_BYTES : _HEADER_BYTES + body.nbytes] = body.contiguous().view(torch.uint8)
        return wire

    def decode(self, wire: Tensor, like: Tensor, when: EncodeContext) -> Tensor:
        """1 · mean + scores · components, in float64; or the tensor."""
        name, (rows, columns) = self.facts.name, _shape(like)
        k = int(opened(name, _HEADER_BYTES, like, wire, torch.uint8).clone().view(torch.int32))
        if k != -1 and not (like.dim() > 1 and 0 <= k <= _most(like)):
            raise ValueError(f"a wire of {name} for {tuple(like.shape)} has {k} components")
        numbers = columns + k * (rows + columns)
        num_bytes = like.numel() * like.element_size() if k == -1 else 4 * numbers
        body = opened(name, _HEADER_BYTES + num_bytes, like, wire, torch.uint8)[_HEADER_BYTES:].clone()
        if k == -1:
            return body.view(like.dtype).view(like.shape)
        mean, scores, components = body.view(torch.float32).double().split([columns, rows * k, k * columns])
        return fitted(torch.addmm(mean, scores.view(rows, k), components.view(k, columns)), like)

    def _parts(self, matrix: Tensor, unit: float) -> tuple[Tensor, Tensor, Tensor] | None:
        """The fewest components within the error, with room for both roundings (see `pca`); None where none suffice."""
        mean, scores, components = principal(matrix, _most(matrix))
        norm = float(torch.linalg.vector_norm(matrix.double()))
        spread = float(torch.linalg.vector_norm(matrix.double() - mean)) ** 2
        left_out = spread - torch.cat([scores.new_zeros(1), scores.square().sum(0).cumsum(0)])
        for k, rest in enumerate(left_out.clamp(min=0).sqrt().tolist()):
            room = (self.error - unit) / (1 + unit) - _wire_rounding(k)
            if rest + 1e-12 * norm <= room * norm:
                return mean, scores[:, :k], components[:k]
        return None


def _wire_rounding(k: int) -> float:
    return (2 + sqrt(k)) * 2.0**-24


def _unit(like: Tensor) -> float:
    return 0.0 if like.dtype is torch.float64 else torch.finfo(like.dtype).eps / 2


def principal(matrix: Tensor, rank: int) -> tuple[Tensor, Tensor, Tensor]:
    """The mean row (n,), scores (m, k) and orthonormal components (k, n) of a matrix (m, n), in float64; k <= m, n.

    By the eigenvectors of the smaller Gram matrix of the differences from the mean. If that is the rows' matrix,
    directions of eigenvalues near 0 are rounding noise alone: not orthogonal, and as long as the others once they are
    scaled. So they are made orthonormal from the first on, by QR. Signs are such that each
    component's largest entry is positive, so equal weights make equal wires.
    """
    wide = matrix.to(torch.float64)
    mean = wide.mean(dim=0)
    centred = wide - mean
    if centred.shape[0] < centred.shape[1]:
        directions = centred.T @ torch.linalg.eigh(centred @ centred.T).eigenvectors.flip(1)[:, :rank]
        components = torch.linalg.qr(directions).Q.T
    else:
        components = torch.linalg.eigh(centred.T @ centred).eigenvectors.flip(1)[:, :rank].T
    largest = components.gather(1, components.abs().argmax(dim=1, keepdim=True))
    components = torch.where(largest < 0, -components, components)
    return mean, centred @ components.T, components


def _most(like: Tensor) -> int:
    """The components that rows around their mean can have; a single row gets one, which is not worth its bytes."""
    rows, columns = _shape(like)
    return max(1, min(rows - 1, columns))


def _shape(like: Tensor) -> tuple[int, int]:
    rows = like.shape[0] if like.dim() else 1
    return rows, like.numel() // max(rows, 1)
