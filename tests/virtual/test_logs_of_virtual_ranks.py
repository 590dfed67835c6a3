"""`pt.log` in a simulation: a call of one virtual rank is never another one's, also behind an exchange or a wait."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import polytempo as pt
from polytempo.jobs import find
from polytempo.report.status.records import Logged
from polytempo.report.status.stream import stream

s = pt.strategies


@pytest.mark.parametrize(
    "strategy", [s.sync_sgd(), s.local_sgd(period=2), s.shared_memory(), s.async_sgd(), s.ssp()], ids=str
)
def test_logged_numbers_are_those_of_the_rank_that_writes(strategy: pt.Strategy, tmp_path: Path) -> None:
    """Rank 0 writes; with a parameter server each worker. All have three micro-batches in a step."""
    losses: dict[int, list[float]] = defaultdict(list)
    kept: list[nn.Module] = []  # so that no id comes again

    def loss(model: nn.Module, batch: Any) -> Tensor:
        found = nn.functional.cross_entropy(model(batch[0]), batch[1])
        if torch.is_grad_enabled():
            kept.append(model)
            losses[id(model)].append(found.item())
            pt.log(own=found)
        return found

    job = replace(find("digits"), loss=pt.of_batch(loss), correct=None)
    pt.simulate(job, strategy, 3, steps=3, accumulate=3, out=tmp_path)
    logged: dict[int | None, list[float]] = defaultdict(list)
    for record in stream(tmp_path):
        if isinstance(record, Logged):
            logged[record.worker].append(record.values["own"])
    assert set(logged) == ({None} if strategy.server is None else {0, 1, 2})
    for numbers in logged.values():
        assert len(numbers) == 9
        assert any(own[-9:] == numbers for own in losses.values()), "they are not of one rank"


def numbers_in(folder: Path) -> list[tuple[int, float]]:
    return [(record.step, record.values["own"]) for record in stream(folder) if isinstance(record, Logged)]


@pytest.mark.process
@pytest.mark.parametrize("strategy", [s.sync_sgd(), s.split({"0": "places"}, parts=2)], ids=["sync_sgd", "places"])
def test_both_worlds_log_the_same_numbers(strategy: pt.Strategy, tmp_path: Path) -> None:
    """Also where one pass after the other is computed for all workers, and where layers exchange in their midst."""

    def loss(output: Tensor, target: Tensor) -> Tensor:
        found = nn.functional.mse_loss(output, target)
        pt.log(own=found)
        return found

    pictures = torch.arange(24 * 16.0).view(24, 1, 4, 4) / 100
    samples = TensorDataset(pictures, pictures.mean((2, 3)))
    job = pt.Job(
        model=lambda: nn.Sequential(nn.Conv2d(1, 2, 3, padding=1), nn.Flatten(), nn.Linear(32, 1)),
        data=lambda folder: pt.Data(samples, samples),
        loss=loss,
        optimizer=lambda parameters, lr: torch.optim.SGD(parameters, lr=0.001),
        batch_size=4,
        name="pictures",
    )
    for name, train in (("virtual", pt.simulate), ("real", pt.run)):
        train(job, strategy, 2, steps=3, threads=1, out=tmp_path / name)
    (steps, virtual), (_, real) = (zip(*numbers_in(tmp_path / name), strict=True) for name in ("virtual", "real"))
    assert steps == (1, 2, 3)
    assert virtual == pytest.approx(real, rel=1e-5)


@pytest.mark.parametrize("after", [4, 5])
def test_a_resumed_job_logs_each_step_once(after: int, tmp_path: Path) -> None:
    """The run fails in the loss of a step, behind its log, with a checkpoint of step 3."""

    def loss(output: Tensor, target: Tensor) -> Tensor:
        found = nn.functional.cross_entropy(output, target)
        if torch.is_grad_enabled():
            pt.log(own=found)
        if (tmp_path / "metrics.jsonl").exists() and after in dict(numbers_in(tmp_path)) and not resumed:
            raise RuntimeError("no more")
        return found

    job, resumed = replace(find("digits"), loss=loss), []
    options: dict[str, Any] = {"steps": 6, "checkpoint_every": 3, "out": tmp_path}
    with pytest.raises(pt.errors.JobFailed, match="no more"):
        pt.Trainer(job, s.sync_sgd(), **options).fit()
    resumed.append(True)
    pt.Trainer(job, s.sync_sgd(), resume=True, **options).fit()
    assert [step for step, _ in numbers_in(tmp_path)] == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize("strategy", [s.gpipe(stages=2), s.ddg(stages=2)], ids=lambda strategy: strategy.schedule.name)
def test_a_stage_that_does_not_write_says_so(
    strategy: pt.Strategy, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The last stage has the loss, and rank 0, which writes, has the first."""

    def loss(output: Tensor, target: Tensor) -> Tensor:
        found = nn.functional.cross_entropy(output, target)
        pt.log(own=found)
        return found

    pt.simulate(replace(find("digits"), loss=loss), strategy, 2, steps=3, out=tmp_path)
    assert not [record for record in stream(tmp_path) if isinstance(record, Logged)]
    assert capsys.readouterr().err.count("note: pt.log on stage 1 is not written") == 1
