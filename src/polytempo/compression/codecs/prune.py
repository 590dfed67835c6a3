"""Small entries stay out; the others travel with their values.

Source: as a filter of messages M. Li et al., "Scaling distributed machine learning with the parameter server", 2014,
section 3.3 ("significantly modified filter"); measuring by the standard deviation of a layer: S. Han et al., "Learning
both weights and connections for efficient neural networks", 2015, section 3.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from polytempo.compression.encoding import entries
from polytempo.compression.encoding.coded import Coded, Entries, Kernels, WireSize, from_zeros
from polytempo.compression.encoding.values import check_finite
from polytempo.core import EncodeContext, Facts, Law
from polytempo.core.calls.call_name import codec_name
from polytempo.core.calls.typed_arguments import check_real
from polytempo.native.kernels.codes_sparse import serves


def prune(below: float = 1.0) -> Coded:
    """Entries with |v| < below · rms(v) stay out, rms(v) = √(Σ v² / n); the others travel with their values.

    Wire: see `compression.entries`, a list or a mask with values, whichever is shorter. Of normally distributed
    values 32 % are sent at below = 1, 62 % at 0.5, 92 % at 0.1; the most are 4 bytes more than the tensor. Zeros stay
    out in any case.

    Law: contraction 1 - below² (n - 1) / n: at least one |v| reaches the rms, so at most n - 1 stay out,
    each with v² < below² ‖v‖² / n. Hence below <= 1: beyond, some tensors would send nothing. Li et
    al. send an entry where it has changed by a fixed share of its weight, Han et al. take weights away for ever; here
    the rest goes later, if `feedback` is around it.

    Raises ValueError for `below` not in [0, 1], and NotFinite, before anything has changed, for NaN and infinities.
    """
    check_real(below=below)
    if not 0 <= below <= 1:
        raise ValueError(f"below is a share of the root mean square, from 0 to 1, got {below}")
    return Coded(Prune(below), _KERNELS)


@dataclass(frozen=True)
class Prune:
    """See `prune`."""

    below: float

    @cached_property
    def facts(self) -> Facts:
        """The law: n - 1 elements at most stay out, each less than below² · ‖v‖² / n."""
        law = Law("contraction", lambda like: 1 - self.below**2 * max(like.numel() - 1, 0) / max(like.numel(), 1))
        return Facts(codec_name(prune, self), law, flops=4.0, sparse=True, fixed=False)

    def size(self, like: Tensor, terms: int = 1) -> WireSize:
        """4 bytes more than the tensor, the most."""
        return WireSize(entries.wire_bytes(like.numel(), like.numel(), like.element_size()))

    def encode(self, x: Tensor, when: EncodeContext) -> Tensor:
        """The large entries."""
        check_finite(self.facts.name, x)
        flat = x.reshape(-1)
        indices = self._kept(flat)
        return entries.write(indices, flat[indices], flat.numel())

    def decode(self, wire: Tensor, like: Tensor, when: EncodeContext) -> Tensor | Entries:
        """The values at their places."""
        return entries.read(wire, like, self.facts.name)

    def _kept(self, v: Tensor) -> Tensor:
        """Indices of the sent entries: at least the largest, also where rounding puts it below the mean."""
        if not v.numel():
            return torch.zeros(0, dtype=torch.int64, device=v.device)
        magnitudes = v.abs()
        largest = float(magnitudes.max())
        # Relative to the largest, so that squares neither overflow nor vanish.
        norm = torch.linalg.vector_norm(v.double() / largest) if largest else magnitudes.new_zeros(())
        cut = min(self.below * float(norm) / v.numel() ** 0.5, 1.0) * largest
        kept: Tensor = ((magnitudes.double() >= cut) & (magnitudes > 0)).nonzero().view(-1)
        return kept


def _add_(encoding: Prune, wire: Tensor, out: Tensor, when: EncodeContext) -> None:
    entries.add_entries_(encoding.facts.name, wire, out)


_KERNELS = Kernels(serves, _add_, from_zeros(_add_))
