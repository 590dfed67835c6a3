"""Tensors for every codec, and ways to look at their wires."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from torch import Tensor

from laws.codecs import ROWS, text
from polytempo.core import CodecState, Residual
from some_cases import examples

every_codec = pytest.mark.parametrize("row", ROWS, ids=text)
with_encode_ = pytest.mark.parametrize("row", [row for row in ROWS if not row.feeds_itself], ids=text)
some = settings(max_examples=examples(16), derandomize=True)

SHAPES = [(), (0,), (1,), (2,), (7,), (5, 3), (4, 0), (3, 5, 2), (257,), (33, 17), (1, 70), (1025,), (64, 40)]
"""No elements, one, a few, and about as many as a vector register, a block and a bucket hold."""

KINDS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "zeros": lambda normal, other: torch.zeros_like(normal),
    "ones": lambda normal, other: torch.full_like(normal, 1.5),
    "normal": lambda normal, other: normal,
    "outliers": lambda normal, other: torch.where(other < 0.01, 1e3 * normal, normal),
    "few": lambda normal, other: torch.where(other < 0.9, 0.0, normal),
    "wide": lambda normal, other: normal.sign() * 10 ** (6 * other - 3),
    "denormal": lambda normal, other: 1e-41 * normal,
    "huge": lambda normal, other: 1e30 * normal,
}
"""Values of a kind, made of normal ones and of others from 0 to 1."""
EXTREME = ["zeros", "denormal", "huge"]
MODERATE = ["ones", "normal", "outliers", "few", "wide"]

TOLERANCE = {torch.float32: 1e-6, torch.float64: 1e-12, torch.float16: 2.0**-10, torch.bfloat16: 2.0**-7}
"""The tolerance of a sum, relative to its largest term."""

GUARD = 64
"""Bytes before and after memory that is written to."""


class Case(NamedTuple):
    """Makes tensors that begin `offset` elements after an aligned address."""

    shape: tuple[int, ...]
    kind: str
    dtype: torch.dtype
    seed: int = 0
    offset: int = 0

    def tensor(self, number: int = 0) -> Tensor:
        """Tensor `number` of this case."""
        generator = torch.Generator().manual_seed(1000 * self.seed + number)
        like = torch.empty(self.shape)
        normal = torch.randn(self.offset + like.numel(), generator=generator, dtype=torch.float64)
        other = torch.rand(len(normal), generator=generator, dtype=torch.float64)
        values = KINDS[self.kind](normal, other)
        return (values + 0.0).to(self.dtype)[self.offset :].view(self.shape)


def cases(kinds: Sequence[str] = (*EXTREME, *MODERATE)) -> st.SearchStrategy[Case]:
    """All that a codec has to bear."""
    return st.builds(
        Case,
        st.sampled_from(SHAPES),
        st.sampled_from(kinds),
        st.sampled_from([torch.float32, torch.float64]),
        st.integers(0, 999),
        st.integers(0, 3),
    )


NORMAL = Case((33, 17), "normal", torch.float32)


def largest(*tensors: Tensor) -> float:
    """The largest magnitude."""
    return max((float(t.abs().max()) for t in tensors if t.numel()), default=0.0)


def raw(wire: Tensor) -> bytes:
    """The wire's bytes."""
    return wire.view(torch.uint8).numpy().tobytes()


def guarded(num_bytes: int, filled: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Memory with a writable middle, and that middle."""
    memory = torch.full((num_bytes + 2 * GUARD,), filled, dtype=torch.uint8)
    return memory, memory[GUARD : GUARD + num_bytes].view(dtype)


def untouched(memory: Tensor, filled: int) -> bool:
    """True if the guards are unchanged."""
    return bool((memory[:GUARD] == filled).all() and (memory[-GUARD:] == filled).all())


def residuals(state: CodecState) -> list[Tensor]:
    """All residuals of a state."""
    if isinstance(state, Residual):
        return [] if state.residual is None else [state.residual]
    return [each for part in state for each in residuals(part)] if isinstance(state, tuple) else []


def tensors_of(state: CodecState) -> list[object]:
    """A state's leaves, tensors as their bytes."""
    if isinstance(state, tuple):
        return [leaf for part in state for leaf in tensors_of(part)]
    return [raw(state.reshape(-1)) if isinstance(state, Tensor) else state]
