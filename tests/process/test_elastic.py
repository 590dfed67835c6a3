"""Workers of a synchronous run are killed, stopped, sent away and taken in: it ends as the calm run does."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo  # optimizers need it: a second here instead of in each worker
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import polytempo as pt
from polytempo.engines.processes.failures import WorkerDied
from polytempo.report.status.records import GroupStatus
from polytempo.report.status.rows import read_metrics
from polytempo.report.status.stream import stream
from polytempo.runs.elastic.run_elastic import ElasticLauncher, WorkersLost, run_elastic
from polytempo.runs.run_collective import run_collective
from polytempo.spec.precision import parse_precision
from polytempo.spec.run_options import RunOptions
from polytempo.spec.run_spec import RunSpec
from process.elastic_stories import Story, harmed, trains_with, watching
from waiting import soon

pytestmark = [pytest.mark.process, pytest.mark.usefixtures("none_left")]

STEPS = 120
EPOCHS = 15

calls: list[float] = []


def slowly(output: Tensor, hurry: Path | None) -> None:
    """Let steps last longer and longer until a test's story is over, so that there is time for it however busy the
    machine is.
    """
    if hurry is not None and output.requires_grad and not hurry.exists():
        calls.append(min(0.5, 0.02 * 1.02 ** len(calls)))
        soon(hurry.exists, calls[-1])


def job(hurry: Path | None = None, fails: bool = False) -> pt.Job:
    """A regression of 95 samples in batches of 3 × 4: 8 steps an epoch. `hurry`: the file that ends the slow steps."""

    def data(path: Path | None) -> pt.Data:
        x = torch.randn(95, 6, generator=torch.Generator().manual_seed(1))
        return pt.Data(TensorDataset(x, x.cos().sum(1, keepdim=True)), TensorDataset(x, x.sum(1, keepdim=True)))

    def loss(output: Tensor, target: Tensor) -> Tensor:
        slowly(output, hurry)
        if fails and output.requires_grad:
            raise KeyError("no such thing")
        return nn.functional.mse_loss(output, target)

    def model() -> nn.Module:
        return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Dropout(0.1), nn.Linear(8, 1))

    def optimizer(parameters: Any, lr: float) -> torch.optim.Optimizer:
        return torch.optim.Adam(parameters, lr)

    def schedule(optimizer: torch.optim.Optimizer, steps_per_epoch: int) -> Any:
        return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, EPOCHS * steps_per_epoch)

    return pt.Job(
        model=model, data=data, loss=loss, optimizer=optimizer, schedule=schedule, lr=0.01, batch_size=4, name="waves"
    )


def spec_of(trained: pt.Job, strategy: str = "sync_sgd", **options: Any) -> RunSpec:
    """A run of 3 workers."""
    return RunSpec.of(trained, pt.parse_strategy(strategy), 3, RunOptions(epochs=EPOCHS, seed=2, **options))


def told(story: Story, spec: RunSpec, hurry: Path, wanted: list[int] | None = None) -> Any:
    """An elastic run during which `story`, a generator, goes on as often as the launcher looks for news.

    When the story has ended, the run hurries to its end.
    """
    available = None if wanted is None else lambda: wanted[-1]
    result = run_elastic(spec, pt.engines.local(), None, available, watching(story, hurry))
    assert hurry.exists(), "the run was over before the story"
    return result


@pytest.mark.parametrize("precision", [None, "bf16"])
def test_whatever_becomes_of_workers_the_weights_are_the_calm_runs_bit_by_bit(
    precision: str | None, tmp_path: Path
) -> None:
    """Workers are killed, stopped and terminated, and there is room for more of them, and for less."""
    wanted, out, hurry = [3], tmp_path / "run", tmp_path / "hurry"

    def story(launcher: ElasticLauncher) -> Iterator[None]:
        for rank, number in ((0, signal.SIGKILL), (1, signal.SIGSTOP), (0, signal.SIGTERM)):
            yield from trains_with(launcher, 3)
            yield from harmed(launcher, rank, number)
        for size in (4, 1, 2):
            wanted.append(size)
            yield from trains_with(launcher, size)

    strategy = "sync_sgd(route=invariant(slices=5))"
    options: dict[str, Any] = {} if precision is None else {"precision": parse_precision(precision)}
    calm = run_collective(spec_of(job(), strategy, **options), pt.engines.local())
    spec = spec_of(job(hurry), strategy, min_workers=1, max_workers=4, out=out, checkpoint_every=50, **options)
    result = told(story, spec, hurry, wanted)
    assert result.steps == calm.steps == STEPS
    assert result.parameters_sha256 == calm.parameters_sha256
    assert (result.ledger, result.precision) == (calm.ledger, calm.precision)
    assert [(row["once"], row["last_epoch"]) for row in result.ledger] == [(95, EPOCHS - 1)]
    lost = [text for change in result.membership for text in change["lost"]]
    assert lost == ["member-0 was killed by SIGKILL", "member-2 was killed by SIGKILL"]
    rows = [row["step"] for row in read_metrics(out) if row["kind"] == "train"]
    assert rows == sorted(set(rows))
    groups = [(each.generation, each.workers) for each in stream(out) if isinstance(each, GroupStatus)]
    assert groups == [(change["generation"], len(change["members"])) for change in result.membership]
    assert sorted(path.name for path in (out / "checkpoint").glob("step-*"))[-1].endswith(str(STEPS))


def test_with_the_local_batch_kept_the_rate_follows_the_number_of_workers(tmp_path: Path) -> None:
    """Plain SGD on a loss that is its weight: after each step it is less by the learning rate."""
    hurry = tmp_path / "hurry"

    def loss(output: Tensor, target: Tensor) -> Tensor:
        slowly(output, hurry)
        return output.mean()

    def model() -> nn.Module:
        made = nn.Linear(1, 1, bias=False)
        nn.init.zeros_(made.weight)
        return made

    ones = TensorDataset(torch.ones(96, 1), torch.zeros(96, 1))
    linear = pt.Job(
        model=model,
        data=lambda path: pt.Data(ones, ones),
        loss=loss,
        optimizer=lambda parameters, lr: torch.optim.SGD(parameters, lr),
        lr=0.125,
        batch_size=2,
        name="linear",
    )
    options = RunOptions(epochs=12, min_workers=1, scaling="local", restarts=0)
    spec = RunSpec.of(linear, pt.strategies.sync_sgd(), 2, options)

    def watch(launcher: ElasticLauncher) -> None:
        if not hurry.exists() and launcher.is_training:
            next(harmed(launcher, 1, signal.SIGKILL))
            hurry.touch()

    result = run_elastic(spec, pt.engines.local(), None, None, watch)
    assert result.membership is not None
    together = result.membership[1]["step"]
    alone = (12 * 96 - 4 * together) // 2
    assert result.steps == together + alone
    assert result.loss == -0.125 * together - 0.0625 * alone  # these sums are exact


def test_what_a_worker_raises_ends_the_run() -> None:
    with pytest.raises(WorkerDied, match="no such thing"):
        run_elastic(spec_of(job(fails=True), min_workers=1), pt.engines.local())


def test_too_few_workers_end_the_run(tmp_path: Path) -> None:
    def story(launcher: ElasticLauncher) -> Iterator[None]:
        yield from trains_with(launcher, 3)
        next(harmed(launcher, 1, signal.SIGKILL))
        next(harmed(launcher, 2, signal.SIGKILL))
        while True:
            yield

    spec = spec_of(job(tmp_path / "hurry"), min_workers=2, restarts=0)
    with pytest.raises(WorkersLost, match=r"1 workers are left, and at least 2 are needed.*killed by SIGKILL"):
        told(story, spec, tmp_path / "hurry")
