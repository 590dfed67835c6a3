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
from polytempo.compression.encoding.values import check_f32, check_flat, fitted
from polytempo.core import EncodeContext, Facts, Law
from polytempo.core.calls.call_name import codec_name
from polytempo.core.calls.typed_arguments import check_whole

_LARGEST = torch.finfo(torch.float32).max


def pca(rank: int = 4) -> Coded:
    """Ŵ = mean row + the `rank` principal components of the rows around it: the best such matrix in ‖W - Ŵ‖.

    A tensor is seen as [shape[0], rest], m rows of n. ‖W - Ŵ‖² is the sum of the eigenvalues that are left out, so at
    most (1 - k / min(m - 1, n)) · ‖W - mean‖² ≤ (1 - k / min(m - 1, n)) · ‖W‖². For weights before they are sent,
    which change slowly and have a spectrum that falls; gradients have their own method, `aggregation.low_rank`.

    k is min(rank, m - 1, n), for more there cannot be. The law leaves room for a wire in float32,
    (2 + √k) · 2^-24 · ‖W‖, which counts where k is as large as can be, and for Ŵ's own rounding.

    Cost: 4 · (n + k · (m + n)) bytes. Encoding takes min(m, n)² · max(m, n) multiplications for the Gram matrix and
    about 10 · min(m, n)³ for its eigenvectors, in float64: for matrices of some thousand rows that is seconds, so it is
    for rare transmissions, not for every step. Vectors, and matrices where this saves nothing, travel exactly.
    Beyond 1e38 scores may be clamped to float32's range, and the law does not hold; Ŵ is finite.
    Deterministic on one kind of machine. Raises ValueError for a rank < 1, NotFinite for NaN,
    infinities, and float64 values beyond float32's range.

    Unusual: PCA is made for many samples of one kind. Here the samples are the rows of one weight matrix, the inputs of
    one unit or the kernels of one channel, and the components travel with them, since there is no other context to
    agree on them. We know of no paper that is *the* source of this; it is low-rank approximation with a mean.
    """
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
        k, unit = self.num_components(like), 0.0 if like.dtype is torch.float64 else torch.finfo(like.dtype).eps / 2
        left_out = sqrt(max(0.0, 1 - k / _most(like))) + (2 + sqrt(k)) * 2.0**-24
        return max(0.0, 1 - (left_out + unit * (1 + left_out)) ** 2)

    def num_components(self, like: Tensor) -> int:
        """k: as many as there can be, where `rank` is more."""
        return min(self.rank, _most(like))

    def _saves(self, like: Tensor) -> bool:
        return like.dim() > 1 and 4 * self._numbers(like) < like.numel() * like.element_size()

    def _numbers(self, like: Tensor) -> int:
        rows, columns = _shape(like)
        return columns + self.num_components(like) * (rows + columns)


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
