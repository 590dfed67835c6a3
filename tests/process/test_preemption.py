"""A run that is asked to leave by SIGTERM saves, exits with 75, and goes on to the bits of a run that was not."""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import polytempo as pt
from polytempo.core.system.notice import INTERRUPTED, PREEMPTED, Interrupted, Notice, Preempted, noticed
from polytempo.engines.processes.worker import Result
from polytempo.report.runs import load_result
from polytempo.report.status.live_status import read_status
from polytempo.runs.served.run_snapshot import read_run_snapshot
from polytempo.server.snapshots.snapshot import newest_whole
from polytempo.training.checkpoint.checkpoint_files import read_manifest
from polytempo.training.checkpoint.checkpoint_folders import latest
from polytempo.training.hooks.preemption import PreemptionWatch
from polytempo.worlds import ProcessWorld
from process.crew import squared, together
from process.test_resume import job
from process.test_served_resume import EPOCHS, SHARDS, TICKETS, WORKERS, counted, counting, strategy

pytestmark = pytest.mark.process

s = pt.strategies
STEPS = 1_000_000
"""More than there is time for."""


def sending(at: int, to: str, once: Path, number: int = signal.SIGTERM) -> pt.Job:
    """The job of `test_resume`; rank 1 sends a signal at its `at`-th batch, if no rank has done it before."""
    calls = 0

    def loss(output: Tensor, target: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        if calls == at and os.environ["POLYTEMPO_RANK"] == "1" and not once.exists():
            once.touch()
            os.kill(os.getppid() if to == "launcher" else os.getpid(), number)
        return squared(output, target[:, 1:])

    return replace(job(), loss=loss)


def run(of: pt.Job, how: pt.Strategy, out: object, **more: Any) -> int:
    """The exit status of a process that calls `pt.run`."""
    child = os.fork()
    if not child:
        try:
            pt.run(of, how, 2, steps=STEPS, out=out, threads=1, **more)
            os._exit(0)
        except SystemExit as error:
            os._exit(int(str(error.code)))
        finally:
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@pytest.mark.parametrize(("how", "to"), [(s.sync_sgd(), "rank"), (s.diloco(period=7), "launcher")], ids=str)
def test_a_run_that_is_asked_to_leave_goes_on_to_the_same_bits(how: pt.Strategy, to: str, tmp_path: Path) -> None:
    out = tmp_path / "run"
    assert run(sending(9, to, tmp_path / "sent"), how, out) == PREEMPTED
    newest = latest(out / "checkpoint")
    assert newest is not None
    assert "preempted after step" in (out / "logs" / "rank-0.log").read_text()
    steps = int(newest.name.removeprefix("step-")) + 10
    resumed = pt.run(job(), how, 2, steps=steps, out=out, resume=True, threads=1)
    assert resumed.parameters_sha256 == pt.run(job(), how, 2, steps=steps, threads=1).parameters_sha256
    assert resumed.steps == steps


@pytest.mark.parametrize(
    ("how", "more"), [(s.local_sgd(period=3), {}), (s.sync_sgd(), {"min_workers": 1})], ids=["ranks", "elastic"]
)
def test_ctrl_c_saves_leaves_a_page_and_says_how_to_go_on(
    how: pt.Strategy, more: dict[str, int], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    assert run(sending(9, "launcher", tmp_path / "sent", signal.SIGINT), how, out, **more) == INTERRUPTED
    newest = latest(out / "checkpoint")
    assert newest is not None
    step = read_manifest(newest).step
    assert f"--resume --out {out}" in capfd.readouterr().err
    result, status = load_result(out), read_status(out)
    assert status is not None
    assert (result["left"], result["steps"], status.state) == (f"interrupted after step {step}", step, "preempted")
    assert result["left"] in (out / "report.html").read_text()
    resumed = pt.run(job(), how, 2, steps=step + 10, out=out, resume=True, threads=1, **more)
    assert f"goes on from step {step}," in capfd.readouterr().err
    assert (resumed.left, resumed.steps) == (None, step + 10)
    if not more:
        assert resumed.parameters_sha256 == pt.run(job(), how, 2, steps=step + 10, threads=1).parameters_sha256


def interrupted_twice() -> None:
    with noticed(30.0) as notice:
        os.kill(os.getpid(), signal.SIGINT)
        assert notice.given_s is not None
        notice.given_s -= 2.0
        os.kill(os.getpid(), signal.SIGINT)


def interrupted_and_saved() -> None:
    with noticed(30.0):
        os.kill(os.getpid(), signal.SIGINT)
        raise Preempted(3)


def test_a_second_ctrl_c_ends_at_once() -> None:
    def work() -> None:
        with pytest.raises(KeyboardInterrupt) as ended:
            interrupted_twice()
        assert not isinstance(ended.value, Preempted)
        with pytest.raises(Interrupted):
            interrupted_and_saved()
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler

    assert child(work) == 0


def test_without_a_folder_sigterm_ends_a_run_as_before(tmp_path: Path) -> None:
    assert run(sending(3, "launcher", tmp_path / "sent"), s.sync_sgd(), None) == -signal.SIGTERM


def test_ranks_that_wait_for_none_leave_at_the_end_of_an_epoch(tmp_path: Path) -> None:
    assert run(sending(3, "rank", tmp_path / "sent"), s.hogwild(), tmp_path / "run") == PREEMPTED
    newest = latest(tmp_path / "run" / "checkpoint")
    assert newest is not None
    steps = int(newest.name.removeprefix("step-")) + 5
    assert pt.run(job(), s.hogwild(), 2, steps=steps, out=tmp_path / "run", resume=True, threads=1).steps == steps


# ---- agreement ----


def test_all_ranks_agree_on_one_step_whoever_was_asked_and_when() -> None:
    def work(world: ProcessWorld) -> Result:
        found = []
        for asked in (0, 1, 2):
            for at in (0, 1, 5):
                notice = Notice(30.0)
                watch, step = PreemptionWatch(world, notice), 0
                while not watch.agreed(step):
                    if world.rank == asked and step >= at:
                        notice.given_s = 0.0
                    step += 1
                    watch._due = min(watch._due, step + 3)  # as if steps took long
                found.append(step)
        return found

    first, *others = together(3, work)
    assert all(other == first for other in others)
    assert all(at < step <= at + 8 for step, at in zip(first, [0, 1, 5] * 3, strict=True))


def test_a_run_in_which_none_is_asked_counts_no_bytes_for_it(tmp_path: Path) -> None:
    with_folder, without = (pt.run(job(), s.local_sgd(period=4), 2, steps=30, out=out) for out in (tmp_path, None))
    assert with_folder.bytes_sent_per_rank == without.bytes_sent_per_rank


def test_an_own_loop_asks_its_handle() -> None:
    def work(world: ProcessWorld) -> Result:
        torch.manual_seed(0)
        model = torch.nn.Linear(3, 2)
        handle = pt.attach(model, torch.optim.SGD(model.parameters(), lr=0.1), s.sync_sgd(), world=world)
        for _ in range(100_000):
            handle.replica.optimizer.zero_grad()
            model(torch.ones(4, 3)).sum().backward()
            handle.replica.optimizer.step()
            if handle.preempted():
                break
            if handle.step == 3 and world.rank == 1:
                os.kill(os.getpid(), signal.SIGTERM)
        return handle.step

    first, second = together(2, work)
    assert 3 < first == second < 100_000


# ---- signals ----


def child(work: Any) -> int:
    """The exit status of a process that does `work`."""
    process = os.fork()
    if not process:
        try:
            work()
        except SystemExit as error:
            os._exit(int(str(error.code)))
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])


def test_the_first_signal_is_noted_and_a_later_one_ends() -> None:
    def work() -> None:
        with noticed(30.0) as notice:
            os.kill(os.getpid(), signal.SIGTERM)
            os.kill(os.getpid(), signal.SIGTERM)  # a batch system and torchrun pass on the same one
            assert notice.given
            assert not notice.expired
            assert notice.given_s is not None
            notice.given_s -= 2.0
            os.kill(os.getpid(), signal.SIGTERM)
        raise AssertionError

    assert child(work) == -signal.SIGTERM


def test_a_signal_that_the_environment_names_is_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POLYTEMPO_PREEMPT_SIGNAL", "SIGUSR1")
    with noticed(30.0) as notice:
        os.kill(os.getpid(), signal.SIGUSR1)
    assert notice.given
    assert signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL
    monkeypatch.setenv("POLYTEMPO_PREEMPT_SIGNAL", "USR1")
    with pytest.raises(ValueError, match="'USR1' names no signal"), noticed(30.0):
        pass


def test_a_handler_of_the_program_stays() -> None:
    before = signal.signal(signal.SIGTERM, lambda number, frame: None)
    try:
        with noticed(30.0) as notice:
            os.kill(os.getpid(), signal.SIGTERM)
        assert not notice.given
    finally:
        signal.signal(signal.SIGTERM, before)


def test_what_nothing_catches_exits_with_75() -> None:
    def work() -> None:
        raise Preempted(3, "runs/x")

    assert child(work) == PREEMPTED
    assert str(Preempted(3, "runs/x")) == "preempted after step 3, which is saved in runs/x: go on with resume"


# ---- with a parameter server ----


def terminating(at: int, to: str, once: Path, number: int = signal.SIGTERM) -> pt.Job:
    """The counting job; a worker sends a signal at its `at`-th batch, if none has done it before."""
    calls = 0

    def loss(output: Tensor, target: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        if calls == at:
            with suppress(FileExistsError):  # of two workers at their batch `at`, one alone makes the file
                once.touch(exist_ok=False)
                os.kill(os.getppid() if to == "launcher" else os.getpid(), number)
        return output.mean()

    return counting(loss)


@pytest.mark.parametrize(("sent", "code"), [(signal.SIGTERM, PREEMPTED), (signal.SIGINT, INTERRUPTED)])
def test_a_served_run_is_saved_and_goes_on_with_every_ticket_once(sent: int, code: int, tmp_path: Path) -> None:
    out, how = tmp_path / "run", strategy()
    job = terminating(15, "launcher", tmp_path / "sent", sent)
    status = child(lambda: pt.run(job, how, WORKERS, epochs=10_000, out=out, threads=1))
    assert status == code
    assert load_result(out)["left"]
    number = newest_whole(out / "checkpoint", SHARDS)
    assert number is not None
    saved = read_run_snapshot(out / "checkpoint", number)
    epochs = saved.step * WORKERS // TICKETS + 2
    result = pt.run(counting(), how, WORKERS, epochs=epochs, out=out, resume=True, threads=1)
    assert result.parameters_sha256 == counted(epochs)


def test_a_run_goes_on_without_a_worker_that_left(tmp_path: Path) -> None:
    job = terminating(5, "worker", tmp_path / "sent")
    result = pt.run(job, strategy(), WORKERS, epochs=EPOCHS, out=tmp_path / "run", threads=1)
    assert result.parameters_sha256 == counted(EPOCHS)
    assert result.server is not None
    [event] = result.server["events"]
    assert (event["how"], event["then"]) == ("left after SIGTERM", "its batches were dealt again")
    assert result.server["restarts"] == 0


def test_where_batches_are_dealt_evenly_another_takes_its_place(tmp_path: Path) -> None:
    job = terminating(5, "worker", tmp_path / "sent")
    result = pt.run(job, s.ssp(shards=SHARDS), WORKERS, epochs=EPOCHS, threads=1)
    assert result.server is not None
    assert result.server["restarts"] == 1
    assert result.samples == EPOCHS * TICKETS


def test_when_the_last_worker_leaves_the_run_is_saved(tmp_path: Path) -> None:
    out = tmp_path / "run"
    job = terminating(5, "worker", tmp_path / "sent")
    assert child(lambda: pt.run(job, strategy(), 1, epochs=EPOCHS, out=out, threads=1)) == PREEMPTED
    result = pt.run(counting(), strategy(), WORKERS, epochs=EPOCHS, out=out, resume=True, threads=1)
    assert result.parameters_sha256 == counted(EPOCHS)
