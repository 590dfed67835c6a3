"""Watching a run with a parameter server does not change it: scores, folders and metrics add no op and no time."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

import polytempo as pt
from laws.catalogue import HELPED, SERVED, Row, label
from polytempo.cluster import Cluster, Link, lognormal
from polytempo.report.status.records import Logged
from polytempo.report.status.stream import stream
from polytempo.runs.frame import run_page as shown
from polytempo.runs.simulated.simulate import simulate
from polytempo.spec.job import Data, Job
from polytempo.spec.result import Result
from polytempo.spec.run_options import RunOptions
from silent_tracker import SilentTracker

WORKERS, STEPS, FEATURES = 3, 14, 3
CLUSTER = Cluster(Link(1e-5, 1e9), flops_per_s=1e7, stragglers=lognormal(0.5))


class Drawn(Dataset[tuple[Tensor, Tensor]]):
    """A test set that draws from the generator that training draws from."""

    def __len__(self) -> int:
        return 5

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return torch.randn(FEATURES), torch.zeros(1)


TESTS: dict[str, Dataset[tuple[Tensor, Tensor]]] = {
    "a test set": TensorDataset(torch.randn(10, FEATURES), torch.zeros(10, 1)),
    "a test set that draws": Drawn(),
}


def plain_loss(output: Tensor, target: Tensor) -> Tensor:
    return ((output - target) ** 2).mean()


def logged_loss(output: Tensor, target: Tensor) -> Tensor:
    """The loss, with the user's own number in the run's stream."""
    loss = plain_loss(output, target)
    pt.log(own=loss)
    return loss


def job(test: Dataset[tuple[Tensor, Tensor]] | None, *, whole: bool, logs: bool = False) -> Job:
    """Dropout draws in every step. `whole`: nothing in the model looks at a batch as a whole, so it may be cut."""
    inputs = torch.randn(36, FEATURES, generator=torch.Generator().manual_seed(1))
    norm = nn.Identity if whole else lambda: nn.BatchNorm1d(4)
    return Job(
        model=lambda: nn.Sequential(nn.Linear(FEATURES, 4), norm(), nn.Dropout(0.2), nn.Linear(4, 1)),
        data=lambda folder: Data(TensorDataset(inputs, inputs.sum(1, keepdim=True)), test),
        loss=logged_loss if logs else plain_loss,
        optimizer=lambda parameters, lr: torch.optim.SGD(parameters, lr=0.02, momentum=0.5),
        batch_size=3,
    )


def run(row: Row, test: Dataset[tuple[Tensor, Tensor]] | None, **more: object) -> Result:
    options = RunOptions(steps=STEPS, **more)  # type: ignore[arg-type]
    return simulate(job(test, whole=row in HELPED, logs="out" in more), row.make(), WORKERS, CLUSTER, options)


@pytest.mark.parametrize("row", [*SERVED, *HELPED], ids=label)
def test_watching_a_run_does_not_change_it(row: Row, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The trace's hash is over every op of every rank, and its times."""
    if row is not SERVED[0]:
        monkeypatch.setattr(shown, "write_report", lambda *_, **__: None)  # when all is over; half of a run's time
    unwatched, tracker = run(row, None), SilentTracker()
    watched = {
        "a test set, a folder and a tracker": run(row, TESTS["a test set"], out=tmp_path / "run", trackers=[tracker]),
        "a test set that draws": run(row, TESTS["a test set that draws"]),
        "many scores": run(row, TESTS["a test set that draws"], eval_every=1),
    }
    assert tracker.logs
    assert tracker.ended == "finished"
    for how, result in watched.items():
        assert result.parameters_sha256 == unwatched.parameters_sha256, how
        assert result.trace_hash == unwatched.trace_hash, how
        assert result.seconds == unwatched.seconds, how
        assert result.loss is not None, how
        assert result.loss != result.train_loss, "it was scored"
    workers = {record.worker for record in stream(tmp_path / "run") if isinstance(record, Logged)}
    assert workers == set(range(WORKERS))


@pytest.mark.parametrize("row", SERVED, ids=label)
def test_what_was_asked_for_ends_a_run_when_a_score_says_so(row: Row) -> None:
    """And not at the end of an epoch: a score may come at any time."""
    easy = run(row, TESTS["a test set"], until={"loss": 1e9})
    assert easy.reached
    assert easy.steps < STEPS
