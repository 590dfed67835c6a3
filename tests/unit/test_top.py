"""`polytempo top`: its view of a run, and the sources of that."""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path
from typing import Any

import msgspec
import pytest
from rich.console import Console
from typer.testing import CliRunner

import polytempo as pt
from polytempo.cli.main import app
from polytempo.cli.run.top import status_in
from polytempo.core.system.notice import Preempted
from polytempo.engines.engine import EngineProcess, Role
from polytempo.engines.processes.worker_processes import Child
from polytempo.jobs import find
from polytempo.report.status.live_status import (
    LiveStatus,
    ProcessStatus,
    launcher_lives,
    read_status,
    status_of_result,
    write_status,
)
from polytempo.report.status.live_view import view
from polytempo.report.status.records import ProcessEvent
from polytempo.runs.frame.live_run import LiveRun, RunEvents, ShownRun
from polytempo.spec.run_options import RunOptions
from polytempo.spec.run_spec import RunSpec

STATUS = LiveStatus(
    version=1,
    job="digits",
    strategy="downpour(push_every=5)",
    world="process",
    workers=2,
    state="running",
    written_s=1062.0,
    began_s=1000.0,
    launcher_host="n0",
    launcher_pid=17,
    epochs=10.0,
    train={"kind": "train", "step": 120, "epoch": 5.25, "loss": 0.2134, "samples_per_s": 900.0, "seconds": 60.0},
    test={"kind": "test", "step": 110, "loss": 0.3, "accuracy": 0.951},
    processes=(
        ProcessStatus("worker-0", "worker", "n1", "running", 1200.0, 0.25, 1.5),
        ProcessStatus("worker-1.2", "worker", "n2", "running", 900.0, 0.5, 2.5),
        ProcessStatus("shard-0-node-2", "copy", "n1", "running"),
        ProcessStatus("shard-0-node-3", "copy", "n2", "stopped"),
    ),
    num_events=1,
    events=(ProcessEvent("worker-1", "was killed by SIGKILL", 12.34, "started again"),),
)


def shown(status: LiveStatus, **given: Any) -> str:
    """The view at 80 columns, without spaces at the ends of lines."""
    console = Console(width=80, color_system=None, legacy_windows=False)
    with console.capture() as captured:
        console.print(view(status, now_s=given.pop("now_s", 1063.0), **given))
    return "\n".join(line.rstrip() for line in captured.get().splitlines() if line.strip())


def test_a_run_at_80_columns() -> None:
    assert shown(STATUS) == (
        "digits, downpour(push_every=5), 2 workers\n"
        "running, 63 s since its start; processes: 3 running, 1 stopped, on 2 hosts\n"
        "step 120, loss 0.2134, accuracy 95.1 %, 2,100 samples/s, epoch 5.25 of 10,\n"
        "staleness 2.00\n"
        " process          host   state     samples/s   waits   staleness\n"
        " ───────────────────────────────────────────────────────────────\n"
        " shard-0-node-3   n2     stopped\n"
        " worker-0         n1     running       1,200    25 %        1.50\n"
        " worker-1.2       n2     running         900    50 %        2.50\n"
        " shard-0-node-2   n1     running\n"
        "faults\n"
        "      12.3 s  worker-1 was killed by SIGKILL; started again"
    )


def test_more_processes_than_lines_are_counted() -> None:
    many = msgspec.structs.replace(
        STATUS, processes=tuple(ProcessStatus(f"rank-{n}", "rank", "n1", "running") for n in range(100)), events=()
    )
    text = shown(many, lines=20)
    assert "and 89 more" in text
    assert len(text.splitlines()) <= 20


def test_a_launcher_that_says_nothing_is_named() -> None:
    assert "; no news for 38 s" in shown(STATUS, now_s=1100.0)
    text = shown(STATUS, now_s=1100.0, launcher_lives=False)
    assert text.splitlines()[1].startswith("launcher gone, 62 s since its start; process 17 ended without a word")


def test_what_was_written_is_read(tmp_path: Path) -> None:
    assert read_status(tmp_path) is None
    write_status(tmp_path, STATUS)
    assert read_status(tmp_path) == STATUS
    assert [entry.name for entry in tmp_path.iterdir()] == ["live.json"]


@pytest.mark.parametrize(
    ("content", "match"),
    [
        ("{", "live.json is not a status of a run"),
        ('{"version": 1}', "missing required field"),
        ("[1, 2]", "Expected `object`"),
        (msgspec.json.encode(msgspec.structs.replace(STATUS, version=9)).decode(), "of version 9"),
    ],
)
def test_a_broken_file_is_one_error(tmp_path: Path, content: str, match: str) -> None:
    (tmp_path / "live.json").write_text(content)
    with pytest.raises(ValueError, match=match):
        status_in(tmp_path)


def test_wrong_arguments_are_one_error(tmp_path: Path) -> None:
    for folder, said in ((tmp_path / "no", "there is no such folder"), (tmp_path, "holds neither a live.json nor")):
        done = CliRunner().invoke(app, ["top", str(folder)])
        assert (done.exit_code, done.stderr.count("\n")) == (2, 1)
        assert said in done.stderr
    assert CliRunner().invoke(app, ["top", str(tmp_path), "--every-s", "0"]).exit_code == 2


def test_whether_the_launcher_lives_is_known_on_its_host_alone() -> None:
    mine = msgspec.structs.replace(STATUS, launcher_host=socket.gethostname(), launcher_pid=os.getpid())
    assert launcher_lives(mine) is True
    assert launcher_lives(msgspec.structs.replace(mine, launcher_pid=2**22 + 1)) is False
    assert launcher_lives(msgspec.structs.replace(mine, state="finished")) is None
    assert launcher_lives(STATUS) is None


class Engine:
    """Starts the processes that the test ends."""

    address: Any = None

    def start(self, role: Role, host: int = 0) -> EngineProcess:
        return EngineProcess(role, Path("log"), host=f"n{host}")

    def poll(self, wait_s: float = 0.0) -> list[EngineProcess]:
        return []

    def stop(self, process: EngineProcess | None = None) -> None: ...


def test_the_memory_of_a_process_of_this_host(tmp_path: Path) -> None:
    """The launcher samples it when it writes; an ended process and one of another host have none."""
    spec = RunSpec.of(find("digits"), pt.strategies.downpour(), 2, RunOptions(out=tmp_path))
    now_s = [100.0]
    mine = Child(Role("worker", 0, 0), Path("log"), pid=os.getpid())
    gone = Child(Role("worker", 1, 1), Path("log"), pid=2**22 + 1)
    far = EngineProcess(Role("worker", 2, 2), Path("log"), host="n2")
    with LiveRun(tmp_path, ShownRun.of(spec), RunEvents(), clock=lambda: now_s[0]) as live:
        for process in (mine, gone, far):
            live.started(process)
        now_s[0] = 102.0
        live.look()
        status = read_status(tmp_path)
        assert status is not None
        memory = [each.memory_bytes for each in status.processes]
        assert memory[0] is not None
        assert memory[0] > 1e6
        assert memory[1:] == [None, None]
        assert "memory" in shown(status)
        assert " MB" in shown(status)
        mine.exit_code = 0
        assert mine.memory_bytes is None
        assert [each.memory_bytes for each in live.status("running").processes] == [None, None, None]


def test_a_launcher_writes_at_most_once_a_second(tmp_path: Path) -> None:
    spec = RunSpec.of(find("digits"), pt.strategies.downpour(), 2, RunOptions(out=tmp_path))
    now_s = [100.0]
    rows: list[dict[str, Any]] = []

    def said() -> LiveStatus:
        status = read_status(tmp_path)
        assert status is not None
        return status

    events = RunEvents()
    with LiveRun(tmp_path, ShownRun.of(spec), events, clock=lambda: now_s[0]) as live:
        assert (said().state, said().processes) == ("running", ())
        engine, note = live.watching(Engine()), live.noting(rows.append)
        first = engine.start(Role("worker", 0, 0))
        second = engine.start(Role("worker", 1, 1), host=1)
        note({"kind": "train", "step": 1, "worker": 0, "samples_per_s": 50.0, "idle_share": 0.1, "staleness": 2.0})
        note({"kind": "train", "step": 2, "worker": 0, "samples_per_s": 60.0, "idle_share": 0.1, "staleness": None})
        engine.poll()
        assert said().processes == (), "it is no second yet"
        now_s[0] = 101.0
        engine.poll()
        assert [(each.who, each.host, each.state) for each in said().processes] == [
            ("worker-0", "n0", "running"),
            ("worker-1", "n1", "running"),
        ]
        assert (said().samples_per_s, said().staleness) == (60.0, 2.0), "a row without a push says no staleness"
        first.stopped, second.exit_code = True, -9
        events.add("worker-1", "was killed", 1.0, "started again")
        engine.start(Role("worker", 1, 2, incarnation=2))
        now_s[0] = 102.5
        engine.poll()
        assert [(each.who, each.state) for each in said().processes] == [
            ("worker-0", "stopped"),
            ("worker-1.2", "running"),
        ]
    assert (said().state, said().num_events, said().written_s) == ("finished", 1, 102.5)
    assert [row["step"] for row in rows] == [1, 2]


def test_stages_of_a_pipeline_show_their_delay_as_staleness(tmp_path: Path) -> None:
    """Rank r is stage r mod K; a row without a stage leaves an earlier row's numbers."""
    spec = RunSpec.of(find("digits"), pt.strategies.ddg(stages=2), 4, RunOptions(out=tmp_path))
    with LiveRun(tmp_path, ShownRun.of(spec), RunEvents()) as live:
        engine, note = live.watching(Engine()), live.noting(lambda row: None)
        for rank in range(4):
            engine.start(Role("rank", rank, rank))
        assert [each.staleness for each in live.status("running").processes] == [None] * 4
        note({"kind": "train", "step": 1, "delays": [1.0, 0.0]})
        note({"kind": "train", "step": 2, "delays": [None, 0.0]})
        assert [each.staleness for each in live.status("running").processes] == [1.0, 0.0, 1.0, 0.0]
        assert live.status("running").staleness == 0.5
    stages = [{"delay": 0.9}, {"delay": 0.0}]
    result = {"strategy": "ddg(stages=2)", "world": "virtual", "workers": 4, "stages": stages}
    assert [each.staleness for each in status_of_result(result, []).processes] == [0.9, 0.0, 0.9, 0.0]


@pytest.mark.parametrize(
    ("error", "state", "why"),
    [
        (RuntimeError("no luck\nand more"), "failed", "no luck"),
        (KeyboardInterrupt(), "failed", "interrupted"),
        (Preempted(7), "preempted", "preempted after step 7"),
    ],
)
def test_how_a_run_ended(tmp_path: Path, error: BaseException, state: str, why: str) -> None:
    spec = RunSpec.of(find("digits"), pt.strategies.sync_sgd(), 2, RunOptions())
    with pytest.raises(type(error)), LiveRun(tmp_path, ShownRun.of(spec), RunEvents()):
        raise error
    status = read_status(tmp_path)
    assert status is not None
    assert (status.state, status.why) == (state, why)


def test_a_disk_that_is_full_ends_no_run(tmp_path: Path) -> None:
    spec = RunSpec.of(find("digits"), pt.strategies.sync_sgd(), 2, RunOptions())
    with LiveRun(tmp_path / "not there", ShownRun.of(spec), RunEvents()):
        pass


def test_a_simulation_is_shown_by_its_result(tmp_path: Path) -> None:
    pt.simulate(find("digits"), pt.strategies.async_sgd(), 3, steps=4, out=tmp_path)
    done = CliRunner().invoke(app, ["top", str(tmp_path), "--json"])
    plain = json.loads(done.stdout)
    assert (plain["state"], plain["workers"], plain["train"]["step"], plain["launcher_lives"]) == (
        "finished",
        3,
        4,
        None,
    )
    assert [each["who"] for each in plain["processes"]] == ["worker-0", "worker-1", "worker-2"]
    assert shown(status_in(tmp_path)).splitlines()[0].endswith(", 3 virtual workers")


def test_a_finished_run_of_ranks(tmp_path: Path) -> None:
    pt.run(find("digits"), pt.strategies.sync_sgd(), 2, steps=3, out=tmp_path)
    status = status_in(tmp_path)
    assert (status.state, status.steps, [(each.who, each.state) for each in status.processes]) == (
        "finished",
        3,
        [("rank-0", "ended"), ("rank-1", "ended")],
    )
    text = CliRunner().invoke(app, ["top", str(tmp_path)]).stdout
    assert text.startswith("digits, sync_sgd(route=native), 2 workers\nfinished, ")
