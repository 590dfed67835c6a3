"""Reductions of the native core: the same bits as the twin, with every instruction set that this machine has."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from native import twin
from native.kernels import DTYPES, OPS, Buffer, assert_same_bits, choose, instruction_sets, library, reduce_
from some_cases import examples

NAN, INF = math.nan, math.inf
COUNTS = (0, 1, 2, 7, 8, 31, 64, 257, 1023, 1025, 4096, 5003)


@pytest.fixture(autouse=True)
def same_instruction_set_afterwards() -> Iterator[None]:
    before = library().pt_isa().decode()
    yield
    choose(before)


def tensor_of(dtype: torch.dtype, count: int, generator: torch.Generator, wild: bool) -> Tensor:
    """Any bits (so infinities, NaN, subnormal numbers too) where `wild`, and numbers around 0 else."""
    if dtype == torch.bool:
        return torch.randint(0, 2, (count,), generator=generator).bool()
    if wild or not dtype.is_floating_point:
        num_bytes = count * torch.empty(0, dtype=dtype).element_size()
        return torch.randint(0, 256, (num_bytes,), generator=generator, dtype=torch.uint8).view(dtype)
    return torch.randn(count, generator=generator, dtype=torch.float64).to(dtype)


SUPPORTED = [(dtype, op) for dtype in DTYPES for op in OPS if twin.supports(dtype, op)]
OUTS = ("elsewhere", "first", "last", "all", "elsewhere and second")


def outs_among(sources: list[Buffer], where: str) -> list[Buffer]:
    elsewhere = Buffer(torch.zeros_like(sources[0].like), offset_bytes=3)
    return {
        "elsewhere": [elsewhere],
        "first": sources[:1],
        "last": sources[-1:],
        "all": sources,
        "elsewhere and second": [elsewhere, *sources[1:2]],
    }[where]


@settings(max_examples=examples(200))
@pytest.mark.parametrize("isa", instruction_sets())
@given(
    dtype_and_op=st.sampled_from(SUPPORTED),
    order=st.sampled_from(["linear", "tree"]),
    num_sources=st.integers(1, 9),
    count=st.sampled_from(COUNTS),
    offset_bytes=st.integers(0, 17),
    where=st.sampled_from(OUTS),
    wild=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_equals_the_twin_to_the_bit(
    isa: str,
    dtype_and_op: tuple[torch.dtype, str],
    order: twin.Order,
    num_sources: int,
    count: int,
    offset_bytes: int,
    where: str,
    wild: bool,
    seed: int,
) -> None:
    assert choose(isa)
    dtype, op = dtype_and_op
    generator = torch.Generator().manual_seed(seed)
    values = [tensor_of(dtype, count, generator, wild) for _ in range(num_sources)]
    sources = [Buffer(value, offset_bytes * rank % 19) for rank, value in enumerate(values)]
    outs = outs_among(sources, where)
    assert reduce_(outs, sources, op, order) == 0
    expected = twin.reduce(values, op, order)
    for out in outs:
        assert_same_bits(out.values(), expected)
    for source, value in zip(sources, values, strict=True):
        if not any(source is out for out in outs):
            assert_same_bits(source.values(), value)


@pytest.mark.parametrize("isa", instruction_sets())
@pytest.mark.parametrize(("dtype", "op"), SUPPORTED, ids=str)
def test_every_type_and_operation_in_place_on_three_ranks_and_on_seventeen(
    isa: str, dtype: torch.dtype, op: str
) -> None:
    assert choose(isa)
    for num_sources in (3, 17):
        generator = torch.Generator().manual_seed(num_sources)
        values = [tensor_of(dtype, 1501, generator, wild=False) for _ in range(num_sources)]
        for order in ("linear", "tree"):
            sources = [Buffer(value, offset_bytes=0) for value in values]
            assert reduce_(sources, sources, op, order) == 0
            expected = twin.reduce(values, op, "tree" if order == "tree" else "linear")
            for source in sources:
                assert_same_bits(source.values(), expected)


@pytest.mark.parametrize("isa", instruction_sets())
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_every_half_goes_to_f32_and_back(isa: str, dtype: torch.dtype) -> None:
    """x + 0 is x, for each of the 2^16 values; zeros and NaN by the rules of the addition."""
    assert choose(isa)
    halves = torch.arange(-(2**15), 2**15).to(torch.int16).view(dtype)
    for num_sources in (2, 5):
        sources = [Buffer(halves, 1), *(Buffer(torch.zeros_like(halves), 0) for _ in range(num_sources - 1))]
        assert reduce_(sources[:1], sources, "sum") == 0
        assert_same_bits(sources[0].values(), halves + torch.zeros_like(halves))


@pytest.mark.parametrize("isa", instruction_sets())
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_every_f32_mantissa_rounds_to_the_nearest_even_half(isa: str, dtype: torch.dtype) -> None:
    """Averages of neighbours are halfway between them, down among the subnormal numbers and up to infinity."""
    assert choose(isa)
    below = torch.arange(0, 0x7BFF if dtype == torch.float16 else 0x7F7F).to(torch.int16).view(dtype)
    above = (below.view(torch.int16) + 1).view(dtype)
    for values in ([below, above], [below, below, above], [below, above, above], [below, above, below, above, above]):
        sources = [Buffer(value, 0) for value in values]
        for op in ("average", "sum"):
            out = Buffer(torch.zeros_like(below), 0)
            assert reduce_([out], sources, op) == 0
            assert_same_bits(out.values(), twin.reduce(values, op))


FLOATS: tuple[tuple[str, list[list[float]], list[float]], ...] = (
    # op, sources, result
    ("sum", [[1e30, INF, INF], [-1e30, 1.0, -INF], [1.0, 1.0, 1.0]], [1.0, INF, NAN]),
    ("average", [[1.0, 3.0, INF], [2.0, NAN, 0.0]], [1.5, NAN, INF]),
    ("average", [[1.0, 2.0, -3.0], [1.0, 2.0, 0.0], [1.0, 2.0, 0.0]], [1.0, 2.0, -1.0]),
    ("min", [[1.0, NAN, 2.0, -INF], [0.5, 1.0, NAN, 0.0]], [0.5, NAN, NAN, -INF]),
    ("max", [[1.0, NAN, 2.0, -INF], [0.5, 1.0, NAN, 0.0]], [1.0, NAN, NAN, 0.0]),
    ("min", [[0.0, -0.0], [-0.0, 0.0]], [0.0, -0.0]),
    ("product", [[3.0, INF, 2.0], [-2.0, 0.0, -INF]], [-6.0, NAN, -INF]),
)
INTEGERS: tuple[tuple[torch.dtype, str, list[list[int]], list[int]], ...] = (
    # dtype, op, sources, result
    (torch.int8, "sum", [[127, -128, 100], [1, -1, 100]], [-128, 127, -56]),
    (torch.int8, "min", [[-1, 5], [1, -128]], [-1, -128]),
    (torch.uint8, "sum", [[255, 200], [1, 100]], [0, 44]),
    (torch.uint8, "max", [[255, 1], [1, 128]], [255, 128]),
    (torch.int16, "product", [[-32768, 300], [-1, 300]], [-32768, 24464]),
    (torch.int32, "sum", [[2**31 - 1], [1]], [-(2**31)]),
    (torch.int64, "sum", [[2**63 - 1], [1]], [-(2**63)]),
    (torch.int64, "product", [[2**62, -3], [2, 5]], [-(2**63), -15]),
    (torch.int32, "band", [[12, -1], [10, 7]], [8, 7]),
    (torch.int32, "bor", [[12, 1], [10, 6]], [14, 7]),
    (torch.int64, "bxor", [[12, -1], [10, 7]], [6, -8]),
    (torch.bool, "sum", [[0, 0, 1, 1], [0, 1, 0, 1]], [0, 1, 1, 1]),
    (torch.bool, "product", [[0, 0, 1, 1], [0, 1, 0, 1]], [0, 0, 0, 1]),
    (torch.bool, "bxor", [[0, 0, 1, 1], [0, 1, 0, 1]], [0, 1, 1, 0]),
)


@pytest.mark.parametrize("isa", instruction_sets())
def test_literal_sums(isa: str) -> None:
    assert choose(isa)
    for op, floats, result in FLOATS:
        for dtype in (torch.float32, torch.float64):
            assert_reduces_to(dtype, op, floats, result)
    for dtype, op, integers, wrapped in INTEGERS:
        assert_reduces_to(dtype, op, integers, wrapped)


def assert_reduces_to(
    dtype: torch.dtype, op: str, values: Sequence[Sequence[float]], expected: Sequence[float]
) -> None:
    sources = [Buffer(torch.tensor(value, dtype=dtype), 0) for value in values]
    assert reduce_(sources[-1:], sources, op) == 0
    assert_same_bits(sources[-1].values(), torch.tensor(expected, dtype=dtype))


@pytest.mark.parametrize("isa", instruction_sets())
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("num_ranks", [1, 2, 4, 8])
def test_eight_leaves_have_one_sum_in_tree_order_however_many_ranks_hold_them(
    isa: str, dtype: torch.dtype, num_ranks: int
) -> None:
    """Each rank sums its own leaves by the same tree; the ranks' sums are summed by the tree over ranks."""
    assert choose(isa)
    generator = torch.Generator().manual_seed(3)
    leaves = [tensor_of(dtype, 2000, generator, wild=False) for _ in range(8)]
    own = 8 // num_ranks
    sums = [summed(leaves[own * rank : own * (rank + 1)]) for rank in range(num_ranks)]
    assert_same_bits(summed(sums), twin.reduce(leaves, "sum", "tree"))
    assert not torch.equal(twin.reduce(leaves, "sum", "linear"), twin.reduce(leaves, "sum", "tree"))


def summed(values: list[Tensor]) -> Tensor:
    out = Buffer(torch.zeros_like(values[0]), 0)
    assert reduce_([out], [Buffer(value, 0) for value in values], "sum", "tree") == 0
    return out.values()


@pytest.mark.parametrize(
    ("dtype", "op"), [(dtype, op) for dtype in DTYPES for op in OPS if not twin.supports(dtype, op)], ids=str
)
def test_what_has_no_meaning_is_refused_and_nothing_is_written(dtype: torch.dtype, op: str) -> None:
    source = Buffer(torch.ones(3, dtype=dtype), 0)
    assert reduce_([source], [source, source], op) == 1
    assert_same_bits(source.values(), torch.ones(3, dtype=dtype))
    with pytest.raises(ValueError, match=rf"{op} of {dtype} is not defined"):
        twin.reduce([torch.ones(3, dtype=dtype)], op)


def test_an_instruction_set_that_is_not_there_changes_nothing() -> None:
    before = library().pt_isa()
    assert not choose("v9")
    assert library().pt_isa() == before


ASK = "import ctypes, sys; l = ctypes.CDLL(sys.argv[1]); l.pt_isa.restype = ctypes.c_char_p; print(l.pt_isa().decode())"


@pytest.mark.parametrize("named", [*instruction_sets(), "v9", None])
def test_the_environment_names_the_instruction_set(named: str | None) -> None:
    """A set that the machine lacks is not used: then it is the best, as without a word."""
    environment = {name: value for name, value in os.environ.items() if name != "POLYTEMPO_ISA"}
    environment |= {} if named is None else {"POLYTEMPO_ISA": named}
    command = [sys.executable, "-S", "-c", ASK, library()._name]
    answer = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=60)
    available = instruction_sets()
    assert answer.stdout.strip() == (named if named in available else available[-1])
