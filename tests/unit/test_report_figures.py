"""The report's figures: curves, bars, the timeline, and layers in parts."""

from __future__ import annotations

from typing import Any

import pytest

from polytempo.report.pages import layer_parts as parts
from polytempo.report.pages.page import page
from polytempo.report.pictures import plots
from polytempo.report.pictures.style import look
from polytempo.report.pictures.timeline import MAX_BARS, MAX_RANKS, excerpt, timeline
from polytempo.report.runs import RunRecord
from polytempo.worlds.trace import Event
from report_runs import record, steps_of


def curves(runs: list[RunRecord], quantity: str, over: str) -> Any:
    figure = plots.curves(runs, quantity, over)
    assert figure is not None
    return figure


def test_curves_draw_what_was_measured() -> None:
    figure = curves([record("a"), record("b", 4)], "accuracy", "samples")
    assert [(line["name"], line["x"], line["y"]) for line in figure.data] == [
        ("a", [128.0, 256.0], [0.5, 0.975]),
        ("b", [128.0, 256.0], [0.5, 0.975]),
    ]
    loss = curves([record()], "loss", "seconds").data[0]
    assert (loss["x"], loss["y"]) == ([1.0, 2.0], [2.0, 0.5]), "the training loss, not the test loss"


def test_rows_of_several_workers_are_drawn_in_order() -> None:
    run = record()
    shuffled = curves([run._replace(metrics=run.metrics[::-1])], "loss", "seconds").data[0]
    assert (shuffled["x"], shuffled["y"]) == ([1.0, 2.0], [2.0, 0.5])


def test_curves_leave_out_what_is_not_finite_or_absent() -> None:
    run = record()
    run.metrics[0]["loss"] = None
    assert curves([run], "loss", "samples").data[0]["y"] == [0.5]
    assert plots.curves([run._replace(metrics=run.metrics[::2])], "accuracy", "samples") is None
    assert plots.curves([run._replace(metrics=[])], "loss", "seconds") is None


@pytest.mark.parametrize(
    ("seconds", "worlds", "title"),
    [
        (0.2, ["process"], "Time (ms)"),
        (20.0, ["process"], "Time (s)"),
        (400.0, ["virtual"], "Virtual time (min)"),
        (40_000.0, ["virtual", "process"], "Time (h; virtual where simulated)"),
    ],
)
def test_the_time_axis_names_its_unit_and_its_clock(seconds: float, worlds: list[str], title: str) -> None:
    runs = [record(seconds=seconds, world=world) for world in worlds]
    assert curves(runs, "loss", "seconds").xaxis["title"]["text"] == title


def test_long_curves_are_means_over_windows() -> None:
    line = [(float(i), float(i % 2)) for i in range(1, 1001)]
    short = plots.windowed(line, 50)
    assert len(short) == 50
    assert short[0] == (20.0, 0.5)
    assert short[-1] == (1000.0, 0.5)
    assert plots.windowed(line[:50], 50) == line[:50]


def test_thirty_two_runs_look_different_and_the_same_in_every_figure() -> None:
    assert len({look(number) for number in range(32)}) == 32
    runs = [record(f"run {number}") for number in range(10)]
    lines = curves(runs, "loss", "samples").data
    bars = plots.throughput_bars(runs).data[0]
    assert [line["line"]["color"] for line in lines] == bars["marker"]["color"] == [look(i).color for i in range(10)]


@pytest.mark.parametrize(
    ("sizes", "kind", "texts"),
    [
        ([1000, 99_000], None, ["1 kB", "99 kB"]),
        ([1000, 101_000], "log", ["1 kB", "101 kB"]),
        ([0, 1000, 10_000_000], "log", ["0 B", "1 kB", "10 MB"]),
        ([0, 0], None, ["0 B", "0 B"]),
    ],
)
def test_bytes_are_logarithmic_where_they_differ_a_hundredfold(
    sizes: list[int], kind: str | None, texts: list[str]
) -> None:
    figure = plots.bytes_bars([record(bytes_sent_per_rank=size) for size in sizes])
    assert figure.xaxis.get("type") == kind
    assert figure.data[0]["text"] == texts
    if kind == "log":
        base = figure.data[0]["base"]
        ends = [base + length for length in figure.data[0]["x"]]
        assert ends == pytest.approx([max(base, size) for size in sizes])


@pytest.mark.parametrize(
    ("label", "folded"),
    [
        ("local_sgd(period=8)", "local_sgd(period=8)"),
        (
            "diloco(period=50, outer_lr=0.7, outer_momentum=0.9)",
            "diloco(period=50, outer_lr=0.7,<br>outer_momentum=0.9)",
        ),
        ("x" * 50, "x" * 44 + "<br>" + "x" * 6),
        ("<b>&", "&lt;b&gt;&amp;"),
    ],
)
def test_long_names_are_folded_and_escaped(label: str, folded: str) -> None:
    assert plots.folded(label) == folded


# ---- the timeline ----


def steps_shown(events: list[Event]) -> list[int]:
    return sorted({event.step for event in excerpt(events)})


@pytest.mark.parametrize(
    ("events", "steps"),
    [
        (steps_of(2, range(1, 101)), [49, 50, 51, 52]),
        (steps_of(1, range(1, 101)), [49, 50, 51, 52]),
        (steps_of(2, range(1, 101), talk_every=30), [58, 59, 60, 61]),
        (steps_of(2, range(1, 101), talk_every=100), [97, 98, 99, 100]),
        (steps_of(2, range(1, 3)), [1, 2]),
        ([], []),
    ],
)
def test_the_timeline_shows_middle_steps_in_which_ranks_communicate(events: list[Event], steps: list[int]) -> None:
    assert steps_shown(events) == steps


def test_the_timeline_is_bounded() -> None:
    many_ranks = excerpt(steps_of(100, range(1, 10)))
    assert {event.rank for event in many_ranks} == set(range(MAX_RANKS))
    crowded = excerpt(steps_of(16, range(1, 10)) * 50)
    assert 0 < len(crowded) <= MAX_BARS
    assert 0 < len(excerpt(steps_of(1, range(1, 3)) * 5000)) <= MAX_BARS


def test_the_timeline_draws_every_event_once() -> None:
    drawn = timeline(record())
    assert drawn is not None
    assert drawn.caption == "Steps 1 to 4 of 4, all ranks."
    assert list(drawn.colors) == ["compute", "all_reduce"], "computation first"
    compute, all_reduce = drawn.figure.data
    assert compute["base"] == [0, 0, 1, 1, 2, 2, 3, 3]
    assert all_reduce["x"] == [0.5] * 8
    assert all(below > above for above, below in zip(compute["y"], all_reduce["y"], strict=True))
    assert "rank 1, step 1<br>all-reduce: 0.5 s<br>500 B sent" in all_reduce["hovertext"]
    assert timeline(record()._replace(events=[])) is None


def test_layers_in_parts() -> None:
    """The ranks' shares of each layer, and their messages; a layer without parts is whole on all."""
    split = {"kind": "ColumnLinear", "parameters": 70, "sizes": [4, 3], "dim": 0}
    layers = [
        {"layer": "up", **split, "forward_bytes": 0.0, "backward_bytes": 2_000_000.0},
        {"layer": "norm", "kind": "LayerNorm", "parameters": 12, "sizes": [], "dim": None}
        | {"forward_bytes": 0.0, "backward_bytes": 0.0},
    ]
    run = record("split(rules='up: column', parts=2)", layers=layers)
    first, second, whole, forward, backward = parts.picture(run).data
    assert (first["base"], first["x"], first["y"]) == ([0.0], [4 / 7], [0])
    assert (second["base"], second["x"], second["y"]) == ([4 / 7], [3 / 7], [0])
    assert (whole["x"], whole["y"]) == ([1.0], [1])
    assert (forward["x"], backward["x"], backward["xaxis"]) == ([0.0, 0.0], [2.0, 0.0], "x2")
    few = record("split", layers=[layers[0] | {"backward_bytes": 2000.0}])
    assert parts.picture(few).data[-1]["hovertext"] == ["up: 2 kB backward"]
    assert list(parts.colors(run)) == ["part 0", "part 1", "whole on each", "sent forward", "sent backward"]
    written = page([run], title="split")
    assert "<h2>Layers in parts</h2>" in written
    assert "<td>4 + 3</td><td>0 B</td><td>2 MB</td>" in written
    assert "Layers in parts" not in page([record()], title="plain")


def test_losses_of_workers_are_one_line_of_their_mean() -> None:
    """Two workers a factor of ten apart tell their losses in turn."""
    told = [(1, 0, 10.0), (2, 1, 1.0), (3, 0, 8.0), (4, 1, 0.8), (5, 1, 0.6)]  # and then one falls silent
    rows = [{"kind": "train", "samples": at, "worker": who, "loss": loss} for at, who, loss in told]
    line = plots.points(record()._replace(metrics=rows), "train", "samples", "loss")
    assert line == [(1, 10.0), (2, 5.5), (3, 4.5), (4, 4.4), (5, 0.7)]


def test_the_timeline_calls_operations_by_words() -> None:
    events = [Event(0, 1, op, 8, 0.0, 1.0) for op in ("compute", "post", "take")]
    written = page([record()._replace(events=events)], title="t")
    for word in ("gradient and step", "send a message", "wait for messages"):
        assert f"{word}<span" in written
    assert "post<span" not in written
