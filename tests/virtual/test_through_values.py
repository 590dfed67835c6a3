"""`through`: its answers by the codec's own law; near the largest number of 16 bits; their residuals."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from helpers import CLUSTER
from polytempo import compression as c
from polytempo.compression.exchange.packing import Piece, stripes, whole
from polytempo.compression.exchange.through import through
from polytempo.core import Bundle, Codec, CodecState, EncodeContext, Port, Transform
from polytempo.worlds import VirtualWorld
from virtual.ways import EXACT_BELOW, WAYS, Way, label, left, ran, shares, values

NARROW = (torch.float16, torch.bfloat16)


# ---------------------------------------------------------------------- by the codec's own word


def contributions(num_ranks: int, dtype: torch.dtype) -> list[dict[str, Tensor]]:
    """shareᵢ · xᵢ of step 1."""
    return [{n: share * x for n, x in values(1, i, dtype).items()} for i, share in enumerate(shares(num_ranks))]


def decoded(codec: Codec, x: Tensor, when: EncodeContext) -> Tensor:
    """The answer to x, without another rank's part."""
    return codec.decode(codec.encode(x, codec.init(x), when)[0], x, when)


def striped(parts: Sequence[Sequence[Piece]], given: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """The owner's own part of each stripe and the decoded others', encoded again."""
    found = {name: torch.zeros_like(x) for name, x in given[0].items()}
    for owner, part in enumerate(parts):
        for piece in part:
            total = piece.of(given[owner][piece.name]).clone()
            for rank in (rank for rank in range(len(given)) if rank != owner):
                total += decoded(piece.codec, piece.of(given[rank][piece.name]), EncodeContext(1, rank, piece.number))
            piece.of(found[piece.name]).copy_(decoded(piece.codec, total, EncodeContext(1, owner, piece.number)))
    return found


def told(way: Way, given: list[dict[str, Tensor]]) -> Tensor:
    """The answer of step 1, flat."""
    codec, pieces = way.codec(), whole(given[0], way.codec(), 0 if way.path == "all_reduce" else EXACT_BELOW)
    if way.path == "reduce_scatter":
        return Bundle(striped(stripes(pieces, given[0], len(given)), given)).flat
    found = {name: torch.zeros_like(x) for name, x in given[0].items()}
    for piece in pieces:
        agreed = None
        if way.path == "all_reduce" and codec.statistic(torch.zeros(1), codec.init(torch.zeros(1))) is not None:
            agreed = max(codec.statistic(each[piece.name], None) or 0.0 for each in given)
        for rank, each in enumerate(given):
            when = EncodeContext(1, rank, piece.number, agreed=agreed)
            found[piece.name] += decoded(piece.codec, each[piece.name], when)
    return Bundle(found).flat


@pytest.mark.parametrize("num_ranks", [2, 3])
@pytest.mark.parametrize("way", [way for way in WAYS if not way.fed and not way.row.feeds_itself], ids=label)
def test_the_answer_is_the_sum_of_what_the_codec_makes_of_each_part(way: Way, num_ranks: int) -> None:
    """Σᵢ decode(encode(shareᵢ · xᵢ)), with the statistic that ranks agree on; of a stripe the sum encoded again."""
    dtype = torch.float64
    (first, *_) = ran(way.make(), num_ranks, dtype, steps=1).results
    assert first is not None
    wire = way.codec().wire_dtype(torch.zeros(1, dtype=dtype), num_ranks)
    rounding = num_ranks * torch.finfo(wire).eps if way.path == "all_reduce" and wire.itemsize == 2 else 1e-12
    expected = told(way, contributions(num_ranks, dtype))
    torch.testing.assert_close(first.answers[0], expected, rtol=rounding, atol=rounding)
    assert expected.any()


# ---------------------------------------------------------------------- near the largest number

MOST = 65504.0
"""The largest float16."""


def answer_of(transform: Transform, xs: Sequence[Tensor]) -> Tensor:
    """The answer where rank i has xs[i], and all have the same share."""

    async def program(port: Port) -> Tensor:
        given = Bundle({"w": xs[port.rank].clone()})
        answer, _ = await transform.apply(port, given, transform.init(given))
        assert answer is not None
        return answer.flat

    first, *_ = VirtualWorld(CLUSTER, len(xs)).run(program).results
    assert first is not None
    return first


@pytest.mark.parametrize(
    ("codec", "route", "x"),
    [
        (c.fp16(), None, torch.full((6, 4), 1e6)),
        (c.fp16(), None, torch.full((6, 4), MOST, dtype=torch.float16)),
        (c.bf16(), None, torch.full((6, 4), MOST, dtype=torch.float16)),
        (c.bf16(), c.all_gather, torch.full((6, 4), MOST, dtype=torch.float16)),
        (c.bf16(), c.reduce_scatter, torch.full((6, 4), MOST, dtype=torch.float16)),
        (c.int8(), None, torch.full((6, 4), MOST, dtype=torch.float16)),
        (c.terngrad(), None, torch.full((6, 4), MOST, dtype=torch.float16)),
        (c.exact(), c.all_gather, torch.full((6, 4), -MOST, dtype=torch.float16)),
        (c.random_k(1.0), c.all_gather, torch.full((6, 4), MOST, dtype=torch.float16)),
        (c.top_k(1.0), None, torch.full((6, 4), MOST, dtype=torch.float16)),
        (c.feedback(c.top_k(1.0)), None, torch.full((6, 4), -MOST, dtype=torch.float16)),
        (c.dgc(1.0, 0.0), None, torch.full((6, 4), MOST, dtype=torch.float16)),
        (c.prune(0.5), None, torch.full((6, 4), MOST, dtype=torch.float16)),
    ],
    ids=lambda each: getattr(each, "name", None) or getattr(each, "__name__", None) or str(getattr(each, "dtype", "")),
)
@pytest.mark.parametrize("num_ranks", [2, 3, 5])
def test_what_is_finite_stays_finite(codec: Codec, route: Any, x: Tensor, num_ranks: int) -> None:
    """Also where rounded parts come to more than the whole, or a part is larger than the wire can say."""
    answer = answer_of(through(codec, route=route, exact_below=0), [x] * num_ranks)
    expected = x.reshape(-1).double().clamp(-MOST, MOST)
    torch.testing.assert_close(answer.double(), expected, rtol=0.02, atol=0)


@pytest.mark.parametrize(
    "codec", [c.top_k(1.0), c.feedback(c.top_k(1.0)), c.dgc(1.0, 0.0), c.exact()], ids=lambda each: each.facts.name
)
def test_small_parts_of_many_ranks_are_not_lost_beside_a_large_one(codec: Codec) -> None:
    """1 + 1/512 is 1 in bfloat16, so that 31 such parts, added one by one, would be nothing."""
    xs = [torch.full((6, 4), 1.0 if rank == 0 else 2.0**-9, dtype=torch.bfloat16) for rank in range(32)]
    answer = answer_of(through(codec, route=c.all_gather, exact_below=0), xs)
    assert torch.equal(answer, torch.full((24,), (1 + 31 / 512) / 32).bfloat16())


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("route", [None, c.all_gather, c.reduce_scatter])
def test_what_is_not_finite_is_not_clamped(route: Any, value: float) -> None:
    x = torch.full((6, 4), value, dtype=torch.float16)
    answer = answer_of(through(c.bf16(), route=route, exact_below=0), [x] * 3)
    torch.testing.assert_close(answer, x.reshape(-1), equal_nan=True)


# ---------------------------------------------------------------------- 16-bit tensors

LONG = 8
EXACT_TO_THE_RANKS = [
    way
    for way in WAYS
    if (way.fed or way.row.feeds_itself) and not (way.row.draws and not way.row.sparse and way.path == "all_gather")
]
"""Two ranks with the same tensor send the same, unless each draws for itself: 16 bits hold the sum of both exactly."""


@pytest.mark.parametrize("dtype", NARROW, ids=str)
@pytest.mark.parametrize("way", EXACT_TO_THE_RANKS, ids=label)
def test_of_16_bit_tensors_nothing_is_lost_either(way: Way, dtype: torch.dtype) -> None:
    """Σ answers + both residuals = Σ x to the rounding of float32; residuals of 16 bits lose 100 times that."""
    transform = way.make()

    async def program(port: Port) -> tuple[Tensor, CodecState]:
        state = transform.init(Bundle(values(0, 0, dtype)))
        total = torch.zeros_like(Bundle(values(0, 0, torch.float64)).flat)
        for step in range(1, LONG + 1):
            answer, state = await transform.apply(port, Bundle(values(step, 0, dtype)), state)
            assert answer is not None
            assert answer.flat.dtype is dtype
            total += answer.flat
        return total, state

    first, second = VirtualWorld(CLUSTER, 2).run(program).results
    assert first is not None
    assert second is not None
    assert torch.equal(first[0], second[0])
    halves = [(Bundle(values(step, 0, dtype)).flat * 0.5).double() for step in range(1, LONG + 1)]
    given = 2 * torch.stack(halves).sum(0)
    total = first[0] + left(first[1], torch.float32) + left(second[1], torch.float32)
    torch.testing.assert_close(total, given, rtol=0, atol=2e-5)
