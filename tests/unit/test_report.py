"""The report: what it says about runs, in numbers, words and figures."""

from __future__ import annotations

import base64
import gzip
import io
import json
import math
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from polytempo.report import parts, plots
from polytempo.report.forecast import Forecast
from polytempo.report.names import labels, short_labels
from polytempo.report.page import page, write_report
from polytempo.report.picture import write_picture
from polytempo.report.progress import Progress, status_line, time_left
from polytempo.report.runs import RunRecord, load_run, read_events
from polytempo.report.style import look
from polytempo.report.summary import baseline_sentences, human_bytes, human_seconds, percent, summaries
from polytempo.report.table import facts, numbers, summary_table, tiles
from polytempo.report.timeline import MAX_BARS, MAX_RANKS, excerpt, timeline
from polytempo.worlds.trace import Event, write_chrome_trace


def record(strategy: str = "sync_sgd(route=ring)", workers: int = 2, **changed: Any) -> RunRecord:
    """A run of four rows and eight events."""
    result = {
        "strategy": strategy,
        "world": "process",
        "workers": workers,
        "steps": 4,
        "samples": 256,
        "seconds": 2.0,
        "samples_per_s": 128.0,
        "loss": 0.25,
        "accuracy": 0.975,
        "bytes_sent_per_rank": 1000,
        "parameters_sha256": "ab" * 32,
        "trace_hash": "cd" * 32,
        "job": "digits",
        "epochs": 1,
        "seed": 0,
        "batch_size": 32,
        "communication_share": 0.25,
        "threads": 1,
    }
    metrics: list[dict[str, Any]] = [
        {"kind": "train", "step": 2, "samples": 128, "seconds": 1.0, "loss": 2.0},
        {"kind": "test", "step": 2, "samples": 128, "seconds": 1.0, "loss": 1.5, "accuracy": 0.5},
        {"kind": "train", "step": 4, "samples": 256, "seconds": 2.0, "loss": 0.5},
        {"kind": "test", "step": 4, "samples": 256, "seconds": 2.0, "loss": 0.25, "accuracy": 0.975},
    ]
    return RunRecord(result | changed, metrics, steps_of(workers, range(1, 5)))


def steps_of(ranks: int, steps: range, talk_every: int = 1) -> list[Event]:
    events = []
    for step in steps:
        for rank in range(ranks):
            events.append(Event(rank, step, "compute", 0, float(step), step + 0.5))
            if ranks > 1 and step % talk_every == 0:
                events.append(Event(rank, step, "all_reduce", 500, step + 0.5, step + 1.0))
    return events


# ---- reading ----


def test_a_run_is_read_back_from_its_folder(tmp_path: Path) -> None:
    run = record()
    (tmp_path / "result.json").write_text(json.dumps(run.result))
    assert load_run(tmp_path) == RunRecord(run.result, [], [])
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in run.metrics))
    write_chrome_trace(tmp_path / "trace.json", run.events, title="digits")
    assert load_run(tmp_path) == run
    assert load_run(tmp_path).rows("test") == [run.metrics[1], run.metrics[3]]


def test_a_peer_survives_the_chrome_trace(tmp_path: Path) -> None:
    events = [Event(1, 7, "send", 64, 0.25, 0.5, 3)]
    write_chrome_trace(tmp_path / "trace.json", events, title="")
    assert read_events(tmp_path / "trace.json") == (events, 0)


def test_a_trace_without_its_beginning_is_told_as_such(tmp_path: Path) -> None:
    run = record()
    (tmp_path / "result.json").write_text(json.dumps(run.result))
    write_chrome_trace(tmp_path / "trace.json", run.events, title="digits", dropped=12_345)
    shown = page([load_run(tmp_path)], title="t")
    assert "The trace keeps the end of a run: 12,345 operations before it are dropped." in shown
    assert "are dropped" not in page([run], title="t")


def test_a_folder_without_a_result_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"holds no result\.json; name the folder of a run that has finished"):
        load_run(tmp_path)


# ---- numbers and words ----


@pytest.mark.parametrize(
    ("runs", "expected"),
    [
        ([record("a"), record("b", world="virtual")], ["a", "b (simulated)"]),
        ([record("a", 1), record("a", 4), record("b", 4)], ["a, 1 worker", "a, 4 workers", "b"]),
        ([record("a"), record("a"), record("a", world="virtual")], ["a #1", "a #2", "a (simulated)"]),
        ([record("a", 2), record("a", 4), record("a", 4)], ["a, 2 workers", "a, 4 workers #1", "a, 4 workers #2"]),
    ],
)
def test_every_run_has_a_name_of_its_own(runs: list[RunRecord], expected: list[str]) -> None:
    assert labels(runs) == expected


@pytest.mark.parametrize(
    ("speeds_and_workers", "expected", "sentence"),
    [
        ([(100, 2), (150, 2)], [1.0, 1.5], "Speed-ups are samples/s relative to run 0, the first run."),
        ([(150, 2), (100, 1)], [1.5, 1.0], "Speed-ups are samples/s relative to run 1, the run with one worker."),
        ([(0, 1), (100, 2)], [None, None], "Speed-ups are samples/s relative to run 0, the run with one worker."),
    ],
)
def test_speed_up_is_against_one_worker_or_the_first_run(
    speeds_and_workers: list[tuple[float, int]], expected: list[float | None], sentence: str
) -> None:
    runs = [record(f"run {i}", workers, samples_per_s=speed) for i, (speed, workers) in enumerate(speeds_and_workers)]
    assert [line.speed_up for line in summaries(runs)] == expected
    assert baseline_sentences(runs) == [sentence]


def test_virtual_seconds_are_never_compared_with_real_ones() -> None:
    runs = [
        record("real", samples_per_s=100.0),
        record("slow", world="virtual", samples_per_s=1000.0),
        record("fast", world="virtual", samples_per_s=2000.0),
    ]
    assert [line.speed_up for line in summaries(runs)] == [1.0, 1.0, 2.0]
    assert baseline_sentences(runs) == [
        "Speed-ups of runs on real processes are samples/s relative to real, the first of them.",
        "Speed-ups of simulated runs are samples/s relative to slow (simulated), the first of them.",
    ]
    assert '100 samples/s</strong><span title="real">real' in tiles(runs), "the fastest of the real ones"


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1 kB"),
        (1234, "1.23 kB"),
        (99_960, "100 kB"),
        (999_600, "1 MB"),
        (1_234_567, "1.23 MB"),
        (4.2e9, "4.2 GB"),
        (7e12, "7 TB"),
        (3e15, "3 PB"),
    ],
)
def test_bytes_in_human_units(num_bytes: float, text: str) -> None:
    assert human_bytes(num_bytes) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0, "0 ms"),
        (0.0123, "12.3 ms"),
        (0.9999, "1 s"),
        (12.34, "12.3 s"),
        (245.0, "4 min 05 s"),
        (7380.0, "2 h 03 min"),
    ],
)
def test_seconds_in_human_units(seconds: float, text: str) -> None:
    assert human_seconds(seconds) == text


class Cells(HTMLParser):
    """The texts of a table's cells, and which of them are bold."""

    def __init__(self, table: str) -> None:
        super().__init__()
        self.rows: list[list[str]] = []
        self.best: list[str] = []
        self._bold = False
        self.feed(table)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")
            self._bold = ("class", "best") in attributes

    def handle_data(self, data: str) -> None:
        self.rows[-1][-1] += data
        if self._bold:
            self.best.append(data)


def test_the_summary_as_a_reader_sees_it() -> None:
    runs = [
        record("one <alone>", 1, bytes_sent_per_rank=0, communication_share=0.0, samples_per_s=128.0),
        record("ring", samples_per_s=200.4, loss=0.5, accuracy=0.98, bytes_sent_per_rank=1_500_000),
        record("housing", samples_per_s=150.0, loss=0.125, accuracy=None, communication_share=None),
        record("diverged", samples_per_s=900.0, loss=math.nan, accuracy=0.99, bytes_sent_per_rank=0),
    ]
    cells = Cells(summary_table(runs).partition("</table>")[0])
    assert cells.rows[1:] == [
        ["one <alone>", "97.50\u00a0%", "0.25", "2 s", "128", "1.00\u00d7", "0 B", "0.0\u00a0%", "256", "4", "1"],
        ["ring", "98.00\u00a0%", "0.5", "2 s", "200", "1.57\u00d7", "1.5 MB", "25.0\u00a0%", "256", "4", "2"],
        ["housing", "n/a", "0.125", "2 s", "150", "1.17\u00d7", "1 kB", "n/a", "256", "4", "2"],
        ["diverged", "99.00\u00a0%", "not finite", "2 s", "900", "7.03\u00d7", "0 B", "25.0\u00a0%", "256", "4", "2"],
    ]
    assert cells.best == ["98.00\u00a0%", "200", "0.125", "1 kB"], "a run that diverged is never the best"
    shown = re.sub(r"<[^>]+>", " ", tiles(runs)).split()
    assert " ".join(shown) == (
        "Highest test accuracy 98.00 % ring Highest throughput 200 samples/s ring Least sent per rank 1 kB housing"
    )
    assert "two and 1 more" in tiles([record("one", accuracy=0.5), record("two"), record("three")])


def test_what_the_runs_have_in_common() -> None:
    assert facts([record(epochs=2.5)]) == (
        "1 run · job digits · 2 workers · 2.5 epochs · batch size 32 per worker · 1 thread per worker · seed 0"
    )
    assert facts([record(), record(workers=4, seed=None)]) == (
        "2 runs · job digits · 1 epoch · batch size 32 per worker · 1 thread per worker"
    )


@pytest.mark.parametrize(
    ("calls", "short"),
    [
        (["local_sgd(period=8, route=native)", "adasum(of=None)"], ["local_sgd", "adasum"]),
        (
            ["local_sgd(period=8, route=native)", "local_sgd(period=16, route=native)"],
            ["local_sgd(period=8)", "local_sgd(period=16)"],
        ),
        (["sync_sgd(route=native)", "sync_sgd(route=ring)"], ["sync_sgd(route=native)", "sync_sgd(route=ring)"]),
        (["f(codec=g(1, 2), a=[3, 4])", "f(codec=g(1, 3), a=[3, 4])"], ["f(codec=g(1, 2))", "f(codec=g(1, 3))"]),
        (["f(a=1)", "f(a=1)", "f"], ["f(a=1) #1", "f(a=1) #2", "f"]),
        (["f(a=1", "f)(", "hand-made strategy"], ["f(a=1", "f)(", "hand-made strategy"]),
    ],
)
def test_short_names_say_what_tells_runs_apart(calls: list[str], short: list[str]) -> None:
    assert short_labels([record(call) for call in calls]) == short


def test_a_share_in_percent() -> None:
    assert percent(0.97504) == "97.50\u00a0%"
    assert percent(1, 0) == "100\u00a0%"


# ---- figures ----


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
    assert "rank 1, step 1<br>all_reduce: 0.5 s<br>500 B sent" in all_reduce["hovertext"]
    assert timeline(record()._replace(events=[])) is None


# ---- the page and the picture ----


def test_the_page_is_one_file_that_escapes_what_it_is_told(tmp_path: Path) -> None:
    evil = '</script><img src=x onerror="alert(1)">'
    write_report(tmp_path / "report.html", [record(evil), record("b")], title=evil)
    written = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert evil not in written
    assert "<img" not in written
    assert "plotly.js (basic" in unpacked(written, "plotly")[:100]
    assert evil.replace('"', '\\"') not in unpacked(written, "figures"), "plotly reads some HTML"
    assert not re.findall(r'(?:src|href)="(?!data:)', written)
    assert [path.name for path in tmp_path.iterdir()] == ["report.html"]


def unpacked(written: str, part: str) -> str:
    """What the page carries gzipped."""
    found = re.search(rf'<script type="text/plain" id="{part}">([^<]*)</script>', written)
    assert found is not None
    return gzip.decompress(base64.b64decode(found[1])).decode()


def test_a_page_is_well_below_a_megabyte_and_the_same_twice() -> None:
    runs = [record(f"run {number}") for number in range(7)]
    written = page(runs, title="t")
    assert len(written) < 600_000
    assert page(runs, title="t") == written


def test_a_page_without_metrics_trace_or_accuracy_says_so() -> None:
    run = record(accuracy=None)
    assert "This run left no metrics." in page([run._replace(metrics=[])], title="t")
    assert "This run left no trace." in page([run._replace(events=[])], title="t")
    assert "These runs left no trace." in page([run._replace(events=[])] * 2, title="t")
    assert "This job measures no accuracy." in page([run._replace(metrics=run.metrics[::2])], title="t")


COMPARISON = ("Speed-up", 'id="timeline-run"', 'id="throughput"', 'id="summary"', "data-run=", "Highest", "relative to")


@pytest.mark.parametrize("part", COMPARISON)
def test_a_single_run_is_compared_with_nothing(part: str) -> None:
    single, several = (page([record()] * count, title="t").partition("<script")[0] for count in (1, 2))
    assert part not in single
    assert part in several


def test_a_single_run_shows_its_numbers() -> None:
    shown = re.sub(r"<[^>]+>", " ", numbers(record(loss=math.nan, communication_share=None)))
    assert " ".join(shown.split()) == (
        "Accuracy 97.50 % test Loss not finite final Time 2 s Throughput 128 samples/s Sent 1 kB per rank "
        "Samples 256 all workers Steps 4"
    )


def test_the_legend_stands_once_with_short_names_and_the_calls_in_full() -> None:
    runs = [record("local_sgd(period=8, route=native)"), record("sync_sgd(route=ring)")]
    written = page(runs, title="t")
    buttons = re.findall(r'<button type="button" data-run="(.)" [^>]*title="([^"]*)">.*?<span>(.*?)</span>', written)
    assert [(number, call, name.replace("<wbr>", "")) for number, call, name in buttons] == [
        ("0", "local_sgd(period=8, route=native)", "local_sgd"),
        ("1", "sync_sgd(route=ring)", "sync_sgd"),
    ]
    assert '<small class="call">local_<wbr>sgd(<wbr>period=<wbr>8, route=<wbr>native)</small>' in written


def test_the_page_begins_with_the_finding() -> None:
    runs = [record("slow", samples_per_s=100.0), record("fast", samples_per_s=200.0), record("lost", accuracy=0.5)]
    written = page([run._replace(metrics=[]) for run in runs], title="t")
    assert '<p class="headline">fast processes 2.0\u00d7 as many samples per second as slow' in written
    remark = "Far below the most accurate run (slow, 97.5\u00a0%): lost ends at 50.0\u00a0%."
    assert f'<p class="remark">{remark}</p>' in written
    assert 'class="headline"' not in page([record()], title="t")


def served(events: list[dict[str, Any]]) -> RunRecord:
    staleness = {"mean": 1.0, "p50": 1, "p99": 1, "histogram": [[1, 8]]}
    counts = {"shards": 1, "replicas": 1, "updates": 8, "dropped": 0, "refused": 0}
    return record("async_sgd", server={**counts, "staleness": staleness, "workers": [], "events": events})


def test_the_page_says_which_processes_died() -> None:
    event = {"who": "worker-1", "how": "was killed by SIGKILL", "at_s": 2.314, "then": "started again"}
    cells = "<td>worker-1</td><td>was killed by SIGKILL</td><td>2.3</td><td>started again</td>"
    assert cells in page([served([event])], title="t")
    assert "What happened to processes" not in page([served([])], title="t")


def test_only_runs_with_a_server_are_in_the_legend_of_staleness() -> None:
    written = page([record(), served([])], title="t")
    legend = written[written.index('id="staleness"') :].partition("</ul>")[0]
    assert re.findall(r'<li><span class="square"[^>]*></span>(.*?)</li>', legend) == ["async_sgd"]


def test_simulated_runs_are_named_so() -> None:
    simulated = page([record(world="virtual")], title="t")
    assert "(simulated)" in simulated
    assert "virtual clock" in simulated
    assert "Loss against virtual time" in simulated
    assert "(simulated)" not in page([record()], title="t")


def test_nothing_to_report_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="a report needs at least one run"):
        write_report(tmp_path / "x", [], title="t")
    with pytest.raises(ValueError, match="a picture needs at least one run"):
        write_picture(tmp_path / "x", [])


@pytest.mark.parametrize(
    "runs",
    [
        [record("a"), record("b $x_1$", world="virtual")],
        [record("no accuracy")._replace(metrics=record().metrics[::2])],
        [record(f"diloco(period={number}, outer_lr=0.7, outer_momentum=0.9)") for number in range(20)],
        [record("nothing")._replace(metrics=[])],
    ],
    ids=["two", "loss only", "twenty", "no metrics"],
)
def test_the_picture_has_its_size_and_something_on_it(tmp_path: Path, runs: list[RunRecord]) -> None:
    write_picture(tmp_path / "compare.png", runs)
    with Image.open(tmp_path / "compare.png") as picture:
        assert picture.size == (1400, 560)
        colors = picture.convert("RGB").getcolors(1400 * 560)
        edge = picture.convert("L").crop((0, 0, 4, 560)).getextrema()
    assert colors is not None
    assert (0, 114, 178) in [color for _, color in colors], "the first run's blue"
    assert edge == (255, 255), "nothing is cut off on the left"


# ---- progress ----


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_plain_lines_come_now_and_then_and_the_last_one_always() -> None:
    stream, now = io.StringIO(), [0.0]
    with Progress(stream, lambda: now[0]) as progress:
        progress.start(440, "ring")
        for step, at in ((1, 1.0), (2, 2.9), (3, 3.0), (4, 3.1), (5, 4.0)):
            now[0] = at
            progress.update(step, loss=0.5, accuracy=None, samples_per_s=None)
        progress.note("checkpoint saved")
        progress.update(6, loss=0.25, accuracy=0.97, samples_per_s=38_200.0)
    assert stream.getvalue().splitlines() == [
        "ring: started",
        "ring: step 3/440, loss 0.5, about 7 min 17 s left",
        "checkpoint saved",
        "ring: step 6/440, loss 0.25, accuracy 97.0 %, 38,200 samples/s",
    ]


def test_one_progress_shows_several_runs() -> None:
    stream = io.StringIO()
    progress = Progress(stream, lambda: 0.0)
    for name in ("a", "b"):
        progress.start(None, name)
        progress.update(1_000, None, None, None)
    progress.finish()
    progress.finish()
    assert stream.getvalue().splitlines() == ["a: started", "a: step 1,000", "b: started", "b: step 1,000"]


def test_a_terminal_gets_a_bar_and_standard_output_stays_clean(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERM", "xterm")
    stream = Terminal()
    with Progress(stream) as progress:
        progress.start(10, "top_k(ratio=[0.1])")
        progress.update(10, 0.5, 0.9, 100.0)
        print("a result")
        progress.note("saved [bold]")
    assert capsys.readouterr() == ("a result\n", "")
    for text in ("top_k(ratio=[0.1])", "step 10/10", "saved [bold]", "\x1b["):
        assert text in stream.getvalue()


def test_a_dumb_terminal_gets_plain_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "dumb")
    stream = Terminal()
    with Progress(stream) as progress:
        progress.start(1, "ring")
    assert stream.getvalue() == "ring: started\n"


def test_the_default_is_standard_error(capsys: pytest.CaptureFixture[str]) -> None:
    with Progress() as progress:
        progress.start(1, "ring")
    assert capsys.readouterr() == ("", "ring: started\n")


def test_a_moment_in_words() -> None:
    words = "step 120/440, loss 0.2134, accuracy 95.1 %, 38,200 samples/s"
    assert status_line(120, 440, 0.2134, 0.951, 38_200.4) == words
    assert time_left(75.2) == "about 75 s left"
    assert time_left(0.2, at_most=True) == "at most 1 s left"
    assert status_line(1200, None, None, None, None) == "step 1,200"


def lines_of_a_run(reports: list[tuple[float, int, float]], **options: Any) -> list[str]:
    """What is said of a run that reports (second, step, epoch)."""
    stream, now = io.StringIO(), [0.0]
    with Progress(stream, lambda: now[0]) as progress:
        progress.start(None, "ring", **options)
        for now[0], step, epoch in reports:
            progress.update(step, None, None, None, epoch=epoch)
    return stream.getvalue().splitlines()[1:]


def test_epochs_say_when_a_run_ends_where_steps_do_not() -> None:
    reports = [(3.0, 10, 1.0), (6.0, 20, 2.0), (9.0, 30, 3.0)]
    assert lines_of_a_run(reports) == ["ring: step 10", "ring: step 20", "ring: step 30"]
    assert lines_of_a_run(reports, total_epochs=5.0) == [
        "ring: step 10",
        "ring: step 20, about 9 s left",
        "ring: step 30, about 6 s left",
    ]
    assert lines_of_a_run(reports, total_epochs=5.0, at_most=True)[-1] == "ring: step 30, at most 6 s left"
    assert lines_of_a_run([*reports, (12.0, 50, 5.0)], total_epochs=5.0)[-1] == "ring: step 50", "nothing is left"


def test_the_runs_of_a_comparison_are_counted_and_those_to_come_take_their_time() -> None:
    stream, now = io.StringIO(), [0.0]
    progress = Progress(stream, lambda: now[0], num_runs=3)
    for name in ("a", "b"):
        progress.start(100, name)
        begin = now[0]
        for seconds, step in ((2.0, 0), (7.0, 50), (12.0, 100)):
            now[0] = begin + seconds
            progress.update(step, None, None, None)
    assert stream.getvalue().splitlines() == [
        "[1/3] a: started",
        "[1/3] a: step 50/100, about 29 s left",
        "[1/3] a: step 100/100, about 24 s left",
        "[2/3] b: started",
        "[2/3] b: step 50/100, about 17 s left",
        "[2/3] b: step 100/100, about 12 s left",
    ]


@pytest.mark.parametrize(
    ("reports", "left_s"),
    [
        ([(0.0, 0.0), (10.0, 0.25)], 30.0),
        ([(10.0, 0.0), (20.0, 0.25)], 30.0),  # what came before the first report is not counted
        ([(0.0, 0.5), (10.0, 0.75)], 10.0),  # a resumed run
        ([(0.0, 0.0), (10.0, 0.5), (20.0, 0.4)], 20.0),  # two workers report out of order
        ([(0.0, 0.0), (0.5, 0.5)], None),  # too early
        ([(0.0, 0.0)], None),
        ([(0.0, 0.5), (10.0, 0.5)], None),  # it stands still
        ([(0.0, 0.0), (10.0, 1.0)], None),
    ],
)
def test_the_time_that_is_left(reports: list[tuple[float, float]], left_s: float | None) -> None:
    forecast = Forecast()
    forecast.begin(0.0)
    assert [forecast.left_s(done, now_s) for now_s, done in reports][-1] == left_s


def test_layers_in_parts() -> None:
    """Who holds which share of which layer, and what is sent for it; a layer without parts is whole on all."""
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
    assert list(parts.colors(run)) == ["part 0", "part 1", "whole on each", "sent forward", "sent backward"]
    written = page([run], title="split")
    assert "<h2>Layers in parts</h2>" in written
    assert "<td>4 + 3</td><td>0 B</td><td>2 MB</td>" in written
    assert "Layers in parts" not in page([record()], title="plain")
