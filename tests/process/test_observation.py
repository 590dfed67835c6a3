"""Law 1 on real processes: watching changes no bit of a synchronous run, and holds up no asynchronous one."""

from __future__ import annotations

import errno
import os
import random
import threading
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

import polytempo as pt
from laws.test_observation import TESTS, job
from polytempo.core import Strategy
from polytempo.engines.processes.worker import Result
from polytempo.report.runs import load_run
from polytempo.report.status.rows import read_metrics
from polytempo.training.checkpoint import checkpoint_files as checkpoint
from polytempo.training.checkpoint.checkpoint_folders import latest
from polytempo.worlds import ProcessWorld
from process.crew import together

pytestmark = pytest.mark.process

s = pt.strategies
IN_STEP = [
    s.sync_sgd(),
    s.shared_memory(),
    s.delayed_sgd(delay=3),
    s.local_sgd(period=4),
    s.gossip(),
    s.top_k_sgd(0.2, exact_below=0),
]
WAYS: list[dict[str, Any]] = [
    {"test": "none"},
    {"test": "plain", "out": "a"},
    {"test": "drawing", "out": "b", "checkpoint_every": 1, "trackers": "tensorboard"},
    {"test": "none", "out": "c", "checkpoint_every": 3},
    {"test": "drawing"},
]
DEADLINE_S = 60.0


@pytest.mark.parametrize("strategy", IN_STEP, ids=str)
def test_no_way_of_watching_changes_a_synchronous_run(strategy: Strategy, tmp_path: Path) -> None:
    def watched(world: ProcessWorld) -> Result:
        found = []
        for way in [WAYS[0], *WAYS]:  # torch's imports in its first step draw from Python's generator
            options = {name: value for name, value in way.items() if name != "test"}
            if "out" in options:
                options["out"] = tmp_path / options["out"]
            random.seed(world.rank)
            np.random.seed(world.rank)
            result = pt.Trainer(job(TESTS[way["test"]]), strategy, world=world, **options).fit()
            found.append([result.parameters_sha256, result.steps, result.train_loss, result.bytes_sent_per_rank])
        return found[1:]

    for rank, runs in enumerate(together(2, watched)):
        for way, run in zip(WAYS, runs, strict=True):
            assert run == runs[0], f"rank {rank}: {way}"


# ------------------------------------------------------------------------------------------------------- Hogwild!


class Held(Dataset[Any]):
    """Test data that cannot be read before `free` is set: whoever waits for a score waits for ever."""

    def __init__(self, held: TensorDataset, free: threading.Event) -> None:
        self._held, self._free = held, free

    def __len__(self) -> int:
        return len(self._held)

    def __getitem__(self, index: int) -> Any:
        if not self._free.wait(DEADLINE_S):
            raise TimeoutError("training waits for a score")
        return self._held[index]


def line(num_samples: int) -> TensorDataset:
    x = torch.linspace(-1, 1, num_samples).unsqueeze(1)
    return TensorDataset(x, 2 * x)


def lines(free: threading.Event | None = None, last: int = 0, epochs: int = 4) -> pt.Job:
    """Five steps an epoch on two ranks. `free` is set by the loss of this rank's step number `last`."""
    steps: list[None] = []

    def loss(output: Tensor, target: Tensor) -> Tensor:
        if torch.is_grad_enabled() and free is not None:
            steps.append(None)
            if len(steps) == last:
                free.set()
        return nn.functional.mse_loss(output, target)

    test = line(16)
    return pt.Job(
        model=lambda: nn.Linear(1, 1),
        data=lambda folder: pt.Data(line(40), test if free is None else Held(test, free)),
        loss=loss,
        optimizer=lambda parameters, lr: torch.optim.SGD(parameters, lr=lr),
        lr=0.1,
        batch_size=4,
        epochs=epochs,
    )


@pytest.mark.parametrize("update", ["free", "atomic", "locked", "in_turn"])
def test_hogwild_does_not_wait_for_a_score(update: Any, tmp_path: Path) -> None:
    """The first score ends after training: all rows are there, late scores too, and the report draws them."""

    def trained(world: ProcessWorld) -> Result:
        result = pt.Trainer(lines(threading.Event(), last=20), s.hogwild(update), world=world, out=tmp_path).fit()
        return [result.steps, result.samples, result.loss]

    first, second = together(2, trained)
    assert first == second
    assert first[:2] == [20, 160]
    rows = read_metrics(tmp_path)
    tests = [row for row in rows if row["kind"] == "test"]
    assert [row["step"] for row in tests] == [5, 10, 15, 20]
    assert tests[-1]["loss"] == first[2]
    assert rows.index(tests[0]) > max(rows.index(row) for row in rows if row["kind"] == "train")
    assert all(a["seconds"] <= b["seconds"] for a, b in pairwise(tests))
    assert load_run(tmp_path).rows("test") == tests


def test_scores_for_which_there_is_no_room_are_left_out() -> None:
    rows: list[dict[str, Any]] = []

    def trained(world: ProcessWorld) -> Result:
        job = lines(threading.Event(), last=40, epochs=8)
        pt.Trainer(job, s.hogwild(), world=world).fit(on_row=lambda row: rows.append(row))
        return [row["step"] for row in rows if row["kind"] == "test"]

    assert together(2, trained)[0] == [5, 10, 15, 40]


def test_hogwild_ends_all_ranks_at_one_step() -> None:
    def trained(world: ProcessWorld) -> Result:
        result = pt.Trainer(lines(epochs=200), s.hogwild(), world=world, until={"loss": 1e-3}).fit()
        return [result.steps, result.reached, result.loss]

    first, second = together(2, trained)
    assert first == second
    steps, reached, loss = first
    assert reached
    assert steps % 5 == 0
    assert steps < 1000
    assert loss <= 1e-3


@pytest.mark.parametrize("update", ["free", "in_turn"])
def test_hogwild_saves_beside_training_and_resumes(update: Any, tmp_path: Path) -> None:
    def trained(steps: int, resume: bool) -> Any:
        def work(world: ProcessWorld) -> Result:
            options: dict[str, Any] = {"steps": steps, "out": tmp_path, "checkpoint_every": 3, "resume": resume}
            return pt.Trainer(lines(), s.hogwild(update), world=world, **options).fit().as_json()

        return together(2, work)[0]

    assert trained(13, False)["steps"] == 13
    newest = latest(tmp_path / "checkpoint")
    assert newest is not None
    assert newest.name == "step-00000013"
    assert sorted(path.name for path in newest.iterdir()) == [
        "manifest.json",
        "rank-0.safetensors",
        "rank-1.safetensors",
    ]
    assert trained(20, True)["samples"] == 160


def test_a_checkpoint_that_cannot_be_written_ends_a_hogwild_run(tmp_path: Path) -> None:
    def full(*_: object, **more: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def trained(world: ProcessWorld) -> Result:
        checkpoint.save_file = full  # this process is the worker's own
        pt.Trainer(lines(), s.hogwild(), world=world, out=tmp_path).fit()
        return None

    with pytest.raises(pt.errors.WorkerDied, match=r"cannot write .*No space left.*PT3001"):
        together(2, trained)


@pytest.mark.parametrize("strategy", ["sync_sgd", "ssp"])
def test_a_run_leaves_the_launchers_generators_alone(strategy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The imports of torch's compiler draw from Python's; a parameter server's weights are made by torch's."""
    monkeypatch.setattr("polytempo.runs.run.import_module", lambda name: random.random())
    before = random.getstate(), torch.get_rng_state().tolist()
    pt.run("digits", strategy, workers=2, steps=1, threads=1)
    assert (random.getstate(), torch.get_rng_state().tolist()) == before
