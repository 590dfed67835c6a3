"""A codec's state when elements change their ranges: each element's state goes with it.

before   [ r r r r r | r r r ]       residuals of two ranges
after    [ r r r | r r r r r ]       each element's is where the element is
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from polytempo.core import CodecState, Residual
from polytempo.core.codec import PartlyGiven


class RangeState(NamedTuple):
    """A codec's state, or a part of it, of the elements from `start` on, seen as `shape`."""

    start: int
    shape: tuple[int, ...]
    state: CodecState


def redistribute(before: Sequence[RangeState], start: int, shape: tuple[int, ...], fresh: CodecState) -> CodecState:
    """The state of the range of `shape` at `start`, made from those `before`. `fresh`: the state of a new range.

    Tensors with one element for each element of the range go element by element, and are as in `fresh` where there was
    none. Of everything else (an adapted threshold) the largest earlier range decides.
    """
    end = start + torch.Size(shape).numel()
    shared = [(min(end, k.start + torch.Size(k.shape).numel()) - max(start, k.start), k) for k in before]
    largest_first = sorted((each for each in shared if each[0] > 0), key=lambda each: -each[0])
    return _redistributed([kept for _, kept in largest_first], start, shape, fresh)


def residuals(state: CodecState) -> Iterator[Tensor]:
    """The residuals in a state: what its codec has not sent yet."""
    if isinstance(state, PartlyGiven):  # not all that ranks would add up is to be given: `dgc`
        yield from state.given()[0]
    elif isinstance(state, Residual):
        if state.residual is not None:
            yield state.residual
    elif isinstance(state, tuple | dict):
        for part in state.values() if isinstance(state, dict) else state:
            yield from residuals(part)


def _redistributed(before: Sequence[RangeState], start: int, shape: tuple[int, ...], fresh: Any) -> Any:
    if not before:
        return fresh
    if isinstance(fresh, dict):
        return {key: _redistributed(_parts(before, key), start, shape, value) for key, value in fresh.items()}
    if isinstance(fresh, tuple):
        values = [_redistributed(_parts(before, i), start, shape, value) for i, value in enumerate(fresh)]
        return type(fresh)(*values) if hasattr(fresh, "_fields") else tuple(values)
    by_element = [kept for kept in before if isinstance(kept.state, Tensor) and kept.state.shape == kept.shape]
    if by_element:
        return _gathered(by_element, start, shape, fresh)
    first = before[0].state
    fits = not isinstance(fresh, Tensor) or (isinstance(first, Tensor) and first.shape == fresh.shape)
    return first if fits and not (fresh is None and isinstance(first, Tensor)) else fresh


def _parts(before: Sequence[RangeState], key: Any) -> list[RangeState]:
    return [kept._replace(state=kept.state[key]) for kept in before]


def _gathered(before: Sequence[RangeState], start: int, shape: tuple[int, ...], fresh: Tensor | None) -> Tensor:
    like = before[0].state
    out = like.new_zeros(shape) if fresh is None or fresh.shape != shape else fresh.clone()
    flat = out.view(-1)
    for kept in before:
        values = kept.state.reshape(-1)
        begin, end = max(start, kept.start), min(start + flat.numel(), kept.start + values.numel())
        flat[begin - start : end - start] = values[begin - kept.start : end - kept.start]
    return out
