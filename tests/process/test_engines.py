"""Every engine's treatment of its processes; the second engine shows that a run needs no fork."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

import polytempo as pt
from polytempo.engines.engine import Engine, EngineProcess, EngineSetup, Launch, Result, Role
from polytempo.engines.join.rendezvous import Rendezvous
from polytempo.engines.local_engine import Local
from polytempo.engines.subprocess_engine import Subprocess
from polytempo.runs.served import run_served
from polytempo.runs.served.run_served import Launcher
from polytempo.server.message import Ask, Message, Outbox
from polytempo.spec.run_options import RunOptions
from polytempo.spec.run_spec import RunSpec
from polytempo.wire.keys import make_keys

pytestmark = [pytest.mark.process, pytest.mark.usefixtures("none_left")]

DIGITS = pt.jobs.find("digits")
LONG_S = 60.0
NEVER = """
import threading
from polytempo.jobs.digits import job as digits
from dataclasses import replace

def read(given):
    threading.Event().wait()

job = replace(digits, name="never", data=read)
"""
FAILS = """
from dataclasses import replace
from polytempo.jobs.digits import job as digits

def read(given):
    raise OSError("no such data")

job = replace(digits, name="fails", data=read)
"""
NOT_FINITE = """
from dataclasses import replace
from torch.nn import functional
from polytempo.jobs.digits import job as digits

calls = []

def loss(output, target):
    calls.append(1)
    return functional.cross_entropy(output, target) * (float("nan") if len(calls) > 3 else 1.0)

job = replace(digits, name="diverges", loss=loss, correct=None)
"""


def job_in(folder: Path, text: str) -> pt.Job:
    (folder / "own.py").write_text(text)
    return pt.jobs.find(f"{folder}/own.py:job")


@contextmanager
def opened(setup: EngineSetup, job: pt.Job, *, ranks: int = 1, logs: Path | None = None) -> Iterator[Engine]:
    """An engine for ranks that train `job`."""
    spec = RunSpec.of(job, pt.strategies.sync_sgd(), ranks, RunOptions(steps=2))
    meeting = None if isinstance(setup, Local) else Rendezvous.held("127.0.0.1")

    def work(role: Role) -> Result:
        job.data(None)
        return role.node

    def setting() -> dict[str, str]:
        assert meeting is not None
        return {"rendezvous": meeting.url}

    with setup.open(Launch(work, spec, setting, ranks, ranks, 1, logs)) as engine:
        yield engine
    if meeting is not None:
        meeting.close()


def awaited(engine: Engine) -> EngineProcess:
    """The next process that ends."""
    for _ in range(100):
        if gone := engine.poll(LONG_S):
            return gone[0]
    raise AssertionError("no process has ended")


every_engine = pytest.mark.parametrize("setup", [Local(), Subprocess()], ids=["local", "subprocess"])


# --- the four calls


@every_engine
def test_a_process_leaves_its_result_and_its_log(setup: EngineSetup, tmp_path: Path) -> None:
    with opened(setup, DIGITS, logs=tmp_path / "logs") as engine:
        started = engine.start(Role("rank", 0, 0))
        assert started.exit_code is None
        ended = awaited(engine)
        assert ended is started
        assert engine.poll() == []
    assert (ended.exit_code, ended.failure, ended.failed) == (0, None, False), ended.log.read_text()
    assert ended.result is not None
    assert ended.log == tmp_path / "logs" / "rank-0.log"
    assert ended.log.exists()


@every_engine
def test_one_that_fails_says_why(setup: EngineSetup, tmp_path: Path) -> None:
    with opened(setup, job_in(tmp_path, FAILS), logs=tmp_path / "logs") as engine:
        engine.start(Role("rank", 0, 0))
        ended = awaited(engine)
    assert ended.exit_code == 1
    assert ended.failed
    assert ended.result is None
    assert ended.failure is not None, ended.log.read_text()
    assert "no such data" in ended.failure.message
    assert "no such data" in ended.log.read_text()


@every_engine
def test_one_is_stopped_alone_and_then_all(setup: EngineSetup, tmp_path: Path) -> None:
    with opened(setup, job_in(tmp_path, NEVER), ranks=2) as engine:
        first, second = (engine.start(Role("rank", rank, rank)) for rank in range(2))
        engine.stop(first)
        assert awaited(engine) is first
        assert first.exit_code == -signal.SIGKILL
        assert second.exit_code is None
        engine.stop()
        assert engine.poll() == [second]
        assert second.failed


# --- runs by an engine with JSON alone as transport


def threads() -> set[int]:
    """All threads of this process, those too that have not named themselves yet."""
    return {int(task.name) for task in Path("/proc/self/task").iterdir()}


def own_threads() -> dict[int, str]:
    """This process's threads of Python, ZeroMQ, gloo and stores: one left would be in the way of later forks. torch's
    pools come and go with its number of threads."""
    found = {thread.native_id or 0: thread.name for thread in threading.enumerate()}
    for task in threads():
        with suppress(OSError):  # it has ended
            name = Path(f"/proc/self/task/{task}/comm").read_text().strip()
            if name.startswith(("ZMQ", "gloo", "pt_")):
                found[task] = name
    return found


def threads_left(before: set[int]) -> list[str]:
    """The threads that were not there before. The kernel lists a thread that has ended a moment longer."""
    until_s = time.monotonic() + LONG_S
    while (left := own_threads().keys() - before) and time.monotonic() < until_s:
        os.sched_yield()
    return [own_threads().get(each, "it has ended now") for each in left]


def test_a_collective_run_has_the_bits_of_the_forked_one() -> None:
    before = threads()
    by_fork, by_name = (
        pt.run(DIGITS, pt.strategies.local_sgd(period=4), workers=2, steps=12, threads=1, engine=engine)
        for engine in (pt.engines.local(), pt.engines.subprocess())
    )
    assert by_name.parameters_sha256 == by_fork.parameters_sha256
    assert by_name.trace_hash == by_fork.trace_hash
    assert (by_name.loss, by_name.workers, by_name.steps) == (by_fork.loss, 2, 12)
    assert threads_left(before) == []


def test_a_served_run_has_the_bits_of_the_forked_one_and_leaves_as_much(tmp_path: Path) -> None:
    """One worker gives one order; messages to the server go over encrypted TCP."""
    before = threads()
    by_fork, by_name = (
        pt.run(DIGITS, pt.strategies.async_sgd(), workers=1, epochs=1, threads=1, out=out, engine=engine)
        for engine, out in [(pt.engines.local(), tmp_path / "fork"), (pt.engines.subprocess(), tmp_path / "name")]
    )
    assert by_name.parameters_sha256 == by_fork.parameters_sha256
    assert by_name.loss == by_fork.loss
    files = [{str(path.relative_to(out)) for path in out.rglob("*")} for out in tmp_path.iterdir()]
    assert files[0] == files[1]
    again = pt.run(
        *(DIGITS, pt.strategies.async_sgd(), 1),
        epochs=2,
        threads=1,
        out=tmp_path / "name",
        resume=True,
        engine=pt.engines.subprocess(),
    )
    assert again.epochs == 2
    assert threads_left(before) == []


class Killing(Launcher):
    """Kills worker 1 when it calls for work for the third time."""

    calls = 0

    def receive(self, now_s: float, source: int, message: Message) -> Outbox:
        """Receive messages as the launcher."""
        if isinstance(message, Ask) and message.worker == 1:
            self.calls += 1
            if self.calls == 3:
                self._supervisor.kill(1)
        return super().receive(now_s, source, message)


def test_a_worker_that_is_killed_is_started_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_served, "Launcher", Killing)
    result = pt.run(DIGITS, pt.strategies.async_sgd(), workers=2, epochs=2, threads=1, engine=pt.engines.subprocess())
    assert result.server is not None
    assert result.server["events"][0]["who"] == "worker-1"
    assert result.samples == 2 * 1437


def test_a_loss_that_is_not_finite_is_the_same_error(tmp_path: Path) -> None:
    with pytest.raises(pt.errors.NotFinite, match="step 3") as raised:
        pt.run(job_in(tmp_path, NOT_FINITE), pt.strategies.sync_sgd(), 2, steps=8, engine=pt.engines.subprocess())
    assert isinstance(raised.value.__cause__, pt.errors.WorkerDied)


def test_a_job_without_a_name_is_refused_before_anything_is_started(tmp_path: Path) -> None:
    made = pt.Job(model=DIGITS.model, data=DIGITS.data, loss=DIGITS.loss, optimizer=DIGITS.optimizer, name="mine")
    for strategy in (pt.strategies.sync_sgd(), pt.strategies.async_sgd()):
        with pytest.raises(ValueError, match="job mine is made of functions that this process alone has"):
            pt.run(made, strategy, workers=2, steps=1, out=tmp_path / "run", engine=pt.engines.subprocess())
        assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("engine", ["rays", "local:n1", Subprocess])
def test_what_is_no_engine_is_refused(engine: Any) -> None:
    message = "an engine is an object|is not known; there are: |has no address"
    with pytest.raises(ValueError, match=message):
        pt.run(DIGITS, pt.strategies.sync_sgd(), 2, engine=engine)
    with pytest.raises(ValueError, match=message):
        pt.compare(DIGITS, [pt.strategies.sync_sgd()], 2, engine=engine)


def test_a_function_has_no_name_either() -> None:
    launch = Launch(lambda role: None, None, dict, 1, 1)
    with pytest.raises(ValueError, match=r"a function cannot travel"), Subprocess().open(launch):
        pass


def test_keys_are_neither_in_arguments_nor_in_the_environment(tmp_path: Path) -> None:
    """The interpreter is a script that writes down its arguments."""
    seen, keys = tmp_path / "seen", make_keys().to_plain()
    script = tmp_path / "python"
    script.write_text(f'#!/bin/sh\n(echo "$@"; env) > {seen}\ncat > {seen}.stdin\n')
    script.chmod(0o700)
    spec = RunSpec.of(DIGITS, pt.strategies.async_sgd(), 1, RunOptions())
    launch = Launch(lambda role: None, spec, lambda: {"rendezvous": "", "keys": keys}, 1, 1, 1)
    with Subprocess(python=str(script)).open(launch) as engine:
        engine.start(Role("worker", 0, 0))
        assert awaited(engine).failed
    told, given = seen.read_text(), Path(f"{seen}.stdin").read_text()
    assert all(secret in given for secret in keys.values())
    assert not any(secret in told for secret in keys.values())
    assert told.startswith("-P -m polytempo.worker\n")
