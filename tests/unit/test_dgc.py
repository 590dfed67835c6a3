"""Deep gradient compression (`dgc`), on tensors small enough to be checked by hand."""

from __future__ import annotations

import pytest
import torch

from polytempo import compression as c
from polytempo.compression.codecs.dgc import WARMUP, Accumulated
from polytempo.core import EncodeContext, Residual
from polytempo.core.state import wide
from unit.sparse_wires import DTYPES, every_dtype, normal, t, words

# The authors' result for these gradients: dgc/compression.py and the memory that it calls. With ratio 0.25 all 8
# elements are the sample (2 / ratio = 8), and 2 are sent.
GRADIENTS = [
    [0.1, -0.5, 0.2, 0.0, 0.4, -0.3, 0.05, 0.2],
    [0.3, 0.1, -0.2, 0.1, 0.1, -0.3, 0.05, 0.1],
    [-0.1, 0.2, 0.1, 0.4, 0.0, 0.1, 0.05, -0.2],
]
# step 1: u = v = g; -0.5 and 0.4 are the largest. Step 2: u = 0.5u + g, v += u:
#   u  0.35  0.1 -0.1 0.1 0.1 -0.45 0.075 0.2      v  0.45 0.1 0.1 0.1 0.1 -0.75 0.125 0.4
# step 3, after u and v are 0 at elements 0 and 5:
#   u -0.1  0.25 0.05 0.45 0.05 0.1 0.0875 -0.1    v -0.1 0.35 0.15 0.55 0.15 0.1 0.2125 0.3
SENT = [{1: -0.5, 4: 0.4}, {0: 0.45, 5: -0.75}, {1: 0.35, 3: 0.55}]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_dgc_as_in_the_authors_code(dtype: torch.dtype) -> None:
    codec, state = c.dgc(0.25, 0.5, dense_below=0), None
    for step, (gradient, sent) in enumerate(zip(GRADIENTS, SENT, strict=True), 1):
        x = torch.tensor(gradient, dtype=dtype)
        wire, state = codec.encode(x, state, EncodeContext(step))
        decoded = codec.decode(wire, x)
        assert {i: pytest.approx(value) for i, value in sent.items()} == {
            i: value for i, value in enumerate(decoded.tolist()) if value
        }
    expected_u = t(-0.1, 0, 0.05, 0, 0.05, 0.1, 0.0875, -0.1, dtype=dtype)
    expected_v = t(-0.1, 0, 0.15, 0, 0.15, 0.1, 0.2125, 0.3, dtype=dtype)
    torch.testing.assert_close(state.u.residual, expected_u)
    torch.testing.assert_close(state.v.residual, expected_v)


@every_dtype
def test_dgc_at_ratio_1_is_the_tensor_or_its_momentum(dtype: torch.dtype) -> None:
    plain, heavy, state, velocity = c.dgc(1.0, 0.0), c.dgc(1.0, 0.5), None, torch.zeros(50, dtype=wide(dtype))
    rest = torch.zeros_like(velocity)
    for step in range(3):
        x = normal(50, step, dtype)
        assert torch.equal(plain.decode(plain.encode(x)[0], x), x)
        wire, state = heavy.encode(x, state)
        velocity = velocity * 0.5 + x
        assert torch.equal(heavy.decode(wire, x), (velocity + rest).to(dtype))
        rest = velocity + rest - (velocity + rest).to(dtype)
    assert torch.equal(state.u.residual, velocity)
    if dtype is wide(dtype):
        assert state.v == Residual()
    else:
        assert torch.equal(state.v.residual, rest), "what 16 bits have rounded off"
        assert rest.any()


def test_dgc_without_momentum_loses_nothing() -> None:
    codec, state, total = c.dgc(0.02, 0.0, dense_below=0, sample=0.1), None, torch.zeros(5000)
    given_sum = torch.zeros(5000)
    for step in range(1, 31):
        x = normal(5000, step)
        wire, state = codec.encode(x, state, EncodeContext(step))
        codec.add_(wire, total)
        given_sum += x
        assert 80 <= words(wire)[0] <= 130
        assert wire.numel() <= codec.wire_bytes(x)
    torch.testing.assert_close(total + state.v.residual, given_sum, atol=1e-5, rtol=0)
    assert state.u == Residual(), "nothing of it goes on"


@every_dtype
def test_dgc_sends_no_zeros_where_fewer_than_k_are_not(dtype: torch.dtype) -> None:
    codec, x = c.dgc(0.01, 0.5, dense_below=0), torch.zeros(10_000, dtype=dtype)
    x[::1000] = 1.5
    wire, state = codec.encode(x)
    assert wire.numel() == 4 + 10 * (4 + x.element_size())
    assert torch.equal(codec.decode(wire, x), x)
    assert not state.u.residual.any()
    assert not state.v.residual.any()
    wire, _ = codec.encode(torch.zeros_like(x), state, EncodeContext(2))
    assert words(wire) == [0]


def test_dgc_does_not_stop_the_momentum_of_what_cancels_out() -> None:
    """u = -v there, so v becomes 0, which is not sent; u goes on."""
    for dtype in DTYPES[:2]:
        x = torch.zeros(2000, dtype=dtype)
        x[5] = -0.75
        v = torch.zeros_like(x)
        v[5] = 0.5
        u = v.clone()
        codec = c.dgc(0.01, 0.5, dense_below=0)
        wire, state = codec.encode(x, Accumulated(Residual(u), Residual(v)))
        assert words(wire) == [0]
        assert state.u.residual[5] == -0.5
        assert state.v.residual[5] == 0.0


def test_dgc_clips_each_tensor_and_warms_up() -> None:
    x = t(3.0, 4.0)
    clipped = c.dgc(1.0, 0.0, clip=1.0)
    torch.testing.assert_close(clipped.decode(clipped.encode(x)[0], x), t(0.6, 0.8))
    assert torch.equal(clipped.decode(clipped.encode(x / 8)[0], x), x / 8)
    codec = c.dgc(0.001, warmup_steps=8)
    assert [codec.ratio_at(step) for step in range(1, 11)] == [r for r in WARMUP for _ in range(2)] + [0.001] * 2
    assert [c.dgc(0.01, warmup_steps=4).ratio_at(step) for step in range(1, 6)] == [0.25, 0.063, 0.015, 0.01, 0.01]


@pytest.mark.parametrize("codec", [c.dgc(0.1, dense_below=0), c.dgc(1.0)], ids=lambda codec: codec.facts.name)
@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
def test_dgc_keeps_its_memory_where_the_wire_does_not_fit(codec: c.dgc, dtype: torch.dtype) -> None:
    x = normal(400, 1, dtype)
    _, state = codec.encode(x)
    before = [getattr(part, "residual", part) for part in state]
    kept = [None if tensor is None else tensor.clone() for tensor in before]
    with pytest.raises(ValueError, match="out has 8 bytes"):
        codec.encode(x, state, EncodeContext(2), torch.zeros(8, dtype=torch.uint8))
    for tensor, copy in zip(before, kept, strict=True):
        assert copy is None or torch.equal(tensor, copy)
