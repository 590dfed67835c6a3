"""The server of the live page: access, the list of runs, curves as pixels, and removals."""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from live_pages import NUM_STEPS, Served, serving, trace, write_run, write_tail
from polytempo.core.system.files import TAILS
from polytempo.report.runs import read_events
from polytempo.report.status.metrics import MetricsWriter
from polytempo.report.status.records import RunStarted
from polytempo.ui.application import MOST_STREAMS
from polytempo.ui.hub import LOOK_S, SLOWEST_S, Hub, LookPace, Watch
from polytempo.ui.of_run.run_columns import RunColumns
from polytempo.ui.of_run.run_logs import log_lines, logs_of
from polytempo.ui.of_run.run_trace import RunTrace, compared, in_common, node_names, timeline, topology
from polytempo.ui.of_run.sampling import sampled
from polytempo.ui.page_view import PageView, view_of
from polytempo.ui.removal import archive, remove
from polytempo.ui.run_facts import command, differences, repeating, standing
from polytempo.ui.run_list import RunList, facts_of
from polytempo.worlds.trace import Event, write_chrome_trace
from waiting import soon

FINITE = st.floats(-1e9, 1e9)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    root = tmp_path_factory.mktemp("runs")
    write_run(root / "digits-sync")
    write_run(root / "many" / "02-gossip", strategy="gossip()", number=1)
    with serving(root) as page:
        yield page


# ---------------------------------------------------------------- who may see it


@pytest.mark.parametrize(
    ("path", "headers", "status"),
    [
        ("/", {}, 403),
        ("/assets/app.js", {}, 403),
        ("/events?kind=runs", {}, 403),
        ("/report?run=digits-sync", {}, 403),
        ("/?token=", {}, 403),
        ("/?token=wrong", {}, 403),
        ("/?token=TOKEN", {}, 200),
        ("/?token=TOKEN", {"Host": "attacker.example"}, 421),
        ("/?token=TOKEN", {"Host": "attacker.example:PORT"}, 421),
        ("/?token=TOKEN", {"Host": "localhost:1"}, 421),
        ("/?token=TOKEN", {"Host": "localhost:PORT"}, 200),
        ("/?token=TOKEN", {"Host": "[::1]:PORT"}, 200),
        ("/?token=TOKEN", {"Host": "192.0.2.1:PORT"}, 421),
        ("/?token=TOKEN", {"Host": "["}, 421),
        ("/", {"Cookie": "COOKIE"}, 200),
        ("/", {"Cookie": "COOKIEx"}, 403),
        ("/", {"Cookie": "polytempo_PORT=TOKEN"}, 403),
        ("/", {"Cookie": '=;;"'}, 403),
        ("/assets/app.js", {"Cookie": "COOKIE"}, 200),
        ("/assets/../server.py", {"Cookie": "COOKIE"}, 404),
        ("/assets/nothing.js", {"Cookie": "COOKIE"}, 404),
        ("/report?run=nothing", {"Cookie": "COOKIE"}, 404),
        ("/events?kind=nothing", {"Cookie": "COOKIE"}, 400),
        ("/events?kind=run", {"Cookie": "COOKIE"}, 400),
        ("/events?pixels=1e9", {"Cookie": "COOKIE"}, 400),
        ("/events?kind=runs&axis=nothing", {"Cookie": "COOKIE"}, 400),
    ],
)
def test_only_the_link_and_its_cookie_open_the_page(
    served: Served, path: str, headers: dict[str, str], status: int
) -> None:
    def filled(text: str) -> str:
        named = text.replace("TOKEN", served.token).replace("PORT", str(served.port))
        return named.replace("COOKIE", served.cookie()) if "COOKIE" in named else named

    found = served.ask(filled(path), headers={name: filled(value) for name, value in headers.items()})
    assert found[0] == status
    assert found[1]["x-content-type-options"] == "nosniff"
    assert served.token not in found[2]


@pytest.mark.parametrize(
    ("origin", "kind", "cookie", "status"),
    [
        ("BASE", "application/json", True, 200),
        ("BASE", "application/json", False, 403),
        ("BASE", "text/plain", True, 403),
        ("http://attacker.example", "application/json", True, 403),
        ("null", "application/json", True, 403),
        (None, "application/json", True, 403),
    ],
)
def test_a_removal_comes_from_the_page_itself(
    served: Served, origin: str | None, kind: str, cookie: bool, status: int
) -> None:
    headers = {"Content-Type": kind}
    headers |= {"Cookie": served.cookie()} if cookie else {}
    headers |= {} if origin is None else {"Origin": served.base if origin == "BASE" else origin}
    body = json.dumps({"runs": ["nothing"]})
    found = served.ask(f"/remove?token={served.token}", method="POST", headers=headers, body=body)
    assert found[0] == status
    assert status != 200 or "nothing" in json.loads(found[2])["stayed"]


def test_the_page_runs_no_script_but_its_own_and_loads_nothing_from_elsewhere(served: Served) -> None:
    """The report is made from numbers, in an origin of its own; the file in the folder may be anything."""
    status, headers, text = served.ask("/", headers={"Cookie": served.cookie()})
    assert status == 200
    assert "http" not in text.replace("http-equiv", "")
    assert "script-src 'self'" in headers["content-security-policy"]
    assert "unsafe" not in headers["content-security-policy"]
    _, headers, text = served.ask("/report?run=digits-sync", headers={"Cookie": served.cookie()})
    assert "hostile" not in text
    assert headers["content-security-policy"].startswith("sandbox allow-scripts")
    assert "allow-same-origin" not in headers["content-security-policy"]


# ---------------------------------------------------------------- views


def test_a_view_of_runs_has_a_row_for_each(served: Served) -> None:
    rows = {row["id"]: row for row in served.parts("kind=runs", 1)["runs"]}
    assert set(rows) == {"digits-sync", "many/02-gossip"}
    row = rows["many/02-gossip"]
    assert (row["state"], row["strategy"], row["step"], row["batch_size"]) == ("finished", "gossip()", NUM_STEPS, 32)


def test_a_view_of_one_run_has_curves_marks_bars_and_edges(served: Served) -> None:
    found = served.parts("kind=run&run=digits-sync&pixels=50&axis=step", 4)
    loss = {curve["kind"]: curve for curve in found["curves"]["curves"]["loss"]}
    assert loss["train"]["points"] == NUM_STEPS
    assert len(loss["train"]["x"]) == 50
    assert len(loss["test"]["x"]) == NUM_STEPS // 10
    for axis, scale in (("seconds", 0.01), ("epoch", 1 / 30)):  # a logged number's record has its step alone
        timed = served.parts(f"kind=run&run=digits-sync&pixels=50&axis={axis}", 4)
        (own,) = timed["curves"]["curves"]["perplexity"]
        assert own["x"] == pytest.approx([scale * step for step in range(10, NUM_STEPS + 1, 10)], rel=1e-5)
    assert [mark["kind"] for mark in found["curves"]["marks"]] == ["fault", "checkpoint", "group", "diagnosis"]
    assert found["activity"]["timeline"]["ranks"] == [0, 1]
    assert found["activity"]["topology"]["edges"] == [[0, 1, 8000], [1, 0, 8000]]
    assert found["run"]["facts"]["command"].startswith("polytempo train digits --strategy")


def test_a_view_of_several_has_their_differences(served: Served) -> None:
    found = served.parts("kind=compare&run=digits-sync&run=many/02-gossip&pixels=50", 2)
    assert {row[0] for row in found["compared"]["settings"] if row[1]} == {"strategy"}
    assert {curve["run"] for curve in found["curves"]["curves"]["loss"]} == {0, 1}


def test_a_run_that_is_resumed_after_its_end_is_read_again(tmp_path: Path) -> None:
    watch = Watch(write_run(tmp_path / "run"), LookPace(None))
    watch.look()
    assert watch.columns.ended
    with (tmp_path / "run" / "metrics.jsonl").open("a") as stream:
        stream.write(json.dumps({"kind": "train", "step": NUM_STEPS + 1, "loss": 1.0}) + "\n")
    watch.look()
    assert watch.columns.num_rows == NUM_STEPS + NUM_STEPS // 10, "the last look was now"
    watch.looked_s -= 2 * LOOK_S
    watch.look()
    assert watch.columns.num_rows == NUM_STEPS + NUM_STEPS // 10 + 1


def test_a_logged_picture_is_shown_and_no_other_file(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", state="running")
    png = b"\x89PNG\r\n\x1a\n and so on"
    (folder / "images").mkdir()
    for name in ("good.png", "unlogged.png"):
        (folder / "images" / name).write_bytes(png)
    (folder / "images" / "markup.png").write_text("<svg onload='alert(1)'>")
    (folder / "images" / "link.png").symlink_to(folder / "images" / "good.png")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "other.png").write_bytes(png)
    (folder / "linked").symlink_to(tmp_path / "elsewhere")
    logged = ["images/good.png", "images/markup.png", "images/link.png", "images/nothing.png", "linked/other.png"]
    with (folder / "events.jsonl").open("a") as stream:
        for path in logged:
            stream.write(json.dumps({"kind": "image", "name": "filters", "step": 1, "path": path}) + "\n")
    with serving(tmp_path) as page:
        headers = {"Cookie": page.cookie()}
        found = {path: page.ask(f"/picture?run=run&path={path}", headers=headers) for path in [*logged, "live.json"]}
        assert [path for path, answer in found.items() if answer[0] == 200] == ["images/good.png"]
        assert found["images/good.png"][1]["content-type"] == "image/png"
        assert page.ask("/picture?run=run&path=images/unlogged.png", headers=headers)[0] == 404


def test_closed_pages_leave_room_for_others(served: Served) -> None:
    for _ in range(MOST_STREAMS + 20):
        assert "runs" in served.parts("kind=runs", 1)


def test_a_view_of_a_run_that_is_not_there_says_so(served: Served) -> None:
    assert served.parts("kind=run&run=..", 1) == {
        "problem": {"text": "this run has not begun yet, or is not in this folder"}
    }


def test_views_are_checked() -> None:
    assert view_of({"kind": "run", "pixels": "80", "begin": "0.5"}, ["a"]) == PageView(
        kind="run", runs=("a",), pixels=80, begin=0.5
    )
    with pytest.raises(ValueError, match="at most 40"):
        view_of({"kind": "compare"}, [str(n) for n in range(41)])


# ---------------------------------------------------------------- pixels


@given(st.lists(st.tuples(FINITE, st.one_of(FINITE, st.just(math.nan))), max_size=300), st.integers(1, 40))
def test_no_pixel_loses_a_peak(points: list[tuple[float, float]], num_pixels: int) -> None:
    """There is at most one point a pixel; the least and the greatest value stay; each mean is between its bounds."""
    x, y = [p[0] for p in points], [p[1] for p in points]
    curve = sampled(x, y, num_pixels)
    kept = [value for value in y if math.isfinite(value)]
    assert curve.num_points == len(kept)
    assert len(curve.x) <= num_pixels
    assert np.all(np.diff(curve.x) >= 0)
    if kept:
        assert curve.low.min() == min(kept)
        assert curve.high.max() == max(kept)
        slack = 1e-6 * (1 + np.abs(curve.mean))
        assert np.all(curve.low - slack <= curve.mean)
        assert np.all(curve.mean <= curve.high + slack)


def test_a_part_of_a_curve_has_its_own_pixels() -> None:
    x = np.arange(1_000_000.0)
    curve = sampled(x, x, 100, 1_000.0, 1_049.0)
    assert curve.x.tolist() == list(range(1_000, 1_050))
    assert sampled(x, x, 100).low.tolist() == [10_000.0 * n for n in range(100)]


# ---------------------------------------------------------------- pace


def test_the_page_looks_less_often_if_it_takes_more_than_its_share() -> None:
    """A look costs 20 ms: at a share of 0.5 % of a core there is time for one every four seconds."""
    now_s, used_s = [0.0], [0.0]
    pace = LookPace(0.005, lambda: now_s[0], lambda: used_s[0])
    for _ in range(40):
        now_s[0] += pace.interval_s
        used_s[0] += 0.02
        pace.look(running=True)
    assert pace.interval_s == pytest.approx(4.0, rel=0.3)
    for _ in range(40):
        now_s[0] += pace.interval_s
        used_s[0] += 1.0
        pace.look(running=True)
    assert pace.interval_s == SLOWEST_S
    pace.look(running=False)
    assert pace.interval_s == LOOK_S


# ---------------------------------------------------------------- runs and their files


def test_runs_are_found_at_any_depth_and_links_are_not_followed(tmp_path: Path) -> None:
    root = tmp_path / "runs"
    write_run(root / "one", state="running")
    write_run(root / "a" / "b" / "two")
    write_run(tmp_path / "elsewhere")
    write_run(root / "archived" / "old")
    write_run(root / "trace")
    (root / "link").symlink_to(tmp_path / "elsewhere")
    (root / "empty").mkdir()
    assert [row["id"] for row in RunList(root).look()] == ["one", "trace", "a/b/two"]
    assert [row["id"] for row in RunList(root / "one").look()] == ["."]


@pytest.mark.parametrize(
    ("state", "world", "shown", "done"),
    [
        ("running", "process", "running", 0.5),
        ("running", "virtual", "running", 0.5),
        ("failed", "process", "failed", 1.0),
    ],
)
def test_the_state_of_a_run(tmp_path: Path, state: str, world: str, shown: str, done: float) -> None:
    """A simulation that goes on has left rows and events only."""
    facts = facts_of(write_run(tmp_path / "run", state=state, world=world, why="out of memory"))
    assert (facts["state"], facts["done"], facts["job"]) == (shown, done, "digits")
    assert (facts["eta_s"] is not None) == (shown == "running")


def test_a_run_of_a_launcher_that_is_gone(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", state="running")
    status = json.loads((folder / "live.json").read_text())
    (folder / "live.json").write_text(json.dumps(status | {"launcher_pid": 2**22 + 1}))
    assert facts_of(folder)["state"] == "gone"


@pytest.mark.parametrize("content", ["", "[]", "{", '{"version": 1}', "null", '{"version": 9e99}'])
def test_broken_files_make_a_row_and_no_error(tmp_path: Path, content: str) -> None:
    for name in ("live.json", "result.json", "metrics.jsonl", "events.jsonl"):
        folder = write_run(tmp_path / name.partition(".")[0])
        (folder / name).write_text(content)
    assert len(RunList(tmp_path).look()) == 4


def test_columns_follow_a_run_that_grows(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", state="running", served=True)
    columns = RunColumns(folder)
    assert columns.look()
    assert not columns.look()
    with (folder / "metrics.jsonl").open("a") as stream:
        stream.write(json.dumps({"kind": "train", "step": 61, "loss": None, "seconds": 0.61}) + "\n")
    assert columns.look()
    (train, test) = columns.curves("step", "loss", 1000)
    assert (train["points"], test["points"]) == (60, 6)
    assert columns.axes(None) == ["seconds", "step", "epoch", "samples"]
    assert columns.curves("bytes", "accuracy", 1000, sent_bytes=610.0)[0]["x"] == [100, 200, 300, 400, 500, 600]
    assert set(columns.workers) == {0, 1}


def test_a_long_run_comes_in_parts(tmp_path: Path) -> None:
    """Each look takes a mebibyte of rows; all rows are taken once, also of a run that has ended."""
    folder = write_run(tmp_path / "run")
    row = {"kind": "train", "loss": 1.0, "seconds": 1.0, "more": "x" * 900}
    lines = [json.dumps(row | {"step": step}) for step in range(1, 4001)]
    (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    columns = RunColumns(folder)
    looks = 0
    while columns.look(within_s=0.0):
        looks += 1
    assert (looks, columns.num_rows, columns.ended, columns.behind) == (4, 4000, True, False)
    assert len(columns.marks("seconds")) == 4


def test_a_log_is_searched_and_steers_no_terminal(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", log="one\nTWO <b>\x1b[2J\nthree two\n")
    assert [log["name"] for log in logs_of(folder)] == ["worker-0.log", "worker-1.log"]
    assert log_lines(folder, "worker-0.log", "two")["lines"] == [[2, "TWO <b>\\x1b[2J"], [3, "three two"]]
    (folder / "logs" / "link.log").symlink_to("/etc/passwd")
    for name in ("link.log", "../metrics.jsonl", "nothing"):
        with pytest.raises(ValueError, match="is not a log"):
            log_lines(folder, name)


def test_the_timeline_is_of_the_last_steps_but_one(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", workers=3)
    events, _ = read_events(folder / "trace.json")
    found = timeline(events)
    assert found is not None
    assert (found["steps"], found["ranks"], len(found["bars"])) == ([4, 7], [0, 1, 2], 24)
    edges = topology(events, 2, node_names(["worker-0", "rank-1", "shard-0-node-2"]))
    assert edges is not None
    assert [node["name"] for node in edges["nodes"]] == ["worker-0", "rank-1", "shard-0-node-2"]
    assert [node["worker"] for node in edges["nodes"]] == [True, True, False]
    assert timeline([]) is None
    assert topology([], 1, {}) is None


def test_a_run_that_goes_on_has_a_timeline_and_edges(tmp_path: Path) -> None:
    """The time that all tails tell of: rank 0 has written last. A rank that is gone holds nothing back."""
    folder = write_run(tmp_path / "run", workers=2, state="running")
    events = trace(3)
    for rank, last in ((0, 8), (1, 7), (2, 3)):
        write_tail(folder, rank, [event for event in events if event.rank == rank and event.step <= last])
    os.utime(folder / TAILS / "2.json", (1, 1))
    (folder / TAILS / "3.json").write_text('[["no", "event"]]')
    (folder / TAILS / "4.json").symlink_to(folder / TAILS / "0.json")
    found = RunTrace(folder)
    assert found.look()
    assert found.goes_on
    assert {(event.rank, event.step) for event in found.events} == {(r, s) for r in (0, 1) for s in range(1, 8)}
    assert found.timeline is not None
    assert (found.timeline["ranks"], found.timeline["steps"]) == ([0, 1], [3, 6])
    drawn = found.topology(2, {})
    assert drawn is not None
    assert drawn["edges"] == [[0, 1, 7000], [1, 2, 7000]]
    assert not found.look()
    write_chrome_trace(folder / "trace.json", events, title="the whole")
    assert found.look()
    assert (found.goes_on, len(found.events)) == (False, 48)


def test_tails_of_an_ended_or_an_earlier_run_do_not_count(tmp_path: Path) -> None:
    """A process that was left out writes after the end. A killed run leaves its tails to the next one in its folder."""
    folder = write_run(tmp_path / "run")
    found = RunTrace(folder)
    assert found.look()
    write_tail(folder, 0, trace(1))
    assert not found.look()
    assert (found.goes_on, {event.rank for event in found.events}) == (False, {0, 1})
    MetricsWriter(folder).close()
    os.utime(folder / "metrics.jsonl", ns=(0, (folder / "result.json").stat().st_mtime_ns + 1))
    assert not (folder / TAILS).exists()
    assert not found.look()
    write_tail(folder, 0, trace(1))
    assert found.look()
    assert (found.goes_on, {event.rank for event in found.events}) == (True, {0})


def test_tails_without_a_common_time_are_shown_as_they_are() -> None:
    early, late = Event(0, 1, "compute", 0, 0.0, 1.0), Event(1, 9, "compute", 0, 5.0, 6.0)
    assert in_common([[early], [], [late]]) == [early, late]
    assert in_common([]) == []


def test_a_prediction_is_compared_with_the_measurement(tmp_path: Path) -> None:
    virtual, real = (write_run(tmp_path / world, world=world) for world in ("virtual", "process"))
    times = compared(*(read_events(folder / "trace.json")[0] for folder in (virtual, real)))
    assert times is not None
    assert times["step"][0] == pytest.approx(1.2 * times["step"][1])


def test_the_command_of_a_run() -> None:
    settings = {"job": "digits", "strategy": "top_k_sgd(0.01)", "world": "virtual", "workers": 4, "batch_size": 8}
    words = "polytempo simulate digits --strategy 'top_k_sgd(0.01)' --workers 4 --epochs 2 --batch-size 8"
    assert command(settings, {"epochs": 2.0}) == words
    assert command({"strategy": "x"}, {}) == ""
    runs = [{"settings": {"seed": 0, "workers": 2}}, {"settings": {"seed": 1, "workers": 2}}]
    assert differences(runs) == [["workers", False, 2, 2], ["seed", True, 0, 1]]


COMMANDS = [
    ({}, "train", ""),
    ({"lr": "0.1", "seed": "3"}, "train", " --lr 0.1 --seed 3"),
    ({"until": "accuracy=0.9,loss=0.1"}, "train", " --until accuracy=0.9,loss=0.1"),
    ({"allow_nan": "true", "callbacks": "keep(best=2)"}, "train", " --allow-nan --callback 'keep(best=2)'"),
    ({"cluster": "ethernet(gbit_per_s=1)"}, "simulate", " --cluster 'ethernet(gbit_per_s=1)'"),
    ({"cluster": "ib, stragglers x(1)"}, "simulate", " --cluster ib --stragglers 'x(1)'"),
    ({"cluster": "measured on n1"}, "simulate", None),
    ({"data": "…"}, "train", None),
    ({"reshape": "2:3"}, "train", None),
]


@pytest.mark.parametrize(("settings", "verb", "rest"), COMMANDS)
def test_the_command_that_repeats_a_run(settings: dict[str, str], verb: str, rest: str | None) -> None:
    world = "virtual" if verb == "simulate" else "process"
    start = RunStarted(job="j", strategy="s()", world=world, workers=2, origin="a.py:job", settings=settings)
    whole = "" if rest is None else f"polytempo {verb} a.py:job --strategy 's()' --workers 2{rest}"
    assert repeating(start) == whole
    assert repeating(msgspec.structs.replace(start, origin=None)) == ""


def rows_with(folder: Path, **entries: float) -> RunColumns:
    """The columns of a running run with one more row."""
    row = {"kind": "train", "step": 9, "loss": 1.0, **entries}
    folder.joinpath("metrics.jsonl").write_text(json.dumps(row) + "\n")
    columns = RunColumns(folder)
    columns.look()
    return columns


@pytest.mark.parametrize(
    ("entries", "sentence"),
    [
        ({"compute_s": 0.1, "wait_s": 0.01, "least_wait_s": 0.0}, "Computing bounds this run: 91 %"),
        ({"compute_s": 0.1, "wait_s": 0.1, "least_wait_s": 0.0}, "Stragglers bound this run: 50 %"),
        ({"compute_s": 0.1, "wait_s": 0.1, "least_wait_s": 0.1}, "Exchange bounds this run"),
        ({"worker": 0, "idle_share": 0.5, "samples_per_s": 100.0}, "Waiting for the server bounds this run: 50 %"),
        ({"worker": 0, "idle_share": 0.1, "samples_per_s": 100.0}, "Computing bounds this run: 90 %"),
        ({"compute_s": 0.1}, None),
        ({}, None),
    ],
)
def test_the_bound_of_a_run_that_goes_on(entries: dict[str, float], sentence: str | None, tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", state="running")
    more = {"read_s": 0.0, "sent_bytes": 1e6, "messages": 1.0} if "wait_s" in entries else {}
    said = standing(rows_with(folder, **entries, **more), facts_of(folder))
    assert said[0] == "Worker-1 is 31 % slower."
    assert [each.startswith(str(sentence)) for each in said[1:]] == ([] if sentence is None else [True])


# ---------------------------------------------------------------- removals


def test_an_ended_run_is_deleted_or_archived(tmp_path: Path) -> None:
    write_run(tmp_path / "a" / "one")
    write_run(tmp_path / "a" / "two")
    remove(tmp_path, "a/one")
    assert os.listdir(tmp_path / "a") == ["two"]
    assert archive(tmp_path, "a/two") == tmp_path / "archived" / "a" / "two"
    write_run(tmp_path / "a" / "two")
    assert archive(tmp_path, "a/two") == tmp_path / "archived" / "a" / "two-2"
    assert RunList(tmp_path).look() == []


@pytest.mark.parametrize(
    ("name", "remedy"),
    [
        (".", "not a run"),
        ("..", "not a run"),
        ("a/../../victim", "not a run"),
        ("/etc", "not a run"),
        ("a//one", "not a run"),
        ("", "not a run"),
        ("link", "a link"),
        ("inside/link", "a link"),
        ("inside/link/one", "a link"),
        ("plain", "not the folder of a run"),
        ("nothing", "is not a folder"),
        ("running", "goes on|running"),
        ("held", "goes on"),
        ("parent", "holds other runs"),
    ],
)
@pytest.mark.parametrize("change", [remove, archive], ids=["remove", "archive"])
def test_other_folders_stay(tmp_path: Path, name: str, remedy: str, change: object) -> None:
    root, victim = tmp_path / "root", write_run(tmp_path / "victim" / "one")
    (root / "plain").mkdir(parents=True)
    (root / "plain" / "file.txt").write_text("mine")
    (root / "link").symlink_to(victim)
    (root / "inside").mkdir()
    (root / "inside" / "link").symlink_to(victim.parent)
    write_run(root / "running", state="running")
    held = write_run(root / "held")
    owner = {"host": os.uname().nodename, "machine": "", "pid": os.getpid(), "since_s": 1.0, "token": "t"}
    (held / ".lock-00000001.json").write_text(json.dumps(owner))
    write_run(root / "parent")
    write_run(root / "parent" / "child")
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(ValueError, match=remedy):
        change(root, name)  # type: ignore[operator]
    assert sorted(tmp_path.rglob("*")) == before


def test_a_link_in_place_of_the_archive_is_refused(tmp_path: Path) -> None:
    root, other = tmp_path / "root", tmp_path / "other"
    other.mkdir()
    write_run(root / "one")
    (root / "archived").symlink_to(other)
    with pytest.raises(ValueError, match="a link"):
        archive(root, "one")
    assert not any(other.iterdir())
    shutil.rmtree(root)


def test_pages_with_one_view_have_it_made_once(tmp_path: Path) -> None:
    """The others wait for the first, which else would be made again by each of them at every look."""
    asked, made = list[int](), list[int]()

    def make() -> int:
        made.append(1)
        assert soon(lambda: len(asked) == 4)
        return len(made)

    class OnePart(Hub):
        def _makers(self, view: PageView) -> list[tuple[str, Callable[[], Any]]]:
            return [("part", make)]

    pace = LookPace(None)
    pace.interval_s = math.inf
    hub = OnePart(tmp_path, pace)

    def look(number: int) -> list[tuple[str, bytes]]:
        asked.append(number)
        return list(hub.parts(PageView()))

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(look, range(4))) == [[("part", b"1")]] * 4
