"""`polytempo bench compression`: the formula, the charge of each way, and refusals."""

from __future__ import annotations

import json
from math import inf
from pathlib import Path
from typing import Any

import pytest
import torch

from polytempo import aggregation, compression
from polytempo.bench.compression import CompressionPlan, Costs, codec_seconds, costs, gradient_of, wins_below
from polytempo.bench.compression import compression as measure
from polytempo.bench.tables import markdown, table
from polytempo.cli.bench.bench import candidate, plan_of
from polytempo.cli.bench.bench import compression as command
from polytempo.cli.bench.bench_options import CompressionOptions
from polytempo.cli.options.command_options import read_options
from polytempo.cli.options.values import layer_sizes, rate
from polytempo.cluster import Link
from polytempo.core import Bundle, Port, Transform
from polytempo.report.pages.summary import TIMES
from polytempo.strategies import sync_sgd

SIZES = (64, 32, 12)
WEIGHTS, SMALL = 64 * 32, 32 + 32 * 12 + 12
"""Elements that are encoded, and that are so few that they travel as they are."""
GIBIT = Link(50e-6, 125e6)


def gradients(num_ranks: int) -> list[dict[str, torch.Tensor]]:
    return [gradient_of(SIZES, rank) for rank in range(num_ranks)]


# ------------------------------------------------------------------------------------------------------- the formula


@pytest.mark.parametrize(
    ("computing_s", "serial_bytes", "rounds", "below"),
    [
        (0.6, 100, 6, 900 / 0.5),  # half a second more of computing, 900 bytes less
        (0.6, 100, 16, 900 / (0.5 + 10 * 0.01)),  # and ten rounds more, of 10 ms
        (0.1, 100, 6, inf),  # nothing is lost
        (0.05, 100, 6, inf),
        (0.1, 1000, 6, None),  # nothing is saved
        (0.05, 1200, 6, None),
    ],
)
def test_below_which_speed_it_wins(computing_s: float, serial_bytes: float, rounds: float, below: float | None) -> None:
    plain = Costs(0.1, 1000, 6, 1000, "all-reduce")
    coded = Costs(computing_s, serial_bytes, rounds, serial_bytes, "all-gather")
    found = wins_below(coded, plain, latency_s=0.01)
    assert found == (below if below in (None, inf) else pytest.approx(below))
    if found not in (None, inf):
        at = Link(0.01, found)
        assert coded.step_s(at) == pytest.approx(plain.step_s(at))


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_uncompressed_is_a_ring(num_ranks: int) -> None:
    """2(N-1)/N · K bytes one behind the other, in 2(N-1) rounds."""
    found = costs(sync_sgd().gradients, gradients(num_ranks), steps=1)
    num_bytes = 4 * (WEIGHTS + SMALL)
    assert found.serial_bytes == pytest.approx(2 * (num_ranks - 1) / num_ranks * num_bytes)
    assert (found.rounds, found.way) == (2 * (num_ranks - 1), "all-reduce")
    assert found.sent_bytes == pytest.approx(found.serial_bytes, abs=1)
    assert found.computing_s > 0


def test_each_way_is_charged_what_it_sends() -> None:
    """4 ranks: sums of halves in a ring; all wires to all; stripes to their owners, and back."""
    four = gradients(4)
    bf16 = costs(compression.through(compression.bf16()), four, 1)
    assert (bf16.serial_bytes, bf16.way) == (1.5 * 2 * (WEIGHTS + SMALL), "all-reduce")

    top_k = compression.top_k(ratio=0.1)
    wires = top_k.wire_bytes(torch.empty(32, 64)) + 4 * SMALL
    gathered = costs(compression.through(top_k), four, 1)
    assert gathered.way == "all-gather"
    assert gathered.serial_bytes == pytest.approx(3 * wires, rel=0.01)  # each wire is padded to 8 bytes

    qsgd = costs(compression.through(compression.qsgd()), four, 1)
    assert qsgd.way == "all-to-all, all-gather"
    assert qsgd.rounds == 3 + 3

    low_rank = costs(aggregation.low_rank(rank=1), four, 1)
    assert set(low_rank.way.split(", ")) == {"all-reduce"}
    assert low_rank.serial_bytes < bf16.serial_bytes


def test_all_that_a_rank_computes_is_timed_and_nothing_of_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock of the test's own: between operations, and inside `compute`; two of three ranks take ten times as
    long."""
    clock = [0.0]
    monkeypatch.setattr("polytempo.bench.compression.time.perf_counter", lambda: clock[0])

    async def apply(port: Port, bundle: Bundle, state: None) -> tuple[Bundle, None]:
        pace = 1.0 if port.rank == 0 else 10.0

        def work() -> None:
            clock[0] += 2 * pace

        clock[0] += pace
        await port.compute(work, 1e9)
        await port.barrier()
        clock[0] += 4 * pace
        return bundle, None

    found = costs(Transform(lambda parameters: None, apply), gradients(3), 2)
    assert found.computing_s == 1 + 2 + 4
    assert found.serial_bytes == 0


def test_bytes_are_those_of_the_last_step() -> None:
    """A transform that sends less and less, and a codec that adapts: bytes fit the time of sending."""

    async def apply(port: Port, bundle: Bundle, step: int) -> tuple[Bundle, int]:
        await port.all_gather(torch.zeros(100 // step))
        return bundle, step + 1

    found = costs(Transform(lambda parameters: 1, apply), gradients(2), steps=3)
    assert (found.sent_bytes, found.serial_bytes) == (100, 100)

    adapting = costs(compression.through(compression.threshold(tau=1e-6, density=0.01)), gradients(2), steps=3)
    assert adapting.sent_bytes == pytest.approx(adapting.serial_bytes, rel=0.01)


def test_an_error_in_a_codec_comes_out() -> None:
    def fail() -> None:
        raise FloatingPointError("an infinity")

    async def apply(port: Port, bundle: Bundle, state: None) -> tuple[Bundle, None]:
        await port.compute(fail, 1.0)
        return bundle, None

    with pytest.raises(FloatingPointError, match="an infinity"):
        costs(Transform(lambda parameters: None, apply), gradients(2), 1)


# --------------------------------------------------------------------------------------------------------- the command


def test_a_codec_is_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One JSON object with a row for each codec, three files, and as many threads as before."""
    threads = torch.get_num_threads()
    given = {"model": "64-32-12", "codecs": "bf16, feedback(top_k(ratio=0.1)), low_rank(rank=1)", "quick": True}
    command(read_options(CompressionOptions, {**given, "json": True, "out": tmp_path / "out"}))
    result = json.loads(capsys.readouterr().out)
    assert torch.get_num_threads() == threads
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"result.json", "table.md", "picture.png"}
    assert [row["codec"] for row in result["rows"]] == ["bf16()", "feedback(top_k(ratio=0.1))", "low_rank(rank=1)"]
    assert result["settings"]["parameters"] == WEIGHTS + SMALL
    for row in result["rows"]:
        assert row["step_s"] == pytest.approx(row["computing_s"] + row["communication_s"])
        assert row["communication_s"] == pytest.approx(row["rounds"] * 50e-6 + row["serial_bytes"] / 125e6)
        assert (row["encode_s"] is None) == row["codec"].startswith("low_rank")
    assert result["rows"][0]["ratio"] == pytest.approx(2, rel=0.01)
    text = markdown(table(result))
    assert f"| bf16() | all-reduce | 2.00{TIMES} |" in text
    assert "| low_rank(rank=1) | all-reduce |" in text


def test_encoding_and_decoding_are_timed_over_all_large_tensors() -> None:
    encode_s, decode_s = codec_seconds(compression.feedback(compression.top_k(ratio=0.1)), gradient_of(SIZES, 0), 3)
    assert encode_s > 0
    assert decode_s > 0


@pytest.mark.parametrize(
    ("text", "bytes_per_s"),
    [("100mbit", 12.5e6), ("1gbit", 125e6), ("2.5 Gbit/s", 312.5e6), ("512 KBIT", 64e3)],
)
def test_links_are_read(text: str, bytes_per_s: float) -> None:
    assert rate(text) == bytes_per_s


@pytest.mark.parametrize("text", ["", "1", "gbit", "-1gbit", "0gbit", "1GB", "fast"])
def test_what_is_no_link_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="write a speed like 100mbit"):
        rate(text)


def test_a_model_is_its_layers() -> None:
    assert layer_sizes("784-2048-10") == (784, 2048, 10)
    for text in ("", "784", "784-0-10", "784x10", "784--10"):
        with pytest.raises(ValueError, match="must be the layer sizes of a perceptron, such as 784-2048-2048-10"):
            layer_sizes(text)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"codecs": " "}, "--codecs ' ': the value is empty"),
        ({"codecs": "int9"}, "there is no codec 'int9'"),
        ({"codecs": "top_k(ratio=2.0)"}, "ratio"),
        ({"codecs": "feedback(feedback)"}, "codec"),
        ({"workers": 1}, "--workers 1: from 2 to 64"),
        ({"workers": 65}, "--workers 65: from 2 to 64"),
        ({"model": "100000-100000-100000"}, "ask for fewer workers or a smaller model"),
        ({"rounds": 0}, "--rounds 0: must be a whole number >= 1"),
        ({"latency_us": -1.0}, "--latency-us -1"),
    ],
)
def test_what_cannot_be_measured_is_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        measure(plan_of(read_options(CompressionOptions, {"quick": True, "codecs": "bf16", **given})))


def test_nothing_to_measure_is_refused() -> None:
    with pytest.raises(ValueError, match="--codecs: name at least one"):
        measure(CompressionPlan(SIZES, GIBIT, 2, [], 1))


def test_candidates_are_codecs_and_low_rank() -> None:
    assert candidate("feedback(top_k(0.1))").name == "feedback(top_k(ratio=0.1))"
    assert candidate("feedback(threshold)").codec is not None
    power_sgd = candidate("low_rank(rank=3)")
    assert (power_sgd.name, power_sgd.codec) == ("low_rank(rank=3)", None)
    assert isinstance(power_sgd.transform, Transform)
