"""The page of a command that runs: it begins with the command, ends with it, and changes no bit of its run."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Event, Thread
from typing import Any

import pytest
from typer.testing import CliRunner

import polytempo as pt
from live_pages import Served, serving, write_run
from polytempo.cli.main import app
from polytempo.core.system.files import TAILS
from polytempo.runs.clients.tickets import make_tickets
from polytempo.ui.companion import companion
from polytempo.ui.of_run.run_trace import RunTrace
from polytempo.ui.run_facts import facts
from polytempo.ui.run_list import facts_of
from polytempo.worlds import trace_tail
from waiting import soon
from warm import SOURCES

pytestmark = pytest.mark.process

KILLED = """
import sys
from polytempo.ui.companion import companion
with companion(sys.argv[1]) as link:
    print(link, flush=True)
    sys.stdin.read()
"""


def is_gone(page: Served) -> bool:
    """True if no process listens there."""
    try:
        page.ask("/")
    except OSError:
        return True
    return False


def test_the_page_of_a_command_ends_with_it(tmp_path: Path) -> None:
    write_run(tmp_path / "a b")
    with companion(str(tmp_path), "a b") as link:
        assert link.endswith("#/run/a%20b")
        page = Served(link)
        assert page.ask("/")[0] == 403
        assert [row["id"] for row in page.parts("kind=runs", 1)["runs"]] == ["a b"]
    assert is_gone(page)


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks a process up below /proc")
def test_the_page_of_a_command_takes_only_time_that_is_left(tmp_path: Path) -> None:
    with companion(str(tmp_path)) as link:
        assert Served(link).ask("/")[0] == 403
        [page] = [int(each.name) for each in Path("/proc").glob("[0-9]*") if is_page_of_this_process(each)]
        assert os.getpriority(os.PRIO_PROCESS, page) == min(19, os.getpriority(os.PRIO_PROCESS, 0) + 19)
        assert os.sched_getscheduler(page) == os.SCHED_BATCH
        session = Path(f"/proc/{page}/autogroup")
        assert not session.exists() or os.getuid() or session.read_text().split()[-1] == "19"


def is_page_of_this_process(folder: Path) -> bool:
    """True if it is a page's process and this one's child."""
    with suppress(OSError, IndexError):
        parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
        return parent == os.getpid() and b"polytempo.ui" in (folder / "cmdline").read_bytes().split(b"\0")
    return False


def test_a_killed_command_leaves_no_page(tmp_path: Path) -> None:
    environment = os.environ | {"PYTHONPATH": SOURCES}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    command = [sys.executable, "-c", KILLED, str(tmp_path)]
    with subprocess.Popen(command, env=environment, text=True, **pipes) as process:  # type: ignore[call-overload]
        page = Served(process.stdout.readline().strip())
        assert page.ask("/")[0] == 403
        process.send_signal(signal.SIGKILL)
    assert soon(lambda: is_gone(page))


def test_a_command_says_the_link_on_standard_error_and_the_result_on_standard_output(tmp_path: Path) -> None:
    arguments = [
        "simulate",
        "digits",
        "--workers",
        "2",
        "--steps",
        "2",
        "--json",
        "--ui",
        "--out",
        str(tmp_path / "run"),
    ]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0, done.output
    assert done.stderr.startswith("live page: http://127.0.0.1:")
    assert done.stdout.startswith("{")


def test_a_server_of_rounds_says_its_link(tmp_path: Path) -> None:
    """A round of two and one ticket: the run does not begin, and the page is named before."""
    make_tickets(tmp_path / "keys", 1, "127.0.0.1:7777", 100)
    asked = ["serve", "digits", "--keys", str(tmp_path / "keys"), "--strategy", "fed_avg(cohort=2)", "--ui"]
    done = CliRunner().invoke(app, [*asked, "--out", str(tmp_path / "run")])
    assert done.exit_code == 2
    assert done.stderr.startswith("live page: http://127.0.0.1:")
    assert "PT2518" in done.stderr
    refused = CliRunner().invoke(app, asked)
    assert "--ui needs --out, to show its files; add --out runs/served" in refused.stderr


@contextmanager
def watched(root: Path) -> Iterator[None]:
    """Three pages look at the runs of a folder."""
    over = Event()

    def look(page: Served, query: str) -> None:
        while not over.is_set():
            page.parts(query, 1)

    with serving(root) as page:
        queries = ["kind=runs", "kind=run&run=watched&pixels=100", "kind=compare&run=watched"]
        threads = [Thread(target=look, args=(page, query)) for query in queries]
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            over.set()
            for thread in threads:
                thread.join()


class SeesEdges(pt.callbacks.Callback):
    """Asks for the end of the run when the page has a timeline, and so many edges."""

    def __init__(self, folder: Path, edges: int) -> None:
        self.folder, self.edges, self.seen = folder, edges, False

    def on_step(self, facts: pt.callbacks.CallbackFacts) -> pt.callbacks.Control:
        found = RunTrace(self.folder)
        found.look()
        drawn = found.topology(2, {})
        enough = drawn is not None and len(drawn["edges"]) >= self.edges
        self.seen |= enough and found.goes_on and found.timeline is not None
        return pt.callbacks.Control(stop=self.seen)

    def state_dict(self) -> dict[str, Any]:
        return {"seen": self.seen}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.seen = bool(state["seen"])


@pytest.mark.parametrize(
    ("strategy", "edges", "options"),
    [
        ("gossip", 2, {}),
        ("gpipe(stages=2)", 2, {}),
        ("async_sgd", 4, {}),  # each worker and the server, both ways
        ("local_sgd(period=2, route=ring)", 2, {"min_workers": 2}),
    ],
)
def test_a_run_shows_its_edges_while_it_goes_on(
    strategy: str, edges: int, options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Workers and servers, stages, members of an elastic run: forked, so that they write their tails immediately."""
    monkeypatch.setattr(trace_tail, "_FIRST_S", 0.0)
    monkeypatch.setattr(trace_tail, "EVERY_S", 0.0)
    sees = SeesEdges(tmp_path / "run", edges)
    found = pt.run("digits", strategy, 2, epochs=20, threads=1, callbacks=[sees], out=tmp_path / "run", **options)
    assert found.callbacks is not None
    assert found.callbacks[0]["state"]["seen"]
    assert not (tmp_path / "run" / TAILS).exists()
    assert (tmp_path / "run" / "trace.json").exists()


def test_a_simulation_shows_its_edges_while_it_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace_tail, "_FIRST_S", 0.0)
    monkeypatch.setattr(trace_tail, "EVERY_S", 0.0)  # the first tail may go when the run's stream begins
    sees = SeesEdges(tmp_path / "run", 4)
    found = pt.simulate("digits", "gossip", 4, epochs=20, callbacks=[sees], out=tmp_path / "run")
    assert found.callbacks is not None
    assert found.callbacks[0]["state"]["seen"]
    assert not (tmp_path / "run" / TAILS).exists()


@pytest.mark.parametrize(
    ("strategy", "workers", "trackers", "options"),
    [
        ("sync_sgd", 2, "tensorboard", {}),
        ("local_sgd(period=4)", 2, (), {}),
        ("gossip", 2, (), {}),
        ("async_sgd", 1, (), {}),  # with one worker a server's run has one order of updates
        ("gpipe(stages=2)", 2, (), {}),
        ("local_sgd(period=2, route=ring)", 2, (), {"min_workers": 2}),  # elastic
    ],
)
def test_a_watched_run_has_the_bits_of_one_that_is_not(
    strategy: str,
    workers: int,
    trackers: Any,
    options: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Law 1. Also the virtual times of a simulation: the hash of its trace covers them.

    The page looks at a folder, and the run writes the tails of its trace after each operation. The other run has none.
    """
    monkeypatch.setattr(trace_tail, "_FIRST_S", 0.0)
    monkeypatch.setattr(trace_tail, "EVERY_S", 0.0)

    def runs(out: Path | None, **kept: Any) -> list[str | None]:
        real = pt.run("digits", strategy, workers, epochs=2, threads=1, out=out, **options, **kept)
        beside = None if out is None else out.with_name("watched-virtual")
        virtual = pt.simulate("digits", strategy, 2 if "gpipe" in strategy else 2 * workers, epochs=2, out=beside)
        return [real.parameters_sha256, virtual.parameters_sha256, virtual.trace_hash]

    alone = runs(None)
    with watched(tmp_path):
        assert runs(tmp_path / "watched", trackers=trackers) == alone
    assert bool(trackers) == (tmp_path / "watched" / "tensorboard").is_dir()


@pytest.mark.parametrize("world", ["process", "virtual"])
def test_the_command_on_the_page_repeats_the_run(world: str, tmp_path: Path) -> None:
    """Also for a job of a file, with a learning rate and a batch of one's own."""
    (tmp_path / "mine.py").write_text("from polytempo import jobs\njob = jobs.find('digits')\n")
    given: dict[str, Any] = {"steps": 3, "lr": 0.02, "batch_size": 8, "seed": 5, "threads": 1, "out": tmp_path / "run"}
    begin = pt.run if world == "process" else pt.simulate
    first = begin(f"{tmp_path}/mine.py:job", "local_sgd(period=2)", workers=2, **given)
    found = facts(tmp_path / "run", facts_of(tmp_path / "run"))
    assert found["settings"]["lr"] == "0.02"
    assert found["environment"]["device"]
    words = shlex.split(found["command"])
    done = CliRunner().invoke(app, [*words[1:], "--json", "--out", str(tmp_path / "again")])
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["parameters_sha256"] == first.parameters_sha256
