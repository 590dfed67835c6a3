"""Codecs that send a few elements, on tensors small enough to be checked by hand."""

from __future__ import annotations

import math
import struct

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from polytempo import compression as c
from polytempo.compression.codecs.dgc import Accumulated
from polytempo.compression.codecs.top_k import packed_indices, unpacked_indices
from polytempo.compression.encoding import entries
from polytempo.compression.encoding.feedback import Fed
from polytempo.core import Codec, EncodeContext, NotFinite, Residual
from polytempo.native.kernels import codes_sparse
from some_cases import examples
from unit.sparse_wires import CODECS, DTYPES, every_codec, every_dtype, normal, t, words

HALF = struct.unpack("<I", struct.pack("<f", 0.5))[0]


def test_threshold_sends_tau_not_the_value_and_once() -> None:
    codec, residual = c.threshold(0.5), t(0, 0.25, 0, 0.5, 0, *[0] * 59)
    x = t(0.5, 0.5, -2.0, -1.25, 0.0, *[0] * 59)
    wire, _ = codec.encode_(x, residual)
    assert words(wire) == [3, HALF, 1, 2 + 2**31, 3 + 2**31]
    assert residual.tolist()[:5] == [0.5, 0.25, -1.5, -0.25, 0.0]
    assert codec.decode(wire, x).tolist()[:5] == [0, 0.5, -0.5, -0.5, 0]


def test_where_a_map_is_shorter_it_is_a_map() -> None:
    codec, x = c.threshold(0.5), t(*[1.0, -1.0, 0.0] * 6)
    wire, _ = codec.encode(x)
    ups, downs = (sum(1 << i for i in range(16) if i % 3 == rest) for rest in (0, 1))
    assert words(wire) == [2**31 + 12, HALF, ups | downs << 16, 1 << 16]
    assert wire.numel() == codec.wire_bytes(x) == 8 + 4 * 2
    assert codec.decode(wire, x).tolist() == [0.5, -0.5, 0.0] * 6


def test_tau_follows_the_density_and_nothing_is_lost() -> None:
    codec, n = c.feedback(c.threshold(1.0, density=0.03)), 1000
    total, decoded = torch.zeros(n).double(), torch.zeros(n).double()
    state, shares = None, []
    for step in range(120):
        x = normal(n, step)
        wire, state = codec.encode(x, state)
        answer = codec.decode(wire, x)
        total, decoded = total + x, decoded + answer
        shares.append(int(answer.count_nonzero()) / n)
    assert shares[1:] == pytest.approx([0.03] * 119, rel=0.4)
    torch.testing.assert_close(decoded + state.memory.residual, total, rtol=0, atol=1e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_gradients_that_stay_the_same_are_sent_at_an_even_rate(dtype: torch.dtype) -> None:
    """Residuals pile up below τ: a threshold by the last step's number alone would send all, then nothing, in turns."""
    codec, x = c.feedback(c.threshold(density=0.01)), normal(20_000, 1).to(dtype)
    state, shares = None, []
    for step in range(40):
        wire, state = codec.encode(x, state, EncodeContext(step))
        shares.append(int(codec.decode(wire, x).count_nonzero()) / x.numel())
    assert shares[5:] == pytest.approx([0.01] * 35, abs=0.008)


@every_dtype
def test_tau_is_just_below_the_share_that_is_sent(dtype: torch.dtype) -> None:
    codec, x = c.threshold(0.5, density=0.2), t(1, -3, 2, 3.5, 0, 0, 0.25, 0, -0.5, 1, dtype=dtype)
    sent = codec.decode(codec.encode(x)[0], x)
    assert [n for n, v in enumerate(sent.tolist()) if v] == [1, 3]
    assert 2.9 < -sent[1] == sent[3] < 3
    few = t(1, 0.25, *[0.0] * 98, dtype=dtype)
    assert c.threshold(0.5, density=0.2).encode(few)[0].numel() == 8 + 4 * 2
    nothing = torch.zeros(100, dtype=dtype)
    assert c.threshold(0.5, density=0.2).encode(nothing)[0].numel() == 8


@every_dtype
def test_top_k_are_the_largest_and_the_first_of_equal_ones(dtype: torch.dtype) -> None:
    codec, x = c.top_k(0.3), t(1, -3, 2, 3, 0, 3, -2, 0, 1, 1, dtype=dtype)
    wire, _ = codec.encode(x)
    assert wire.numel() == codec.wire_bytes(x) == 12 + (3 * x.element_size() + 3) // 4 * 4
    assert words(wire)[:3] == [1, 3, 5]
    assert codec.decode(wire, x).tolist() == [0, -3, 0, 3, 0, 3, 0, 0, 0, 0]
    for ratio in (0.5, 0.41):  # ⌈4.1⌉
        assert words(c.top_k(ratio).encode(x)[0])[:5] == [1, 2, 3, 5, 6]
    assert words(c.top_k(1e-9).encode(t(*[0] * 5))[0]) == [0, 0]


def test_indices_become_a_little_more_than_a_byte() -> None:
    x, codec = normal(100_000), c.top_k(0.01, entropy=True)
    wire, _ = codec.encode(x)
    assert torch.equal(codec.decode(wire, x), c.top_k(0.01).decode(c.top_k(0.01).encode(x)[0], x))
    assert 1000 * 4 < wire.numel() < 1000 * (4 + 1.4)
    few, _ = c.top_k(1.0, entropy=True).encode(t(3, 4))
    assert words(few)[:3] == [0, 0, 1], "zstd would be longer"
    raw = packed_indices(torch.tensor([3, 5, 260, 2**31 - 1], dtype=torch.int32))
    assert unpacked_indices(raw, 4).tolist() == [3, 5, 260, 2**31 - 1]


def test_without_zstandard_one_learns_so_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "zstandard", None)
    with pytest.raises(ImportError, match=r"pip install 'polytempo\[zstd\]'"):
        c.top_k(entropy=True)


def test_random_k_is_the_same_for_all_ranks_and_another_each_step() -> None:
    codec, x, y = c.random_k(0.25, seed=3), normal(40), normal(40, 1)
    first = codec.encoding.drawn(x, EncodeContext(1, 0, 7))
    assert torch.equal(first, codec.encoding.drawn(x, EncodeContext(1, 5, 7)))
    for other in (EncodeContext(2, 0, 7), EncodeContext(1, 0, 8)):
        assert not torch.equal(first, codec.encoding.drawn(x, other))
    assert not torch.equal(first, c.random_k(0.25, seed=4).encoding.drawn(x, EncodeContext(1, 0, 7)))
    when = EncodeContext(1, 0, 7, terms=2)
    total = codec.encode(x, when=when)[0] + codec.encode(y, when=when._replace(rank=1))[0]
    expected = torch.zeros(40).index_copy(0, first, (x + y)[first])
    assert torch.equal(codec.decode(total, x, when), expected)


@settings(max_examples=examples(40), deadline=None)
@given(st.integers(1, 200), st.floats(1e-3, 1.0), st.integers(1, 10**6))
def test_the_drawn_are_distinct(n: int, ratio: float, step: int) -> None:
    codec, like = c.random_k(ratio), torch.empty(n)
    drawn = codec.encoding.drawn(like, EncodeContext(step))
    assert len(set(drawn.tolist())) == drawn.numel() == max(1, math.ceil(ratio * n))
    assert 0 <= int(drawn.min()) <= int(drawn.max()) < n


@pytest.mark.parametrize(("n", "ratio"), [(8, 0.375), (10, 0.3), (7, 1.0), (5, 0.01)])
def test_every_element_is_drawn_equally_often(n: int, ratio: float) -> None:
    codec, like, draws = c.random_k(ratio), torch.empty(n), 800
    counts = torch.zeros(n)
    for step in range(draws):
        counts[codec.encoding.drawn(like, EncodeContext(step))] += 1
    share = codec.encoding.num_sent(like) / n
    assert float((counts / draws - share).abs().max()) <= 4 * math.sqrt(share * (1 - share) / draws)


def test_unbiased_values_are_scaled_when_decoded() -> None:
    codec, x = c.random_k(0.25, unbiased=True), torch.full((8,), 3.0)
    wire, _ = codec.encode(x)
    assert wire.tolist() == [3.0, 3.0]
    assert sorted(codec.decode(wire, x).tolist()) == [0.0] * 6 + [12.0] * 2
    assert codec.facts.law.bound(x) == 3.0


def test_prune_keeps_what_is_not_small_against_the_mean() -> None:
    codec, x = c.prune(0.5), t(4, 0.9, -2, 0, 1, -1, 0.1, 0)  # rms = 1.71
    wire, _ = codec.encode(x)
    assert codec.decode(wire, x).tolist() == pytest.approx([4, 0.9, -2, 0, 1, -1, 0, 0])
    assert words(wire)[:2] == [entries.MASK << 30 | 5, 0b110111]
    assert codec.encode(t(*[0.0] * 40))[0].tolist() == [0] * 4, "zeros stay out"
    equal = torch.full((1000,), 0.1)
    assert torch.equal(c.prune(1.0).decode(c.prune(1.0).encode(equal)[0], equal), equal)
    huge = t(3e38, 3e38, 1e38)
    assert c.prune(1.0).decode(c.prune(1.0).encode(huge)[0], huge).tolist() == t(3e38, 3e38, 0).tolist()


@every_dtype
@every_codec
def test_what_was_not_sent_is_kept_to_the_bit(codec: Codec, dtype: torch.dtype) -> None:
    for n in (0, 1, 31, 500):
        x, residual = normal(n, 1, dtype), normal(n, 2, dtype)
        v, when = x + residual, EncodeContext(5)
        wire, _ = codec.encode_(x, residual, codec.init(x), when)
        assert torch.equal(residual, v - codec.decode(wire, x, when))
        assert wire.nbytes <= codec.wire_bytes(x)
        assert wire.nbytes == codec.wire_bytes(x) or not codec.facts.fixed
        alone, _ = codec.encode(v, codec.init(x), when, torch.full_like(wire, 77))
        assert torch.equal(alone.view(torch.uint8), wire.view(torch.uint8))


def test_memory_of_any_layout() -> None:
    for codec in CODECS:
        x, residual, out = normal(60).view(6, 10).t(), normal(60, 1).view(6, 10).t(), torch.zeros(6, 10).t()
        v = x + residual
        wire, _ = codec.encode_(x, residual)
        codec.add_(wire, out)
        assert torch.equal(v - out, residual)
        assert torch.equal(out, codec.decode(wire, torch.empty(10, 6)))


@every_dtype
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_no_number_is_refused_before_anything_changes(bad: float, dtype: torch.dtype) -> None:
    for codec in [*CODECS, c.dgc(0.1, clip=1.0, dense_below=0), c.dgc(1.0), c.dgc(0.1, dense_below=0)]:
        x, residual = normal(100, 1, dtype), normal(100, 2, dtype)
        x[41] = bad
        before, state = residual.clone(), codec.init(x)
        own = Accumulated(Residual(residual), Residual(residual))
        feeds_itself = codec.facts.memory == "own"
        with pytest.raises(NotFinite, match="element 41"):
            _ = codec.encode(x, own) if feeds_itself else codec.encode_(x, residual, state)
        assert torch.equal(residual, before)


def malformed(codec: Codec, wire: Tensor) -> list[Tensor]:
    """Cut, with counts and indices beyond everything."""
    found = [wire[: max(0, wire.numel() - 4)], wire[:3]]
    for place, value in ((0, 0x3FFFFFF0), (0, 0xFFFFFFFF), (4, 0x7FFFFFF0), (8, 0x7FFFFFF0), (12, 0xFFFFFFFF)):
        if place >= wire.numel():
            continue
        changed = wire.clone()
        changed[place : place + 4] = torch.tensor(list(struct.pack("<I", value)), dtype=torch.uint8)
        found.append(changed)
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_a_wire_that_lies_is_refused_or_harmless(dtype: torch.dtype) -> None:
    x, refused = normal(400, 3, dtype), 0
    codecs = [c.threshold(0.5), c.threshold(2.9), c.top_k(0.01), c.top_k(0.1, True), c.prune(0.5), c.dgc(0.01, 0.0)]
    for codec in [*codecs, c.dgc(0.01, 0.0, dense_below=0)]:
        wire, _ = codec.encode(x)
        for wrong in malformed(codec, wire):
            out = torch.ones(400, dtype=dtype)
            try:
                codec.add_(wrong, out)
            except ValueError:
                refused += 1
                assert bool((out == 1).all()), f"{codec.facts.name} added a part of it"
    assert refused >= 30
    with pytest.raises(ValueError, match="has 3 elements, and the tensor's has 4"):
        c.random_k(0.01).add_(torch.ones(3, dtype=dtype), x)


@every_codec
@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
def test_memory_that_a_kernel_could_not_use_is_refused_before_anything_changes(
    codec: Codec, dtype: torch.dtype
) -> None:
    x, residual = normal(400, 1, dtype), normal(400, 2, dtype)
    wire, _ = codec.encode(x + residual, codec.init(x))
    before, n, out = residual.clone(), wire.numel(), torch.ones(400, dtype=dtype)
    memory = torch.zeros(4 * n, dtype=wire.dtype)
    for room in (memory[: n - 4], memory[: 2 * n : 2], torch.zeros(n, dtype=torch.int16), memory[:n].to("meta")):
        with pytest.raises(ValueError, match=r"out|a wire of"):
            codec.encode_(x, residual, codec.init(x), out=room)
        assert torch.equal(residual, before)
    for wrong in (memory[: 2 * n : 2], torch.zeros(n, dtype=torch.int16), memory[:n].view(-1, 1), wire.to("meta")):
        with pytest.raises(ValueError, match="a wire of"):
            codec.add_(wrong, out)
        assert bool((out == 1).all())


@every_codec
def test_a_residual_of_another_shape_meets_no_kernel(codec: Codec) -> None:
    x, residual = torch.ones(1000), torch.zeros(10)
    assert not codes_sparse.serves(x, residual)
    with pytest.raises((RuntimeError, ValueError)):
        codec.encode_(x, residual, codec.init(x))


@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
@pytest.mark.parametrize(
    "codec",
    [c.threshold(0.5), c.top_k(0.3), c.random_k(0.3), c.dgc(0.1, clip=1.0, dense_below=0)],
    ids=lambda x: x.facts.name,
)
def test_what_wants_a_gradient_is_encoded_without_one(codec: Codec, dtype: torch.dtype) -> None:
    """Warnings are errors: nothing asks such a tensor for a number."""
    x, residual = normal(400, 1, dtype).requires_grad_(), torch.zeros(400, dtype=dtype)
    assert not codec.encode(x, codec.init(x))[0].requires_grad
    if codec.facts.memory != "own":
        assert not codec.encode_(x, residual, codec.init(x))[0].requires_grad
        assert not residual.requires_grad


def expanded(n: int) -> Tensor:
    """n elements without memory for them."""
    return torch.zeros(1).expand(n)


@pytest.mark.parametrize("codec", [c.threshold(0.5), c.top_k(1e-9)], ids=lambda codec: codec.facts.name)
def test_indices_that_4_bytes_do_not_hold_are_refused(codec: Codec) -> None:
    for encode in (lambda x: codec.encode(x), lambda x: codec.encode_(x, x)):
        with pytest.raises(ValueError, match=f"of up to {2**31 - 1} elements, got {2**31}; split the tensor"):
            encode(expanded(2**31))


def test_random_k_draws_from_many_elements_without_overflow() -> None:
    """k · n is beyond int64 here; and so would 32 bits be, times a stratum of 2^31 places."""
    like, k = expanded(2**44 - 7), 2**20 + 1
    codec = c.random_k((k - 0.5) / like.numel())
    drawn = codec.encoding.drawn(like, EncodeContext())
    assert drawn.numel() == codec.encoding.num_sent(like) == k
    assert 0 <= int(drawn.min()) <= int(drawn.max()) < like.numel()
    gaps = (drawn.sort().values.diff()).double()
    assert float(gaps.min()) > 0
    assert float(gaps.max()) < 2 * like.numel() / k + 2, "a place in each stratum"
    for n, ratio in ((2**31, 1e-12), (2**44, 1e-4 / 2**20)):
        with pytest.raises(ValueError, match=f"of {n} elements in int64; take a larger ratio"):
            c.random_k(ratio).encoding.drawn(expanded(n), EncodeContext())


def test_what_cannot_be() -> None:
    for make, words_ in (
        (lambda: c.threshold(0.0), "tau must be a positive"),
        (lambda: c.threshold(1.0, density=2.0), "density is a share"),
        (lambda: c.top_k(0.0), "ratio is a share"),
        (lambda: c.random_k(1.5), "ratio is a share"),
        (lambda: c.prune(1.5), "below is a share"),
        (lambda: c.dgc(0.0), "ratio is a share"),
        (lambda: c.dgc(momentum=1.0), "momentum must be"),
        (lambda: c.dgc(clip=0.0), "clip is the norm"),
        (lambda: c.dgc(warmup_steps=-1), "numbers >= 0"),
        (lambda: c.feedback(c.dgc()), "without feedback"),
    ):
        with pytest.raises(ValueError, match=words_):
            make()
    assert isinstance(c.feedback(c.top_k()).init(torch.ones(2)), Fed)
