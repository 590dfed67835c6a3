"""A worker that is killed, wherever it is, ends the run within five seconds; its last checkpoint goes on."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD
from torch.utils.data import Dataset, TensorDataset

import polytempo as pt
from polytempo.collectives import ring
from polytempo.core import Port, Strategy
from polytempo.engines.join import init as joining
from polytempo.engines.local_engine import launch
from polytempo.engines.processes.failures import WorkerDied
from polytempo.engines.processes.worker import RankInfo, Result
from polytempo.training.checkpoint import checkpoint_files as checkpoint
from polytempo.training.checkpoint.checkpoint_folders import latest
from polytempo.training.observe import checkpoint_writer
from process.crew import squared
from shared_memory import segments

pytestmark = [pytest.mark.process, pytest.mark.usefixtures("private")]

WORKERS = 2
STEPS = 8
EVERY = 3
"""Steps between checkpoints. An epoch has 4 steps, and ends with one too: checkpoints are at 3, 4, 6 and 8."""
DEADLINE_S = 60.0
"""A survivor that nothing tells of a death waits so long."""


class Point:
    """The place of a run's death. Outside the victim, and before the given step, it does nothing."""

    def __init__(self, note: Path, victim: int, step: int = 0) -> None:
        self.note, self.victim, self.step = note, victim, step
        self.reached = 0
        self.armed = False

    def __call__(self, *_: Any) -> None:
        """Die here, if this is the victim's step."""
        self.reached += 1
        if self.armed and self.reached > self.step:
            self.note.write_text(str(time.monotonic()))
            os.kill(os.getpid(), signal.SIGKILL)

    def before(self, module: Any, name: str) -> None:
        """Die when `module.name` is called."""
        original = getattr(module, name)

        def dying(*given: Any, **more: Any) -> Any:
            self()
            return original(*given, **more)

        setattr(module, name, dying)

    def after(self, module: Any, name: str) -> None:
        """Die when `module.name` has returned."""
        original = getattr(module, name)

        def dying(*given: Any, **more: Any) -> Any:
            answer = original(*given, **more)
            self()
            return answer

        setattr(module, name, dying)


class Watched(Dataset[Any]):
    """Thirty-two samples; `point` is passed when one is read."""

    def __init__(self, point: Callable[[], None]) -> None:
        random = torch.Generator().manual_seed(0)
        self.samples = TensorDataset(torch.randn(32, 4, generator=random), torch.randn(32, 3, generator=random))
        self.point = point

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Any:
        self.point()
        return self.samples[index]


class Plan:
    """A job with parts that pass a point, if `place` is theirs."""

    def __init__(self, place: str, point: Point) -> None:
        self.place, self.point = place, point

    def pass_by(self, place: str) -> None:
        if place == self.place:
            self.point()

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        self.pass_by("forward" if output.requires_grad else "evaluation")
        if output.requires_grad and self.place == "backward":
            output.register_hook(self.point)
        return squared(output, target)

    def optimizer(self, parameters: Any, lr: float) -> torch.optim.Optimizer:
        optimizer = SGD(parameters, lr=lr, momentum=0.9)
        if self.place == "optimizer step":
            optimizer.register_step_pre_hook(self.point)
        return optimizer

    def strategy(self) -> Strategy:
        async def dying_ring(port: Port, buffer: Tensor) -> Tensor:
            """The first message is on its way when the point is passed."""
            if self.place == "exchange":
                aside = port.on_channel(5)
                sending = await port.start(aside.send(buffer, 1 - port.rank))
                self.point()
                await aside.recv(buffer, 1 - port.rank)
                await sending
            return await ring(port, buffer)

        return pt.strategies.sync_sgd(dying_ring)

    def job(self) -> pt.Job:
        train = Watched(lambda: self.pass_by("reading"))
        return pt.Job(
            model=lambda: nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)),
            data=lambda folder: pt.Data(train, train.samples),
            loss=self.loss,
            optimizer=self.optimizer,
            batch_size=4,
        )

    def arm(self) -> None:
        """The victim calls it: die inside the library, where the job cannot reach."""
        self.point.armed = True
        if self.place == "rendezvous":
            self.point.before(joining, "PrefixStore")
        if self.place == "met":
            self.point.before(joining, "hosts_of_ranks")
        if self.place == "writing":
            self.point.before(checkpoint, "_sync")
        if self.place == "committing":
            self.point.before(checkpoint, "move_into_place")
        if self.place == "committed":
            self.point.after(checkpoint_writer, "commit")


PLACES = {
    "before init": (1, 0, None),
    "rendezvous": (0, 0, None),
    "met": (1, 0, None),
    "reading": (1, 10, None),
    "forward": (0, 0, None),
    "backward": (1, 3, 3),
    "exchange": (1, 4, 4),
    "optimizer step": (0, 5, 4),
    "evaluation": (1, 0, 3),
    "writing": (1, 0, None),
    "committing": (0, 1, 3),
    "committed": (0, 2, 6),
    "at the end": (0, 0, 8),
}
"""The victim, the number of earlier passes of the place, and the step of the checkpoint that must be there then."""


def run(plan: Plan, out: Path, **options: Any) -> list[Any]:
    """Train to the end, or to the point of the plan."""

    def work(rank_info: RankInfo) -> Result:
        (out / f"process-{os.getpid()}").touch()
        if rank_info.rank == plan.point.victim:
            plan.arm()
        plan.pass_by("before init")
        world = joining.init(timeout_s=DEADLINE_S, quiet=True)
        trainer = pt.Trainer(
            plan.job(), plan.strategy(), world=world, out=out, steps=STEPS, checkpoint_every=EVERY, **options
        )
        result = trainer.fit()
        plan.pass_by("at the end")
        return [result.parameters_sha256, result.steps]

    return launch(work, WORKERS, threads=1, timeout_s=DEADLINE_S)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """The result of an undisturbed run."""
    folder = tmp_path_factory.mktemp("undisturbed")
    return run(Plan("nowhere", Point(folder / "note", victim=-1)), folder)


def is_running(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.parametrize("place", PLACES)
def test_a_killed_worker_ends_the_run_which_can_be_resumed(
    place: str, tmp_path: Path, private: Path, undisturbed: list[Any]
) -> None:
    victim, passed_before, saved_step = PLACES[place]
    note, before = tmp_path / "killed-at", segments()
    with pytest.raises(WorkerDied) as died:
        run(Plan(place, Point(note, victim, passed_before)), tmp_path)
    assert time.monotonic() - float(note.read_text()) < DEADLINE_S / 2
    assert (died.value.rank, died.value.signal) == (victim, "SIGKILL")
    assert f"rank {victim} of {WORKERS} was killed by SIGKILL; the run has ended" in str(died.value)
    processes = [int(path.name.partition("-")[2]) for path in tmp_path.glob("process-*")]
    assert len(processes) == WORKERS
    assert not any(is_running(process) for process in processes)
    assert list(private.iterdir()) == []
    assert segments() == before

    newest = latest(tmp_path / "checkpoint")
    assert (newest and newest.name) == (saved_step and f"step-{saved_step:08d}")
    again = Plan("nowhere", Point(note, victim=-1))
    assert run(again, tmp_path, resume=newest is not None) == undisturbed
