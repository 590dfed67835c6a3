"""`delta`: a pull sends the words that have changed since the worker's last one, and the worker holds the same bits."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

import polytempo as pt
from polytempo import strategies
from polytempo.compression import all_gather, bf16, delta, feedback, fp16, int8, pca, qsgd, top_k
from polytempo.compression.encoding.delta import HEAD_BYTES
from polytempo.core.calls.refusals import Incompatible
from polytempo.core.codec import Codec, DeltaCodec
from polytempo.core.rule import Service
from polytempo.runs.simulated.simulate import simulate
from polytempo.server.encoding import Coding, Decoder, ShownEncoding, Undecodable
from polytempo.server.layout import Span
from polytempo.server.message import COORDINATOR, Members, Message, Pull, Pulled, Reshape
from polytempo.server.rules.synchronous_step import hardsync
from polytempo.server.service import served
from virtual.compressed_shards import BY_ROWS, DIGITS, MODEL, NUMEL, client, delivered, shard

INTS = {torch.float16: torch.int16, torch.bfloat16: torch.int16, torch.float32: torch.int32, torch.float64: torch.int64}
by_name = {"ids": lambda value: str(value)}


def words(dtype: torch.dtype, count: int, seed: int) -> Tensor:
    """Any bits, as a message: infinities, NaNs with payloads, denormals and zeros of both signs among them."""
    info = torch.iinfo(INTS[dtype])
    found = torch.randint(
        info.min, info.max, (count,), generator=torch.Generator().manual_seed(seed), dtype=INTS[dtype]
    )
    special = [float("inf"), float("nan"), -0.0, 0.0, torch.finfo(dtype).smallest_normal / 4]
    found[:5] = torch.tensor(special, dtype=dtype).view(INTS[dtype])
    return found


@pytest.mark.parametrize("dtype", INTS, **by_name)
@pytest.mark.parametrize("changed", [(), (0,), (2,), (3, 7), (254,), (255,), (256,), (511, 1023), range(0, 1024, 3)])
def test_all_bits_of_changed_words_arrive_and_the_bytes_are_counted(dtype: torch.dtype, changed: list[int]) -> None:
    held = words(dtype, 1024, 1)
    message = held.clone()
    at = torch.tensor(list(changed), dtype=torch.int64)
    message[at] = torch.where(message[at] == words(dtype, 1024, 2)[at], 7, words(dtype, 1024, 2)[at])
    codec = delta()
    wire = codec.difference(message.view(torch.uint8), held.view(torch.uint8), 4, dtype)
    gaps = torch.diff(at, prepend=torch.tensor([-1])) - 1
    expected = HEAD_BYTES + len(at) * (dtype.itemsize + 1) + int((gaps // 255).sum())
    assert expected <= wire.numel() < expected + 8
    assert torch.equal(codec.message(wire, held.view(torch.uint8), 4, dtype).view(INTS[dtype]), message)


def test_the_whole_is_sent_where_more_has_changed_than_pays() -> None:
    """Words of 2 bytes and gaps of 1: up to two thirds of the words."""
    held = words(torch.bfloat16, 900, 1)
    for changed, bytes_ in ((599, HEAD_BYTES + 3 * 599 + 3), (600, HEAD_BYTES + 1800)):
        message = held.clone()
        message[:changed] ^= 1
        wire = delta(bf16()).difference(message.view(torch.uint8), held.view(torch.uint8), 1, torch.float32)
        assert wire.numel() == bytes_
        assert torch.equal(
            delta(bf16()).message(wire, held.view(torch.uint8), 1, torch.float32), message.view(torch.uint8)
        )


def test_damaged_wires_and_another_base_are_refused() -> None:
    held, message = torch.zeros(64, dtype=torch.uint8), torch.zeros(64, dtype=torch.uint8)
    message[8] = 1
    wire = delta().difference(message, held, 3, torch.float32)
    beyond = wire.clone()
    beyond[HEAD_BYTES + 4] = 200
    for bad, base, version in [
        (wire, held, 2),
        (wire, None, -1),
        (wire[:8], held, 3),
        (wire.view(torch.int32), held, 3),
        (wire[:-8], held, 3),
        (beyond, held, 3),
    ]:
        with pytest.raises(ValueError, match=r"not a wire|is held|words"):
            delta().message(bad, base, version, torch.float32)


# ---------------------------------------------------------------------------------------------- a worker and its shards


@pytest.mark.parametrize("codec", [delta(), delta(bf16()), delta(fp16()), delta(int8())], **by_name)
def test_pulled_is_held_bit_by_bit(codec: DeltaCodec) -> None:
    """The values are the same without `delta`. The first pull of a life is whole."""
    machine, plain = shard(None, pull_codec=codec), shard(None, pull_codec=codec.codec)
    worker, other = client(None, pull_codec=codec), client(None, pull_codec=codec.codec)
    sizes = []
    for clock in range(1, 5):
        gradient = torch.zeros(NUMEL)
        gradient[100 * clock : 100 * clock + 40] = torch.arange(1, 41) / 7
        for each, its in ((worker, machine), (other, plain)):
            each.push(gradient, clock)
            delivered(each, [its])
        pending, expected = worker.pull(clock), other.pull(clock)
        sizes += [message.values.numel() for message in answers(worker, machine)]
        delivered(other, [plain])
        assert pending.value is not None
        assert torch.equal(pending.value.view(torch.int32), expected.value.view(torch.int32))  # type: ignore[union-attr]
        again = shard(None, pull_codec=codec)
        again.load(*machine.dump())  # a copy goes on with the same base
        machine = again
    whole = sizes[0]
    assert whole > NUMEL
    assert max(sizes[1:]) < 0.15 * whole
    machine.apply(Members(COORDINATOR, 1, 2, ((0, 2), (1, 1))))
    (reply,) = machine.apply(Pull(0, 2, 1, 1, 4))  # it says that it holds version 4, but that was its life before
    assert isinstance(reply, Pulled)
    assert reply.values.numel() == whole


def answers(worker, machine) -> list[Pulled]:  # type: ignore[no-untyped-def]
    found = []
    for to, request in worker.outbox(0.0):
        for reply in machine.apply(request):
            if isinstance(reply, Pulled):
                found.append(reply)
            worker.receive(0.0, to, reply)
    return found


@pytest.mark.parametrize("codec", [delta(), delta(bf16()), delta(fp16())], **by_name)
def test_nan_payloads_are_pulled_as_they_are(codec: DeltaCodec) -> None:
    """So are -0.0 and denormals. With 16 bits the words are equal."""
    spans = (Span(0, NUMEL),)
    shown = ShownEncoding(Coding(MODEL, spans, codec.codec, torch.float32, own=True), codec)
    decoder, flat = Decoder(codec, MODEL, [spans], torch.float32), torch.zeros(NUMEL)
    before: tuple[int, Tensor] | None = None
    for version in range(3):
        weights = words(torch.float32, NUMEL, 0)
        weights[5 : 50 * version] = words(torch.float32, NUMEL, version)[5 : 50 * version]
        now = weights.view(torch.float32)
        wire = shown.message(now, version, before)
        assert wire.numel() < 1000 or version == 0
        decoder.place_(flat, 0, wire, version)
        before = version, now
        if codec.codec.facts.law.kind == "lossless":
            assert torch.equal(flat.view(torch.int32), weights)
        else:
            word = codec.codec.wire_dtype(now)
            same = codec.codec.encode(now[:6000])[0].view(torch.int16) == flat[:6000].to(word).view(torch.int16)
            assert bool((same | now[:6000].isnan()).all())


def test_an_answer_that_was_lost_comes_again_against_the_same_base() -> None:
    machine, worker = shard(None, pull_codec=delta(bf16())), client(None, pull_codec=delta(bf16()))
    worker.pull(1)
    delivered(worker, [machine])
    worker.push((torch.arange(NUMEL) == 5).float(), 1)
    delivered(worker, [machine])
    pending = worker.pull(2)
    ((to, request),) = worker.outbox(0.0)
    (lost,) = machine.apply(request)  # type: ignore[arg-type]
    (again,) = machine.status_of(request).replies  # type: ignore[arg-type]
    assert isinstance(lost, Pulled)
    assert again is lost
    worker.receive(0.0, to, again)
    assert worker.receive(0.0, to, again) == []  # a second copy changes nothing
    assert pending.value is not None
    assert float(pending.value[5]) == float(machine.weights[5]) == -1
    with pytest.raises(Undecodable, match=r"shard 0: words that changed since version 0 came, and version 1 is held"):
        worker._decoder.place_(pending.value, 0, lost.values, 1)  # type: ignore[union-attr]


def test_another_layout_of_shards_sends_all_again() -> None:
    codec = delta(bf16())
    machines = [shard(None, spans, number, pull_codec=codec) for number, spans in enumerate(BY_ROWS)]
    worker = client(None, BY_ROWS, pull_codec=codec)
    for clock in (1, 2):
        worker.pull(clock)
        sent = [request for request in delivered(worker, machines) if isinstance(request, Pull)]
        assert {request.basis for request in sent} == {-1 if clock == 1 else 0}
    machines[0].apply(Reshape(COORDINATOR, 1, 2, (Span(0, 2000),)))
    (reply,) = machines[0].apply(Pull(0, 1, 3, 3, 0))
    assert isinstance(reply, Pulled)
    assert reply.values.numel() == HEAD_BYTES + 4000
    worker._decoder.move(BY_ROWS)  # type: ignore[union-attr]
    assert [worker._decoder.held(number) for number in range(4)] == [-1] * 4  # type: ignore[union-attr]


# ---------------------------------------------------------------------------------------------------------------- runs


def test_a_run_is_the_same_with_delta_and_sends_less() -> None:
    """Small steps change few bf16 words; two workers, two shards."""
    service = Service(hardsync(), shards=2, deals="evenly")
    made = [
        simulate(DIGITS, served("synchronous", replace(service, pull_codec=codec)), 2, steps=20, lr=1e-4)
        for codec in (bf16(), delta(bf16()))
    ]
    assert made[0].parameters_sha256 == made[1].parameters_sha256
    first, second = (result.server["bytes_sent"] for result in made)  # type: ignore[index]
    assert second < 0.35 * first


def test_explain_says_the_most() -> None:
    """16 bytes a shard more than the codec alone, and not exactly."""
    model = {"w": torch.empty(4096)}
    plain = pt.explain(strategies.downpour(shards=2, pull_every=1, pull_codec=bf16()), 4, model)
    found = pt.explain(strategies.downpour(shards=2, pull_every=1, pull_codec=delta(bf16())), 4, model)
    assert found.at(2).bytes - plain.at(2).bytes == 4 * 2 * HEAD_BYTES
    assert "delta(bf16())" in str(found)


@pytest.mark.parametrize(
    ("make", "code"),
    [
        (lambda: strategies.async_sgd(codec=delta(bf16())), "PT2801"),
        (lambda: strategies.local_sgd(codec=delta()), "PT2801"),
        (lambda: feedback(delta()), "PT2801"),
        (lambda: pt.compression.through(delta(), all_gather), "PT2801"),
        (lambda: delta(feedback(bf16())), "PT2802"),
        (lambda: delta(qsgd()), "PT2802"),
        (lambda: delta(pca(error=0.1)), "PT2802"),
        (lambda: pt.federated.fed_coded(pull_codec=delta()), "PT2512"),
    ],
)  # fmt: skip
def test_where_there_is_no_base_it_is_refused(make, code: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(Incompatible, match=code):
        make()


def test_its_codec_is_checked_as_that_of_a_pull_and_its_name_is_read_again() -> None:
    with pytest.raises(ValueError, match="does not keep every weight"):
        strategies.ssp(pull_codec=delta(top_k(0.01)))
    for text in ("async_sgd(pull_codec=delta(bf16))", "async_sgd(pull_codec=delta)"):
        strategy = pt.parse_strategy(text)
        assert pt.parse_strategy(str(strategy)).server.pull_codec == strategy.server.pull_codec  # type: ignore[union-attr]
    assert "pull_codec=delta(bf16())" in str(pt.parse_strategy("async_sgd(pull_codec=delta(bf16))"))


def test_messages_price_what_they_bring() -> None:
    machine = shard(None, pull_codec=delta(bf16()))
    (reply,) = machine.apply(Pull(0, 1, 1, 1, -1))
    assert reply.num_bytes == Message.HEADER_BYTES + HEAD_BYTES + 2 * (NUMEL - 60) + 4 * 60
    assert MODEL[1].numel == 60


def test_no_other_codec_is_taken_for_one() -> None:
    assert isinstance(delta(), DeltaCodec)
    assert not isinstance(delta(), Codec)
    assert not isinstance(feedback(bf16()), DeltaCodec)
