"""Encoded pushes and pulls: messages, memory, residuals, and a shard's answer to nonsense."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from polytempo import strategies
from polytempo.cluster import ethernet
from polytempo.compression import (
    bf16,
    exact,
    feedback,
    fp16,
    one_bit,
    top_k,
)
from polytempo.core import Codec, Residual, Strategy
from polytempo.core.rule import Service, UpdateRule
from polytempo.runs.simulated.simulate import simulate
from polytempo.runs.simulated.simulate_served import simulate_served
from polytempo.server.encoding import Encoder, RangeState, ranges, redistribute
from polytempo.server.layout import Span, shard_map, with_shard_added
from polytempo.server.message import (
    COORDINATOR,
    Members,
    Message,
    Pull,
    Pulled,
    Push,
    View,
)
from polytempo.server.rules.asynchronous import on_arrival, softsync
from polytempo.server.rules.synchronous_step import hardsync
from polytempo.server.service import served
from polytempo.server.shard.node import Node
from polytempo.server.shard.shard import Shard
from polytempo.server.timing import Timing
from polytempo.spec.run_options import RunOptions
from polytempo.spec.run_spec import RunSpec
from virtual.compressed_shards import (
    BY_ROWS,
    DIGITS,
    FED,
    LAUNCHER,
    MODEL,
    NUMEL,
    by_name,
    client,
    delivered,
    gradients,
    shard,
)

# ---------------------------------------------------------------------------------------------------------- the layout


@pytest.mark.parametrize(
    ("spans", "expected"),
    [
        ([(0, 8000)], [("w", 0, 0, (60, 100)), ("b", 6000, 6000, (60,)), ("v", 6060, 6060, (1940,))]),
        ([(2000, 4000)], [("w[2000:4000]", 0, 2000, (20, 100))]),
        ([(2050, 2320)], [("w[2050:2100]", 0, 2050, (50,)), ("w[2100:2300]", 50, 2100, (2, 100)),
                          ("w[2300:2320]", 250, 2300, (20,))]),
        ([(2010, 2090)], [("w[2010:2090]", 0, 2010, (80,))]),
        ([(5900, 6010), (7990, 8000)], [("w[5900:6000]", 0, 5900, (1, 100)), ("b[0:10]", 100, 6000, (10,)),
                                        ("v[1930:1940]", 110, 7990, (10,))]),
        ([], []),
    ],
)  # fmt: skip
def test_a_shard_is_whole_rows_and_what_a_cut_leaves_of_a_row(
    spans: list[tuple[int, int]], expected: list[tuple[str, int, int, tuple[int, ...]]]
) -> None:
    found = ranges(MODEL, tuple(Span(*span) for span in spans))
    assert [(each.name, each.begin, each.start, each.shape) for each in found] == expected
    assert {each.name[0] for each in found if each.is_small} <= {"b"}


# ------------------------------------------------------------------------------------------------- same as uncompressed


@pytest.mark.parametrize("shards", [1, 3])
def test_one_worker_with_exact_wires_is_plain_to_the_bit(shards: int) -> None:
    plain, encoded = (
        simulate(DIGITS, strategies.async_sgd(shards=shards, codec=codec, pull_codec=codec), 1, steps=8)
        for codec in (None, exact())
    )
    assert plain.parameters_sha256 == encoded.parameters_sha256


def synchronous(shards: int, codec: Codec | None, pull_codec: Codec | None = None) -> Strategy:
    made = Service(hardsync(), shards=shards, replicas=1, deals="evenly", codec=codec, pull_codec=pull_codec)
    return served(f"hardsync, {shards} shards", made)


def final(strategy: Strategy) -> str | None:
    return simulate_served(RunSpec.of(DIGITS, strategy, 3, RunOptions(steps=4)), ethernet()).parameters_sha256


def test_three_workers_with_exact_wires_are_plain_to_the_bit() -> None:
    assert final(synchronous(2, None)) == final(synchronous(2, exact(), exact()))


def test_one_shard_and_four_are_the_same_where_a_codec_knows_no_groups() -> None:
    """Groups would differ where cuts are inside rows: see the next test for cuts between rows."""
    one, four, plain = (final(synchronous(n, codec, bf16())) for n, codec in ((1, FED[0]), (4, FED[0]), (1, None)))
    assert one == four != plain


@pytest.mark.parametrize("codec", [feedback(bf16()), feedback(one_bit())], **by_name)
def test_one_shard_and_four_are_the_same_where_cuts_are_between_rows(codec: Codec) -> None:
    """Not for top_k, which takes the k largest of a shard's range, nor for int8, with blocks from a range's begin."""
    given = gradients(4)
    found = []
    for shards in (((Span(0, NUMEL),),), BY_ROWS):
        worker, machines = client(codec, shards), [shard(codec, s, n) for n, s in enumerate(shards)]
        for clock, gradient in enumerate(given):
            worker.push(gradient, clock)
            delivered(worker, machines)
        found.append(torch.cat([machine.weights for machine in machines]))
    assert torch.equal(found[0][:6000], found[1][:6000])
    assert torch.equal(*found) or codec.facts.name != "feedback(bf16())"  # v is one group of one_bit anywhere


# --------------------------------------------------------------------------------------------------- nothing gets lost


@pytest.mark.parametrize("codec", FED, **by_name)
def test_what_was_decoded_and_the_residuals_are_what_was_pushed_though_shards_move(codec: Codec) -> None:
    """Three layouts, the second with cuts inside rows; SGD with rate 1 adds up the decoded gradients."""
    given = gradients(6)
    layouts = [shard_map(MODEL, 3), with_shard_added(MODEL, shard_map(MODEL, 3)), ((Span(0, NUMEL),),)]
    encoder = Encoder(codec, MODEL, layouts[0], torch.float32, worker=0)
    decoded = torch.zeros(NUMEL, dtype=torch.float64)
    for number, layout in enumerate(layouts):
        before = encoder.residual()
        encoder.move(layout)
        assert torch.equal(encoder.residual(), before)
        machines = [shard(codec, spans, n) for n, spans in enumerate(layout)]
        for gradient in given[2 * number : 2 * number + 2]:
            for machine, spans, wire in zip(machines, layout, encoder.encode(gradient), strict=True):
                seen = machine.gradient_of(Push(0, 1, 1, 0, 0, 1, (), (), wire)).double()
                at = 0
                for begin, end in spans:
                    decoded[begin:end] += seen[at : at + end - begin]
                    at += end - begin
    assert encoder.residual().any()
    torch.testing.assert_close(decoded + encoder.residual(), sum(given).double(), rtol=1e-5, atol=1e-4)


def test_what_a_codec_remembers_of_an_element_goes_with_it() -> None:
    """Residuals by element, thresholds from the range that had most of it, and None where nothing was."""
    before = [
        RangeState(0, (4,), (Residual(torch.tensor([1.0, 2.0, 3.0, 4.0])), {"tau": 0.5})),
        RangeState(4, (1, 2), (Residual(), {"tau": 0.25})),
        RangeState(6, (2,), (Residual(torch.tensor([7.0, 8.0])), {"tau": 0.125})),
    ]
    fresh = (Residual(), {"tau": 1.0})
    residual, rest = redistribute(before, 3, (2, 2), fresh)
    assert (residual.residual.tolist(), rest) == ([[4.0, 0.0], [0.0, 7.0]], {"tau": 0.25})
    assert redistribute(before, 4, (2,), fresh) == (Residual(), {"tau": 0.25})
    assert redistribute(before, 8, (2,), fresh) == fresh
    assert redistribute([], 0, (2,), None) is None


def test_a_client_keeps_its_residual_when_shards_come() -> None:
    before, after = shard_map(MODEL, 1), with_shard_added(MODEL, shard_map(MODEL, 1))
    worker, machine = client(feedback(bf16()), before), shard(feedback(bf16()))
    worker.push(gradients(1)[0], 1)
    delivered(worker, [machine])
    residual = worker.residual()
    assert residual is not None
    assert residual.any()
    worker.receive(0.0, LAUNCHER, View(1, ((10,), (11,)), ((0, 1),), layout=1, spans=after))
    assert worker.layout == 1
    assert torch.equal(worker.residual(), residual)  # type: ignore[arg-type]


def test_residuals_move_bit_by_bit_while_training_goes_on() -> None:
    """2 shards at first, 3 after an epoch, 1 after two; a synchronous schedule, and a codec that knows no groups."""
    plain = strategies.backup_workers(backups=0, shards=2)
    assert plain.server is not None
    encoded = replace(plain, meeting=replace(plain.server, codec=feedback(bf16()), pull_codec=bf16()))
    hashes = [
        simulate(DIGITS, strategy, 3, epochs=3, batch_size=120, reshape=reshape).parameters_sha256
        for strategy, reshape in ((plain, {}), (encoded, {}), (encoded, {1: 3, 2: 1}))
    ]
    assert hashes[0] != hashes[1] == hashes[2]


# ----------------------------------------------------------------------------------------------- copies, and repetition


def test_a_push_that_comes_again_is_the_same_bytes() -> None:
    worker = client(feedback(one_bit()))
    worker.push(gradients(1)[0], 1)
    ((_, first),) = worker.outbox(0.0)
    again = [message for _, message in worker.tick(worker.timing.retry_s + 1.0) if isinstance(message, Push)]
    assert isinstance(first, Push)
    assert again[0] is first
    assert first.num_bytes == Message.HEADER_BYTES + first.gradient.numel()


def test_two_copies_and_one_that_comes_later_are_the_same() -> None:
    """Waiting gradients, earlier answers, and no worker's residual: all is in the log's entries."""
    more = {"rule": softsync(1), "pull_codec": bf16(), "replicas": 2}
    codec = feedback(one_bit())
    nodes = {node: Node(node, shard_without(codec, more), LAUNCHER, Timing(), blank=node == 3) for node in (1, 2, 3)}
    answers: list[Message] = []

    def give(source: int, to: int, message: Message) -> None:
        if to not in nodes:
            answers.append(message)
            return
        for receiver, answer in nodes[to].receive(0.0, source, message):
            give(to, receiver, answer)

    def see(epoch: int, *chain: int) -> None:
        for node in nodes:
            give(LAUNCHER, node, View(epoch, (chain,), ((0, 1), (1, 1))))

    see(1, 1, 2)
    give(LAUNCHER, 1, Members(COORDINATOR, 1, 1, ((0, 1), (1, 1))))
    encoders = [Encoder(codec, MODEL, [(Span(0, NUMEL),)], torch.float32, worker) for worker in (0, 1)]
    for clock, gradient in enumerate(gradients(5), start=1):
        worker = clock % 2  # the fifth waits for another one
        (wire,) = encoders[worker].encode(gradient)
        sequence = 2 * ((clock + 1) // 2) - 1
        give(worker, 1, Push(worker, 1, sequence, clock, 0, 1, (1.0,), (clock,), wire))
        if clock < 5:
            give(worker, 1, Pull(worker, 1, sequence + 1, clock, -1))
    see(2, 1, 2, 3)
    (wire,) = encoders[0].encode(gradients(6)[5])
    give(0, 1, Push(0, 1, 5, 6, 0, 1, (1.0,), (6,), wire))
    first, *others = (node.shard for node in nodes.values())
    assert first.version == 3
    for other in others:
        assert torch.equal(first.weights, other.weights)
        assert (first.version, first.index) == (other.version, other.index)
    pulled = [message for message in answers if isinstance(message, Pulled)]
    assert {message.values.dtype for message in pulled} == {torch.uint8}
    assert {message.values.numel() for message in pulled} == {2 * (NUMEL - 60) + 4 * 60}


def shard_without(codec: Codec, more: dict[str, Any]) -> Shard:
    """A shard without members; its node hears of them."""
    made = Service(**{"rule": on_arrival(), "optimizer": UpdateRule("sgd", lr=1.0), "codec": codec, **more})
    return Shard(0, MODEL, (Span(0, NUMEL),), torch.zeros(NUMEL), made, native=False)


def test_a_pull_lends_nothing_and_decodes_to_what_the_codec_keeps() -> None:
    machine, worker = shard(None, pull_codec=bf16()), client(None, pull_codec=bf16())
    worker.push(gradients(1)[0] / 3, 1)
    delivered(worker, [machine])
    for clock in (1, 2):
        pending = worker.pull(clock)
        delivered(worker, [machine])
        expected = machine.weights.clone()
        expected[:6000] = expected[:6000].bfloat16().float()
        expected[6060:] = expected[6060:].bfloat16().float()
        assert pending.value is not None
        assert torch.equal(pending.value, expected)  # b is small, and comes as it is
    restored = shard(None, pull_codec=bf16())
    restored.load(*machine.dump())
    assert torch.equal(restored.weights, machine.weights)
    assert restored.dump()[0] == machine.dump()[0]


# ------------------------------------------------------------------------------------------------------- use


def test_the_trace_prices_what_travels() -> None:
    def sent(codec: Codec | None, pull_codec: Codec | None) -> tuple[float, float, float]:
        result = simulate(DIGITS, strategies.async_sgd(codec=codec, pull_codec=pull_codec), 2, steps=20)
        assert result.server is not None
        return result.bytes_sent_per_rank, result.server["bytes_sent"], result.seconds

    plain, half, pushed = sent(None, None), sent(bf16(), bf16()), sent(feedback(top_k(0.01)), None)
    assert half[0] / plain[0] == pytest.approx(0.5, abs=0.1)
    assert half[1] / plain[1] == pytest.approx(0.5, abs=0.1)
    assert pushed[0] < 0.3 * plain[0]
    assert pushed[1] == pytest.approx(plain[1], rel=0.1)


@pytest.mark.parametrize("codec", [feedback(top_k(0.01)), feedback(one_bit())], **by_name)
def test_downpour_learns(codec: Codec) -> None:
    strategy = strategies.downpour(lr=0.02, shards=2, codec=codec, pull_codec=bf16())
    result = simulate(DIGITS, strategy, 4, epochs=10)
    assert result.accuracy is not None
    assert result.accuracy >= 0.9
    assert result.server is not None
    assert result.server["refused"] == 0


def test_every_strategy_with_codecs_uses_every_batch_and_repeats_to_the_bit() -> None:
    for make in (strategies.async_sgd, strategies.softsync, strategies.ssp, strategies.staleness_aware):
        strategy = make(shards=2, codec=feedback(one_bit()), pull_codec=fp16())  # type: ignore[operator]
        first, second = (simulate(DIGITS, strategy, 3, steps=8) for _ in range(2))
        assert (first.trace_hash, first.parameters_sha256) == (second.trace_hash, second.parameters_sha256)
        assert first.server is not None
        assert sum(worker["samples"] for worker in first.server["workers"]) == 8 * 3 * 32
