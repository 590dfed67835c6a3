"""Encoded pushes and pulls that are damaged, no numbers or impossible: they are refused, and the shard goes on."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from polytempo import strategies
from polytempo.compression import (
    bf16,
    dgc,
    dynamic8,
    exact,
    feedback,
    fp16,
    int8,
    one_bit,
    qsgd,
    random_k,
    terngrad,
    top_k,
)
from polytempo.compression.exchange.packing import Piece
from polytempo.core import Codec, EncodeContext, NotFinite
from polytempo.server.encoding import Coding, Encoder, Overflown
from polytempo.server.layout import Span
from polytempo.server.message import (
    Pull,
    Pulled,
    Push,
    Pushed,
)
from polytempo.server.timing import Timing
from polytempo.server.worker.client import Client, VectorFormat
from virtual.compressed_shards import BY_ROWS, FED, LAUNCHER, MODEL, NUMEL, by_name, client, delivered, gradients, shard


def damaged(wire: Tensor) -> dict[str, Tensor]:
    return {
        "another dtype": wire.view(torch.int32),
        "no vector": wire.view(1, -1),
        "nothing": wire[:0],
        "too short": wire[:-8],
        "too long": torch.cat([wire, wire[:8]]),
        "uncompressed": torch.zeros(NUMEL),
    }


@pytest.mark.parametrize("how", damaged(torch.zeros(16, dtype=torch.uint8)))
@pytest.mark.parametrize("codec", FED, **by_name)
def test_what_cannot_be_decoded_is_refused_and_the_shard_goes_on(codec: Codec, how: str) -> None:
    machine = shard(codec)
    (wire,) = Encoder(codec, MODEL, [(Span(0, NUMEL),)], torch.float32, 0).encode(gradients(1)[0])
    (reply,) = machine.apply(Push(0, 1, 1, 1, 0, 1, (), (0,), damaged(wire)[how]))
    assert isinstance(reply, Pushed)
    assert reply.verdict == "refused"
    assert "worker 0, clock 1: " in reply.reason
    assert codec.facts.name in reply.reason
    assert not machine.weights.any()
    (reply,) = machine.apply(Push(0, 1, 2, 1, 0, 1, (), (0,), wire))
    assert isinstance(reply, Pushed)
    assert reply.verdict == "applied"
    assert machine.weights.any()


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("codec", FED, **by_name)
def test_bytes_at_random_never_end_a_shard(codec: Codec, seed: int) -> None:
    machine = shard(codec)
    (wire,) = Encoder(codec, MODEL, [(Span(0, NUMEL),)], torch.float32, 0).encode(gradients(1)[0])
    noise = torch.randint(0, 256, wire.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)
    (reply,) = machine.apply(Push(0, 1, 1, 1, 0, 1, (), (0,), noise))
    assert isinstance(reply, Pushed)
    assert torch.isfinite(machine.weights).all()
    assert reply.verdict != "refused" or not machine.weights.any()


@pytest.mark.parametrize("codec", FED, **by_name)
def test_a_message_is_read_wherever_it_begins(codec: Codec) -> None:
    """Any memory will do: torch views bytes as floats only where address and offset both allow it."""
    coding = Coding(MODEL, (Span(0, NUMEL),), codec, torch.float32, own=True)
    message, _ = coding.encode(gradients(1)[0], coding.states, 1, 0)
    expected, seen = torch.zeros(NUMEL), torch.zeros(NUMEL)
    coding.into_(message, expected)
    memory = bytearray(message.numel() + 16)
    for begin in range(8):
        whole = torch.frombuffer(memory, dtype=torch.uint8, offset=begin)
        for place in (0, -whole.data_ptr() % 8):
            there = whole[place : place + message.numel()].copy_(message)
            coding.into_(there, seen.zero_())
            assert torch.equal(seen, expected)


def test_a_worker_that_comes_back_draws_anew_and_each_life_repeats_to_the_bit() -> None:
    """The encoder counts from 1 in every life."""

    def pushed(worker: int, incarnation: int) -> Tensor:
        life = Client(
            *(worker, incarnation, [(Span(0, NUMEL),)], [(10,)], LAUNCHER, Timing()),
            VectorFormat(parameters=MODEL, codec=qsgd(levels=1)),
        )
        life.push(gradients(1)[0], 1)
        ((_, request),) = life.outbox(0.0)
        assert isinstance(request, Push)
        return request.gradient

    lives = [(0, 1), (0, 2), (0, 1_000_001), (1, 1), (1, 2)]
    drawn = [pushed(*life) for life in lives]
    for one, life in enumerate(lives):
        assert [torch.equal(other, pushed(*life)) for other in drawn] == [one == n for n in range(len(lives))]


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_not_a_number_never_leaves_the_worker(value: float) -> None:
    worker = client(bf16(), BY_ROWS)
    worker.begin((7,), (1.0,), 1)
    bad = gradients(1)[0]
    bad[4003] = value
    with pytest.raises(NotFinite, match=r"element 3 of w\[4000:6000\] on rank 0 is (nan|inf), which bf16\(\)"):
        worker.push(bad, 1)
    assert not worker.outbox(0.0)
    assert worker.held == 1


@pytest.mark.parametrize("pull_codec", [int8(), dynamic8()], **by_name)
def test_weights_that_have_overflowed_end_no_shard_and_are_told_to_who_pulls(pull_codec: Codec) -> None:
    """No gradient was wrong, so none was refused; the shard serves the others' pushes, and has copies."""
    worker = client(None, BY_ROWS, pull_codec=pull_codec)
    machines = [shard(None, spans, number, pull_codec=pull_codec) for number, spans in enumerate(BY_ROWS)]
    steep = torch.zeros(NUMEL)
    steep[4003] = -3e38
    for clock in (1, 2):
        worker.push(steep, clock)
        delivered(worker, machines)
    (answer,) = machines[2].apply(Pull(1, 1, 1, 0, -1))
    assert isinstance(answer, Pulled)
    worker.pull(3)
    told = rf"^shard 2 holds inf as w\[4003\], which pull_codec={pull_codec.facts.name[:4]}.* lower the learning rate"
    with pytest.raises(Overflown, match=told):
        delivered(worker, machines)
    copy = shard(None, BY_ROWS[2], 2, pull_codec=pull_codec)
    copy.load(*machines[2].dump())
    again = [each.apply(Pull(1, 1, 2, 1, -1))[0] for each in (machines[2], copy)]
    assert all(isinstance(each, Pulled) and torch.equal(each.values, answer.values) for each in again)
    (pushed,) = machines[2].apply(Push(1, 1, 3, 1, 0, 1, (), (), torch.ones(2000)))
    assert isinstance(pushed, Pushed)
    assert pushed.verdict == "applied"


def test_finite_weights_that_a_codec_refuses_arrive_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    machine, worker = shard(None, pull_codec=int8()), client(None, pull_codec=int8())
    worker.push(gradients(1)[0] / 3, 1)
    delivered(worker, [machine])

    def refusing(*given: Any) -> Any:
        raise NotFinite("int8(256)", 0, 0.0)

    monkeypatch.setattr("polytempo.server.encoding.Coding.encode", refusing)
    pending = worker.pull(2)
    delivered(worker, [machine])
    assert pending.value is not None
    assert torch.equal(pending.value, machine.weights)


def test_what_dgc_has_not_sent_is_counted_without_its_momentum() -> None:
    codec = dgc(0.01, momentum=0.5, dense_below=0)
    encoder, state = Encoder(codec, MODEL, [(Span(0, NUMEL),)], torch.float32, worker=0), None
    for step, gradient in enumerate(gradients(2), start=1):
        encoder.encode(gradient)
        _, state = codec.encode(gradient[6060:], state, EncodeContext(step, 0, Piece("v", 0, 1940, codec).number))
    assert state is not None
    assert torch.equal(encoder.residual()[6060:], state.v.residual)
    before = encoder.residual()
    encoder.move(BY_ROWS)
    assert torch.equal(encoder.residual(), before)


def test_impossible_codecs_are_refused_when_the_strategy_is_built() -> None:
    for named, remedy in (
        (lambda: strategies.downpour(codec=random_k(0.1)), r"random_k.*workers .* at different steps; use top_k"),
        (lambda: strategies.async_sgd(codec=feedback(random_k(0.1))), r"feedback\(random_k.*use top_k"),
        (
            lambda: strategies.softsync(pull_codec=feedback(bf16())),
            r"feedback\(bf16\(\)\) keeps a residual.*use bf16\(\)",
        ),
        (lambda: strategies.ssp(pull_codec=top_k(0.01)), r"does not keep every weight.*use bf16\(\)"),
        (
            lambda: strategies.staleness_aware(pull_codec=one_bit()),
            r"one_bit\(\) may change .* by 99.9% of .* bf16\(\)",
        ),
        (lambda: strategies.downpour(pull_codec=int8(block=100_000)), r"int8\(block=100000\) may .* by 60.8% .* finer"),
        (lambda: strategies.downpour(pull_codec=qsgd(levels=7)), r"qsgd\(levels=7, .* may change .* by 161.6% of"),
        (
            lambda: strategies.downpour(pull_codec=terngrad()),
            r"terngrad\(.* may change the weights of a large tensor by",
        ),
    ):
        with pytest.raises(ValueError, match=remedy):
            named()
    for codec in (fp16(), bf16(), int8(), exact(), qsgd(levels=32767)):
        assert strategies.downpour(pull_codec=codec).server.pull_codec is codec  # type: ignore[union-attr]


def test_codecs_are_part_of_a_strategys_name_where_there_are_any() -> None:
    assert str(strategies.async_sgd()) == "async_sgd(shards=1, replicas=0, rate=None)"
    named = str(strategies.async_sgd(codec=feedback(bf16()), pull_codec=fp16()))
    assert named == "async_sgd(shards=1, replicas=0, rate=None, codec=feedback(bf16()), pull_codec=fp16())"
