"""Jobs on a device: every strategy, and pairs of features, end with the bits that the CPU's run or simulation has."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import polytempo as pt
from device.crew import telling
from laws.catalogue import GROUPED, HELPED, PARTED, ROWS, SERVED, STAGED, Row, runs_alone
from laws.combination_runs import STEPS, job_of, options_of, strategy_of, workers_of
from laws.combinations import OWN, Combination, covering, refusal
from laws.combinations import SERVED as SERVED_FAMILIES
from polytempo.core import PolytempoError
from polytempo.engines.local_engine import launch
from polytempo.runs.frame import run_page
from polytempo.spec.result import Result
from some_cases import some_of

pytestmark = pytest.mark.process

BROKEN_OFF_AT = 4
COVERING = telling([row for row in covering() if row.loop not in OWN and row.world == "processes"])
ONE_COPY = "PT1901"
"""The refusal of one copy of the weights, which is in the memory of the host."""


@pytest.fixture(autouse=True)
def _without_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_page, "write_report", lambda *_, **__: None)


def facts(result: Result) -> list[Any]:
    return [result.steps, result.loss, result.parameters_sha256]


def check(device: str, found: list[Any], expected: list[Any]) -> None:
    """The pretend device computes as the CPU does; a real one only nearly so."""
    if device == "pretend":
        assert found == expected
    else:
        assert found[:2] == pytest.approx(expected[:2], rel=0.05)


# ------------------------------------------------------------------ every strategy


def layers() -> nn.Module:
    """Six layers, which three stages can share."""
    hidden = [layer for _ in range(2) for layer in (nn.Linear(8, 8), nn.Tanh())]
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), *hidden, nn.Dropout(0.1), nn.Linear(8, 2))


def points(num_samples: int) -> TensorDataset:
    x = torch.randn(num_samples, 4, generator=torch.Generator().manual_seed(num_samples))
    return TensorDataset(x, torch.stack([x.sum(1).sin(), x[:, 0] * x[:, 1]], 1))


JOB = pt.Job(
    model=layers,
    data=lambda folder: pt.Data(points(48), points(16)),
    loss=nn.functional.mse_loss,
    optimizer=lambda parameters, lr: torch.optim.SGD(parameters, lr=lr),
    lr=0.05,
    batch_size=12,
)


def first_of_each_name(*lists: list[Row]) -> list[Row]:
    found: dict[str, Row] = {}
    for row in (row for rows in lists for row in rows):
        found.setdefault(row.name, row)
    return list(found.values())


@pytest.mark.parametrize(
    "row", first_of_each_name(ROWS, SERVED, HELPED, STAGED, PARTED, GROUPED), ids=lambda row: row.name
)
def test_every_strategy_ends_with_the_cpus_result(device: str, row: Row) -> None:
    strategy = row.make()
    served = strategy.server is not None
    stages = 0 if strategy.schedule is None else strategy.schedule.stages
    workers = 1 if served and runs_alone(row) else stages or 2
    options: dict[str, Any] = {"steps": 6, "threads": 1}
    if strategy.one_copy is not None:
        with pytest.raises((ValueError, PolytempoError), match=ONE_COPY):
            pt.run(JOB, strategy, workers, device=device, **options)
        return
    found = pt.run(JOB, strategy, workers, device=device, **options)
    if served and workers > 1:  # its workers come to the server in another order
        assert math.isfinite(found.loss or math.nan)
    else:
        check(device, facts(found), facts(pt.run(JOB, strategy, workers, device="cpu", **options)))


# ------------------------------------------------------------------ pairs of features


@pytest.mark.parametrize("row", some_of(COVERING, 0, of=1), ids=str)
def test_a_job_of_two_features(device: str, tmp_path: Path, row: Combination) -> None:
    """The result is the CPU's simulation, also where it is broken off and resumed."""
    words = ONE_COPY if row.layout == "one_copy" else refusal(row._asdict())
    if words is not None:
        with pytest.raises((ValueError, PolytempoError), match="|".join(filter(None, [words, refusal(row._asdict())]))):
            pt.run(job_of(row), strategy_of(row), workers_of(row), **options_of(row), device=device)
        return
    job, strategy, workers = job_of(row), strategy_of(row), workers_of(row)
    options: dict[str, Any] = {"out": tmp_path, "device": device, "checkpoint_every": 2}
    if row.saving == "resumed":
        pt.run(job, strategy, workers, **options_of(row, BROKEN_OFF_AT), **options)
    found = pt.run(job, strategy, workers, **options_of(row), **options, resume=row.saving == "resumed")
    assert found.steps == STEPS
    [expected] = launch(lambda _: simulated(row), 1, threads=1)  # autograd here would forbid later forks
    if row.family == "downpour":
        assert math.isfinite(found.loss or math.nan)
    elif row.family in SERVED_FAMILIES:
        assert found.loss == pytest.approx(expected[1], rel=1e-5)
    else:
        check(device, facts(found), expected)


def simulated(row: Combination) -> list[Any]:
    return facts(pt.simulate(job_of(row), strategy_of(row), workers_of(row), **options_of(row), device="cpu"))
