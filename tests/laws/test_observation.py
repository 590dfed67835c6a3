"""Law 1: watching a run does not change it. Scoring, saving and metrics cost no virtual time and change no bit.

Every strategy trains the same job unwatched, and then watched in several ways.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

import polytempo as pt
from laws.catalogue import ROWS, Row, label
from polytempo.report.status.records import Logged
from polytempo.report.status.stream import stream
from polytempo.runs.frame import run_page as shown
from polytempo.training.checkpoint.checkpoint_folders import latest
from polytempo.training.model import randomness
from silent_tracker import SilentTracker
from some_cases import some_of
from staged_job import points

WORKERS = 3
WATCHED_ROWS = ROWS
"""The rows of this law. Rows with a parameter server save in other ways: `test_served_observation` holds them to it."""


class Drawing(Dataset[Any]):
    """Samples with noise drawn when they are read, from each generator that a program has."""

    def __init__(self, held: TensorDataset) -> None:
        self._held = held

    def __len__(self) -> int:
        return len(self._held)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        x, y = self._held[index]
        return x + 0.01 * torch.randn(x.shape) + 0.01 * random.random() + 0.01 * np.random.random(), y


class Counting(nn.Module):
    """Scales by how often it was called, in training or not: a model that an evaluation would change."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))
        self.in_python = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.in_python += 1
        return x * (1 + 0.01 * self.calls + 0.01 * self.in_python)


TESTS: dict[str, Dataset[Any] | None] = {"none": None, "plain": points(16, 1), "drawing": Drawing(points(16, 1))}


def logged_loss(output: Tensor, target: Tensor) -> Tensor:
    """The loss of each rank, with its user's own number in the run's stream."""
    loss = nn.functional.mse_loss(output, target)
    pt.log({"own/loss": loss}, spread=output.detach().std())
    return loss


def job(test: Dataset[Any] | None, loss: Callable[[Tensor, Tensor], Tensor] = nn.functional.mse_loss) -> pt.Job:
    """Noise, dropout, batch-norm, and a model that counts: all that a look could disturb. The last step is uneven."""
    return pt.Job(
        model=lambda: nn.Sequential(
            nn.Linear(4, 6), Counting(), nn.BatchNorm1d(6), nn.Tanh(), nn.Dropout(0.2), nn.Linear(6, 2)
        ),
        data=lambda folder: pt.Data(Drawing(points(52, 0)), test),
        loss=loss,
        correct=lambda output, target: (output - target).abs().amax(1) < 0.5,
        optimizer=lambda parameters, lr: torch.optim.SGD(parameters, lr=lr),
        schedule=lambda optimizer, steps: torch.optim.lr_scheduler.StepLR(optimizer, step_size=2 * steps),
        batch_size=3,
        lr=0.05,
        epochs=2,
    )


class Way(NamedTuple):
    """A way of watching: the test data, the steps between checkpoints, a folder with a tracker, or none, and scores."""

    test: str
    checkpoint_every: int | None
    keeps: bool
    eval_every: int | str | None = None


class Seen(NamedTuple):
    """The results of a run. The trace's hash is over every operation of every rank, with its times."""

    parameters_sha256: str | None
    operations: str
    seconds: float
    steps: int
    samples: int
    train_loss: float | None


def trained(row: Row, test: str, **options: Any) -> Seen:
    """Train `WORKERS` virtual workers from the same state of all generators."""
    random.seed(0)
    np.random.seed(0)
    watched = job(TESTS[test], logged_loss) if "out" in options else job(TESTS[test])
    found = pt.simulate(watched, row.make(), WORKERS, threads=1, **options)
    return Seen(found.parameters_sha256, found.trace_hash, found.seconds, found.steps, found.samples, found.train_loss)


@pytest.fixture(scope="module", autouse=True)
def _imported() -> None:
    """Torch's imports in a process's first step draw from Python's generator, once."""
    trained(ROWS[0], "none")


WAYS = [
    Way(test, every, keeps)
    for test, every, keeps in product(TESTS, (None, 1, 3), (False, True))
    if keeps or every is None  # a checkpoint needs a folder
]
WAYS += [Way("drawing", 3, True, 1), Way("plain", None, False, "0.3 epochs")]
PAIRS = [Way("drawing", 1, True, "0.3 epochs"), Way("plain", 3, True, 2)]
"""Each setting once, with another one."""
IN_EVERY_WAY = {
    "sync_sgd(route=ring)": "all ranks have the score's model",
    "delayed_sgd(delay=3, route=ring)": "a checkpoint finds exchanges under way",
    "local_sgd(period=4, route=native)": "the score is of a mean",
    "hogwild(update='free')": "the score is of a copy that others write to",
}
"""One row for each way of making a score or a checkpoint; the others are watched in pairs of settings."""


@pytest.mark.parametrize("row", WATCHED_ROWS, ids=label)
def test_no_way_of_watching_changes_a_run(row: Row, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if label(row) != next(iter(IN_EVERY_WAY)):
        monkeypatch.setattr(shown, "write_report", lambda *_, **__: None)  # when all is over; half of a run's time
        monkeypatch.setattr(os, "fsync", lambda descriptor: None)  # which disks need, and no other look at a folder
    unwatched = trained(row, "none")
    for number, way in enumerate(WAYS if label(row) in IN_EVERY_WAY else some_of(PAIRS, WATCHED_ROWS.index(row))):
        out = tmp_path / str(number)
        tracker = SilentTracker()
        kept = {"out": out, "checkpoint_every": way.checkpoint_every, "trackers": [tracker]}
        scored = {} if way.eval_every is None else {"eval_every": way.eval_every}
        assert trained(row, way.test, **(kept if way.keeps else {}), **scored) == unwatched, str(way)
        assert (tracker.logs > 0, tracker.ended) == ((True, "finished") if way.keeps else (False, "")), str(way)
        if way.checkpoint_every is not None:
            assert latest(out / "checkpoint") is not None
            assert {record.worker for record in stream(out) if isinstance(record, Logged)} == {None}


def test_each_kind_of_observer_is_watched_in_every_way() -> None:
    assert set(IN_EVERY_WAY) <= {label(row) for row in WATCHED_ROWS}


@pytest.mark.parametrize(
    "block",
    [torch.no_grad, torch.inference_mode, partial(torch.autocast, "cpu"), partial(torch.device, "meta")],
    ids=["no_grad", "inference", "autocast", "meta"],
)
def test_a_simulation_and_the_program_around_it_do_not_change_each_other(block: Callable[[], Any]) -> None:
    def states() -> tuple[Any, ...]:
        return random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()

    usual = trained(ROWS[0], "drawing")
    torch.manual_seed(5)
    with block():
        assert trained(ROWS[0], "drawing") == usual
    found = states()
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(5)
    assert found == states()


def test_simulations_in_several_threads_take_turns() -> None:
    def loss(output: Tensor, target: Tensor) -> Tensor:
        free.append(threads.submit(randomness._turn.acquire, blocking=False).result())
        return nn.functional.mse_loss(output, target)

    free = list[bool]()
    with ThreadPoolExecutor(1) as threads:
        pt.simulate(job(None, loss), "sync_sgd", 2, steps=1)
        assert set(free) == {False}
        assert threads.submit(randomness._turn.acquire, blocking=False).result()
        threads.submit(randomness._turn.release).result()
