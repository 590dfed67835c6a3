"""The page of a command that runs: it begins with the command, ends with it, and changes no bit of its run."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Event, Thread
from typing import Any

import pytest
from typer.testing import CliRunner

import polytempo as pt
from live_pages import Served, serving, write_run
from polytempo.cli.main import app
from polytempo.ui.companion import companion
from polytempo.ui.run_facts import facts
from polytempo.ui.run_list import facts_of
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


@pytest.mark.parametrize("strategy", ["sync_sgd", "local_sgd(period=4)", "gossip"])
def test_a_watched_run_has_the_bits_of_one_that_is_not(strategy: str, tmp_path: Path) -> None:
    """Law 1. Also the virtual times of a simulation: the hash of its trace covers them."""

    def runs(out: Path) -> list[str | None]:
        real = pt.run("digits", strategy, workers=2, epochs=2, out=out)
        virtual = pt.simulate("digits", strategy, workers=4, epochs=2, out=out.with_name(f"{out.name}-virtual"))
        return [real.parameters_sha256, virtual.parameters_sha256, virtual.trace_hash]

    alone = runs(tmp_path / "alone")
    with watched(tmp_path):
        assert runs(tmp_path / "watched") == alone


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
