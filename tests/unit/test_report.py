"""The report: reading runs, their numbers and words, the page and the picture."""

from __future__ import annotations

import base64
import gzip
import json
import math
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from polytempo.report.pages.page import page, write_report
from polytempo.report.pages.summary import baseline_sentences, human_bytes, human_seconds, percent, summaries
from polytempo.report.pages.table import facts, numbers, summary_table, tiles
from polytempo.report.pictures.picture import write_picture
from polytempo.report.runs import RunRecord, labels, load_run, read_events, short_labels
from polytempo.worlds.trace import Event, write_chrome_trace
from report_runs import record

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
        record("ring", samples_per_s=200.4, loss=0.5, accuracy=0.981, bytes_sent_per_rank=1_500_000),
        record("housing", samples_per_s=150.0, loss=0.125, accuracy=None, communication_share=None),
        record("diverged", samples_per_s=900.0, loss=math.nan, accuracy=0.99, bytes_sent_per_rank=0),
    ]
    cells = Cells(summary_table(runs).partition("</table>")[0])
    assert cells.rows[1:] == [
        ["one <alone>", "97.50\u00a0%", "0.25", "2 s", "128", "1.00\u00d7", "0 B", "0.0\u00a0%", "256", "4", "1"],
        ["ring", "98.10\u00a0%", "0.5", "2 s", "200", "1.57\u00d7", "1.5 MB", "25.0\u00a0%", "256", "4", "2"],
        ["housing", "n/a", "0.125", "2 s", "150", "1.17\u00d7", "1 kB", "n/a", "256", "4", "2"],
        ["diverged", "99.00\u00a0%", "not finite", "2 s", "900", "7.03\u00d7", "0 B", "25.0\u00a0%", "256", "4", "2"],
    ]
    assert cells.best == ["98.10\u00a0%", "200", "0.125", "1 kB"], "a run that diverged is never the best"
    shown = re.sub(r"<[^>]+>", " ", tiles(runs)).split()
    assert " ".join(shown) == (
        "Highest test accuracy 98.10 % ring Highest throughput 200 samples/s ring Least sent per rank 1 kB housing"
    )


def test_strategies_that_are_level_are_counted_and_the_first_is_named() -> None:
    early = record("three")._replace(metrics=[{"kind": "test", "step": 3, "accuracy": 0.98}])
    runs = [record("one", accuracy=0.5), record("two"), early, record("four")]
    said = re.search(r"97.50\u00a0%</strong><span[^>]*>(.*?)</span>", tiles(runs))
    assert said is not None
    assert [part in said[1] for part in ("3 strategies", "three", "3 steps", "two", "four")] == [True] * 3 + [False] * 2
    said = re.search(r"samples/s</strong><span[^>]*>(.*?)</span>", tiles(runs))
    assert said is not None
    assert [part in said[1] for part in ("4 strategies", "one", "steps")] == [True, True, False]


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
    """The page's gzipped content."""
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


def test_one_image_makes_no_run_the_best() -> None:
    """360 images: bold marks differences beyond chance, and rows level with the best."""
    level = [record("one", accuracy=0.9806, bytes_sent_per_rank=1), record("two", accuracy=0.9833)]
    assert Cells(summary_table(level).partition("</table>")[0]).best == ["1 B"]
    found = Cells(summary_table([*level, record("three", accuracy=0.95)]).partition("</table>")[0]).best
    assert found == ["98.06\u00a0%", "1 B", "98.33\u00a0%"]


def test_the_page_begins_with_the_finding() -> None:
    runs = [record("slow", samples_per_s=100.0), record("fast", samples_per_s=200.0), record("lost", accuracy=0.5)]
    written = page([run._replace(metrics=[]) for run in runs], title="t")
    assert '<p class="headline">fast processes 2.0\u00d7 as many samples per second as slow' in written
    remark = "Far below the most accurate run (slow, 97.5\u00a0%): lost ends at 50.0\u00a0%."
    assert f'<p class="remark">{remark}</p>' in written
    alone = page([record()], title="t")
    assert '<p class="headline">sync_sgd ends at 97.5\u00a0% accuracy after 2\u00a0s.</p>' in alone


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
