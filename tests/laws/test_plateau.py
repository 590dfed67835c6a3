"""`plateau`: a rate that falls by scores is torch's ReduceLROnPlateau on one process, and the same on all ranks."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import ReduceLROnPlateau

import polytempo as pt
from laws.catalogue import HELPED, ROWS, SERVED, Row, label
from laws.combination_runs import points
from polytempo.core.calls.refusals import Incompatible
from polytempo.data.plan import permutation
from polytempo.spec.rates.plateau import Plateau
from some_cases import some_of

SAMPLES, BATCH, EPOCHS, LR = 40, 8, 8, 0.4
SETTINGS = {"factor": 0.5, "patience": 0, "threshold": 0.05}
"""Three to six of eight scores lower the rate."""
TEXT = "plateau(factor=0.5, patience=0, threshold=0.05)"


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2)).double()


JOB = pt.Job(
    model=model,
    data=lambda folder: pt.Data(points(SAMPLES, 0, torch.float64), points(16, 1, torch.float64)),
    loss=nn.functional.mse_loss,
    optimizer=lambda parameters, lr: torch.optim.SGD(parameters, lr=lr, momentum=0.9),
    lr=LR,
    batch_size=4,
    schedule=TEXT,
)


def plain(**settings: Any) -> tuple[float, list[float]]:
    """The loss and the rate of each epoch in plain torch."""
    torch.manual_seed(0)
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=LR, momentum=0.9)
    schedule = ReduceLROnPlateau(optimizer, **(SETTINGS | settings))
    train, (x, y) = points(SAMPLES, 0, torch.float64), points(16, 1, torch.float64).tensors
    rates, loss = list[float](), 0.0
    for epoch in range(EPOCHS):
        order = permutation(SAMPLES, 0, epoch)
        for start in range(0, SAMPLES, BATCH):
            chosen = [train[int(i)] for i in order[start : start + BATCH]]
            inputs, targets = (torch.stack(part) for part in zip(*chosen, strict=True))
            optimizer.zero_grad()
            nn.functional.mse_loss(net(inputs), targets).backward()
            optimizer.step()
        with torch.no_grad():
            loss = float(nn.functional.mse_loss(net(x), y))
        schedule.step(loss)
        rates.append(optimizer.param_groups[0]["lr"])
    return loss, rates


def simulated(strategy: Any, workers: int, job: pt.Job = JOB, **options: Any) -> pt.Result:
    return pt.simulate(job, strategy, workers, **({"epochs": EPOCHS, "threads": 1} | options))


@pytest.mark.parametrize(
    ("strategy", "workers", "options"),
    [
        ("sync_sgd()", 1, {"batch_size": 8}),
        ("sync_sgd(route=ring)", 2, {}),
        ("sync_sgd()", 4, {"global_batch_size": 8, "accumulate": 2}),
        ("sync_sgd(route=invariant)", 2, {}),
        ("shared_memory()", 2, {}),
        ('hybrid("0, 2")', 2, {}),
        ("gpipe(stages=2)", 2, {"batch_size": 8}),
        ("split('0: column, 2: row', parts=2)", 2, {"batch_size": 8}),
    ],
)
def test_the_rate_of_plain_torch(strategy: str, workers: int, options: dict[str, Any]) -> None:
    expected, rates = plain()
    assert len(set(rates)) >= 2, "the rate falls"
    assert simulated(strategy, workers, **options).loss == pytest.approx(expected, rel=1e-10)


@pytest.mark.parametrize(
    "schedule",
    [
        lambda optimizer, steps: ReduceLROnPlateau(optimizer, **SETTINGS),
        TEXT,
        "ReduceLROnPlateau(factor=0.5, patience=0, threshold=0.05)",
    ],
    ids=["torch's object", "text", "torch's name"],
)
def test_every_way_to_write_it(schedule: Any) -> None:
    assert simulated("sync_sgd()", 2, replace(JOB, schedule=schedule)).loss == pytest.approx(plain()[0], rel=1e-10)


@pytest.mark.parametrize("row", some_of([*ROWS, *SERVED, *HELPED], 0, of=2), ids=label)
def test_every_strategy(row: Row) -> None:
    """A plateau that no score moves changes no bit; a plateau that moves gives another model; or it is refused."""
    workers = max(4, row.make().holders)
    still = "plateau(patience=1000)"
    if (code := refusal(row)) is not None:
        with pytest.raises(Incompatible, match=code):
            simulated(row.make(), workers, steps=2)
        return
    options: dict[str, Any] = {"batch_size": 1, "epochs": 3, "lr": 0.02}
    free, held, moved = (
        simulated(row.make(), workers, replace(JOB, schedule=text), **options)
        for text in (None, still, "plateau(metric=loss, better=more, factor=0.1, patience=0, threshold=0.99)")
    )
    assert held.parameters_sha256 == free.parameters_sha256
    assert held.loss == pytest.approx(free.loss, rel=1e-12)  # the score is a sum in another order
    assert moved.parameters_sha256 != free.parameters_sha256


def refusal(row: Row) -> str | None:
    features = row.make().features
    return "PT1551" if "server" in features else "PT1552" if "racing" in features else None


@pytest.mark.process
@pytest.mark.parametrize(
    ("strategy", "steps", "options"),
    [
        ("sync_sgd()", 15, {"eval_every": "0.5 epochs", "checkpoint_every": 2}),
        ("sync_sgd()", 17, {"min_workers": 1}),
        ("sync_sgd()", 15, {"eval_every": 3}),
        ("local_sgd(period=3)", 17, {}),
        ("gossip()", 15, {"checkpoint_every": 5}),
        ("shared_memory()", 15, {}),
        ('hybrid("0, 2")', 17, {}),
        ("gpipe(stages=2)", 20, {}),
        ("pipedream(stages=2)", 17, {}),
    ],
    ids=str,
)
def test_processes_broken_off_and_resumed(strategy: str, steps: int, options: dict[str, Any], tmp_path: Path) -> None:
    """The model of a simulation that goes through: the state of the rate is in the checkpoint."""
    given: dict[str, Any] = {"threads": 1, "epochs": EPOCHS, "out": tmp_path, **options}
    pt.run(JOB, strategy, 2, steps=steps, **given)
    found = pt.run(JOB, strategy, 2, resume=True, **given)
    whole = {name: value for name, value in options.items() if name == "eval_every"}
    assert found.loss == pytest.approx(simulated(strategy, 2, **whole).loss, rel=1e-12)


@pytest.mark.parametrize("tensor", [False, True])
def test_another_plateau_goes_on_at_the_present_rate(tensor: bool, tmp_path: Path) -> None:
    """Also where the rate is a tensor, which schedules write in place."""

    def optimizer(parameters: Any, lr: float) -> torch.optim.Optimizer:
        rate = torch.tensor(lr, dtype=torch.float64) if tensor else lr
        return torch.optim.SGD(parameters, lr=rate)

    falls, still = "plateau(factor=0.5, patience=0, threshold=0.99)", "plateau(factor=0.5, patience=1000)"
    job = replace(JOB, optimizer=optimizer, schedule=falls)
    pt.Trainer(job, "sync_sgd()", epochs=4, batch_size=8, out=tmp_path).fit()
    trainer = pt.Trainer(replace(job, schedule=still), "sync_sgd()", epochs=5, batch_size=8, out=tmp_path, resume=True)
    trainer.fit()
    assert [float(group["lr"]) for group in trainer.context.holding.replica.optimizer.param_groups] == [LR / 8]


def test_a_rate_that_is_a_tensor_is_no_tensor_of_the_schedule() -> None:
    rate = torch.tensor(0.5)
    optimizer = torch.optim.SGD(model().parameters(), lr=rate)
    schedule = Plateau.of(ReduceLROnPlateau(optimizer))
    [group] = optimizer.param_groups
    schedule.set_rates()
    group["lr"].fill_(0.25)
    assert schedule.get_last_lr() == [0.5]
    kept = group["lr"]
    schedule.hold([0.125])
    assert kept is group["lr"]
    assert kept == 0.125


@pytest.mark.parametrize(
    ("strategy", "job", "words"),
    [
        ("async_sgd()", JOB, "PT1551"),
        ("hogwild(update='atomic')", JOB, "PT1552"),
        ("sync_sgd()", replace(JOB, data=lambda folder: pt.Data(points(40, 0, torch.float64))), "PT1553"),
        (
            "sync_sgd()",
            replace(JOB, schedule="plateau(metric=accuracy)"),
            "needs a job with an accuracy, and job job has none",
        ),
        ("sync_sgd()", replace(JOB, schedule="plateau(patients=3)"), "unexpected keyword argument 'patients'"),
        ("sync_sgd()", replace(JOB, schedule="plato(patience=3)"), "there is no plato; try plateau"),
        ("sync_sgd()", replace(JOB, schedule="nowhere_here:warm_up"), "there is no module nowhere_here"),
    ],
)
@pytest.mark.parametrize("start", [pt.simulate, pytest.param(pt.run, marks=pytest.mark.process)])
def test_refusals(strategy: str, job: pt.Job, words: str, start: Any) -> None:
    with pytest.raises(ValueError, match=words):
        start(job, strategy, 2, steps=1, threads=1)


@pytest.mark.parametrize("given", ["", "plateau(", "plateau(3)", 3, "exec('1')[0]"])
def test_a_schedule_is_a_call_with_named_arguments(given: Any) -> None:
    with pytest.raises(ValueError, match="schedule"):
        pt.simulate(JOB, "sync_sgd()", steps=1, schedule=given)


def test_an_option_goes_before_the_job(tmp_path: Path) -> None:
    found = simulated("sync_sgd()", 2, schedule="StepLR(step_size='1 epoch', gamma=0.5)", out=tmp_path)
    assert found.loss != pytest.approx(plain()[0])
    told = json.loads((tmp_path / "events.jsonl").read_text(encoding="utf-8").splitlines()[0])
    assert told["settings"]["schedule"] == "StepLR(step_size='1 epoch', gamma=0.5)"
