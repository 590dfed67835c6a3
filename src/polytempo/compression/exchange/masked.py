"""A share of the elements, drawn in each step and the same on all ranks, in the place of all of them.

Source: EXO Labs, "Improving the efficiency of distributed training using sparse parameter averaging", 2025.
"""

from __future__ import annotations

import math
from typing import NamedTuple
from zlib import crc32

import torch
from torch import Tensor

from polytempo.compression.codecs.random_k import drawn
from polytempo.core import Bundle, Cost, Port, Promise, State, Transform, inside
from polytempo.core.calls.typed_arguments import check_real, check_whole
from polytempo.core.transform import cost_of


class MaskedState(NamedTuple):
    """Steps so far, and the inner transform's state."""

    step: int
    inner: State


def masked(share: float, transform: Transform, seed: int = 0) -> Transform:
    """`transform` of ⌈`share` · n⌉ drawn elements of each tensor of n; the others stay as they are.

    The elements are a function of (seed, step, the tensor's name, n), so no message says which. Each is drawn with the
    same probability in each step (see `drawn`). With share=1 it is `transform`. ValueError for a share not in (0, 1].
    """
    check_real(share=share)
    check_whole(seed=seed)
    if not 0 < share <= 1:
        raise ValueError(f"share is a part of the elements, over 0 and at most 1, got {share}")

    def count(tensor: Tensor) -> int:
        return min(math.ceil(share * tensor.numel()), tensor.numel())

    def places(bundle: Bundle, step: int) -> dict[str, Tensor]:
        tensors = bundle.tensors.items()
        found = {n: drawn("masked", t, count(t), seed, step, crc32(n.encode())) for n, t in tensors if t.numel()}
        return {name: each.sort().values for name, each in found.items()}

    def shapes(parameters: Bundle) -> Bundle:
        return Bundle({n: torch.empty(count(t), dtype=t.dtype, device="meta") for n, t in parameters.tensors.items()})

    def init(parameters: Bundle) -> MaskedState:
        likes = {name: torch.zeros(count(t), dtype=t.dtype, device=t.device) for name, t in parameters.tensors.items()}
        return MaskedState(0, transform.init(Bundle(likes)))

    async def apply(port: Port, bundle: Bundle, state: MaskedState) -> tuple[Bundle | None, MaskedState]:
        step = state.step + 1
        if port.size == 1:
            return bundle, MaskedState(step, state.inner)
        chosen, views = places(bundle, step), bundle.views
        part = Bundle({name: views[name].reshape(-1)[at] for name, at in chosen.items()}, bundle.share)
        met, inner = await transform.apply(port, part, state.inner)
        assert met is not None, "a transform of a share answers in every step"
        for name, at in chosen.items():
            views[name].view(-1)[at] = met.views[name]
        return bundle.with_flat(bundle.flat), MaskedState(step, inner)

    def cost(parameters: Bundle, num_ranks: int) -> Cost:
        return cost_of(transform, shapes(parameters), num_ranks)

    beside = inside(transform.beside, lambda state: state.inner)
    promises = transform.promises & ~Promise.LINEAR | Promise.IDLE_ALONE
    return Transform(init, apply, promises, cost, beside, least_ranks=transform.least_ranks)
