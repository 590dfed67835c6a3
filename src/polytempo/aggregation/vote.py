"""Signs that vote: what most ranks say about each coordinate is its direction."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

import torch
from torch import Tensor

from polytempo.core.arithmetic.merge import Merge


def vote(buffers: Sequence[Tensor]) -> Tensor:
    """sign(Σᵢ sign(xᵢ)) of each coordinate; 0 where as many ranks say up as down.

    Every rank has one vote whatever its samples or the size of its numbers, so fewer than half of the ranks cannot turn
    a coordinate that the others agree on. Zero and NaN are no vote.

    It looks at one coordinate at a time, but the answer can be a tie, for which a code of one bit has no word. So it
    says `coordinate_wise = False`: whole buffers are gathered, and no rank encodes the answer again.

    Source: J. Bernstein et al., "signSGD with majority vote is communication efficient and fault tolerant", 2019,
    Algorithm 1. There the server's answer travels as one bit, so a tie is decided by the sign of zero.
    """
    ayes = buffers[0].sign().to(torch.float32)  # bfloat16 counts to 256 only
    for buffer in buffers[1:]:
        ayes += buffer.sign()
    return ayes.sign_().to(buffers[0].dtype)


vote.coordinate_wise = False  # type: ignore[attr-defined]


def votes_of(size: float) -> Merge:
    """`vote`, times `size`. ValueError for one that is not above 0."""
    if not 0 < size < inf:
        raise ValueError(f"a vote moves a parameter by a number above 0, got {size}")

    def sized(buffers: Sequence[Tensor]) -> Tensor:
        return vote(buffers).mul_(size)

    sized.__name__ = "vote"
    sized.coordinate_wise = False  # type: ignore[attr-defined]
    return sized
