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

from polytempo.compression import entries
from polytempo.compression.values import check_kind
from polytempo.core import ALONE, CodecState, EncodeContext, Law
from polytempo.core.call_name import codec_name
from polytempo.core.checks import check_real


@dataclass(frozen=True)
class Prune:
    """See `prune`."""

    below: float
    summable: bool = False
    sparse: bool = True
    fixed: bool = False
    passes_nonfinite: bool = False
    flops: float = 4.0

    @cached_property
    def name(self) -> str:
        """As a person would write it."""
        return codec_name(prune, self)

    @property
    def law(self) -> Law:
        """At most n - 1 elements stay out, each less than below² · ‖v‖² / n."""
        return Law("contraction", lambda like: 1 - self.below**2 * max(like.numel() - 1, 0) / max(like.numel(), 1))

    def init(self, like: Tensor) -> CodecState:
        """Nothing to remember."""
        return None

    def wire_dtype(self, like: Tensor, terms: int = 1) -> torch.dtype:
        """Bytes."""
        return torch.uint8

    def wire_bytes(self, like: Tensor, terms: int = 1) -> int:
        """4 more than the tensor, the most."""
        return entries.wire_bytes(like.numel(), like.numel(), like.element_size())

    def statistic(self, x: Tensor, state: CodecState) -> float | None:
        """Nothing to agree on."""
        return None

    def encode(
        self, x: Tensor, state: CodecState = None, when: EncodeContext = ALONE, out: Tensor | None = None
    ) -> tuple[Tensor, CodecState]:
        """What is large enough in x."""
        check_kind(x)
        flat = x.detach().reshape(-1)
        indices = self._kept(flat)
        return entries.write(indices, flat[indices], flat.numel(), out), state

    def encode_(
        self,
        x: Tensor,
        residual: Tensor,
        state: CodecState = None,
        when: EncodeContext = ALONE,
        out: Tensor | None = None,
    ) -> tuple[Tensor, CodecState]:
        """What is large enough in v = x + residual; residual ← v, and 0 where sent."""
        check_kind(x)
        x = x.detach()
        v = (x + residual).reshape(-1)
        indices = self._kept(v)
        wire = entries.write(indices, v[indices], v.numel(), out)
        v[indices] = 0
        residual.copy_(v.view(residual.shape))
        return wire, state

    def decode(self, wire: Tensor, like: Tensor, when: EncodeContext = ALONE) -> Tensor:
        """The values at their places, 0 elsewhere."""
        out = torch.zeros_like(like, memory_format=torch.contiguous_format)
        entries.add_(wire, out, self.name)
        return out

    def add_(self, wire: Tensor, out: Tensor, when: EncodeContext = ALONE) -> None:
        """out += the values at their places. Raises ValueError, and adds nothing, for an impossible wire."""
        entries.add_(wire, out, self.name)

    def _kept(self, v: Tensor) -> Tensor:
        """Indices of what is sent: at least the largest, also where rounding says that it is below the mean."""
        entries.check_finite(self.name, v)
        if not v.numel():
            return torch.zeros(0, dtype=torch.int64, device=v.device)
        magnitudes = v.abs()
        largest = float(magnitudes.max())
        # Relative to the largest, so that squares neither overflow nor vanish.
        norm = torch.linalg.vector_norm(v.double() / largest) if largest else magnitudes.new_zeros(())
        cut = min(self.below * float(norm) / v.numel() ** 0.5, 1.0) * largest
        kept: Tensor = ((magnitudes.double() >= cut) & (magnitudes > 0)).nonzero().view(-1)
        return kept


def prune(below: float = 1.0) -> Prune:
    """Entries with |v| < below · rms(v) stay out, rms(v) = √(Σ v² / n); the others travel with their values.

    Wire: see `compression.entries`, a list or a mask with values, whichever is shorter. Of normally distributed
    values 32 % are sent at below = 1, 62 % at 0.5, 92 % at 0.1; the most are 4 bytes more than the tensor. Zeros stay
    out in any case.

    Law: contraction 1 - below² (n - 1) / n: at least one |v| is no smaller than the rms, so at most n - 1 stay out,
    each with v² < below² ‖v‖² / n. Hence below <= 1: beyond, there are tensors of which nothing would be sent. Li et
    al. send an entry where it has changed by a fixed share of its weight, Han et al. take weights away for ever; here
    what is kept back goes later, if `feedback` is around it.

    Raises ValueError for `below` not in [0, 1], and NotFinite, before anything has changed, for NaN and infinities.
    """
    check_real(below=below)
    if not 0 <= below <= 1:
        raise ValueError(f"below is a share of the root mean square, from 0 to 1, got {below}")
    return Prune(below)
