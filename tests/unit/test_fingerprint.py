"""The hash that ranks compare: a flip of any one bit shows, and all ranks compute the same."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from polytempo.training.checkpoint import fingerprint as module
from polytempo.training.checkpoint.fingerprint import fingerprint

DTYPES = [
    *(torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64),
    *(torch.int64, torch.int32, torch.uint8, torch.bool),
]


def flipped(tensor: torch.Tensor, bit: int) -> torch.Tensor:
    """A copy with one flipped bit."""
    copy = tensor.clone()
    memory = (torch.view_as_real(copy) if copy.is_complex() else copy).view(-1).view(torch.uint8)
    memory[bit // 8] ^= 1 << (bit % 8)
    return copy


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_bit_of_a_small_tensor_is_seen(dtype: torch.dtype) -> None:
    tensor = torch.arange(13).to(dtype)
    bits = 8 * tensor.nbytes if dtype is not torch.bool else 1  # a bool of more than one bit is none
    seen = {fingerprint([flipped(tensor, bit)]) for bit in range(bits)}
    assert len(seen) == bits
    assert fingerprint([tensor]) not in seen


def test_a_bit_anywhere_in_a_large_tensor_is_seen() -> None:
    tensor = torch.randn(200_003, generator=torch.Generator().manual_seed(1))
    whole, drawn = fingerprint([tensor]), random.Random(1)
    for bit in [0, 31, 63, 8 * tensor.nbytes - 1, *(drawn.randrange(8 * tensor.nbytes) for _ in range(100))]:
        assert fingerprint([flipped(tensor, bit)]) != whole, bit


def test_a_block_is_the_sum_that_the_formula_says() -> None:
    words = [2**63 - 1, -(2**63), 12345, -1]
    of_words, of_halves = (weights.tolist() for weights in module._weights(torch.device("cpu")))
    block = sum(w * x + v * (x >> 32) for w, v, x in zip(of_words, of_halves, words, strict=False))
    assert fingerprint([torch.tensor(words)]) == (module._MULTIPLIER + block) % 2**64
    assert all(weight % 2 for weight in [*of_words, *of_halves])


def test_all_machines_compute_the_same() -> None:
    assert fingerprint([torch.arange(10), torch.ones(3)]) == 7129134175765977869


def ones(*shape: int) -> torch.Tensor:
    return torch.ones(*shape, dtype=torch.float64)


OTHERS: dict[str, tuple[Any, Any]] = {
    "two signs of float64": ([ones(4)], [ones(4) * torch.tensor([-1.0, -1.0, 1.0, 1.0])]),
    "two elements that differ in their signs and change places": (
        [ones(2) * torch.tensor([-1.0, 1.0])],
        [ones(2) * torch.tensor([1.0, -1.0])],
    ),
    "two elements that change places": ([torch.tensor([1.0, 2.0, 3.0])], [torch.tensor([2.0, 1.0, 3.0])]),
    "two tensors that change places": ([ones(2), 2 * ones(2)], [2 * ones(2), ones(2)]),
    "minus zero": ([torch.zeros(3)], [-torch.zeros(3)]),
    "a large tensor that moves by a block": (
        [torch.cat([ones(32768), 0 * ones(32768)])],
        [torch.cat([0 * ones(32768), ones(32768)])],
    ),
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_changes_are_seen(name: str) -> None:
    before, after = OTHERS[name]
    assert fingerprint(before) != fingerprint(after)


def test_strides_and_places_in_memory_do_not_count() -> None:
    tensor = torch.arange(24.0).reshape(4, 6)
    assert fingerprint([tensor]) == fingerprint([tensor.t().contiguous().t()])
    assert fingerprint([tensor]) == fingerprint([torch.cat([torch.ones(1), tensor.flatten()])[1:]])
    assert fingerprint([]) == 0
    assert fingerprint([torch.zeros(0)]) != fingerprint([torch.zeros(2)])
