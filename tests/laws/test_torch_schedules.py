"""Every schedule of torch by name, wherever a run has one: the rates of torch's object, or a refusal."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

import polytempo as pt
from laws.combination_runs import points
from polytempo.engines.processes.worker import Result
from polytempo.jobs.job_file import job_from_file
from polytempo.worlds import ProcessWorld
from process.crew import together

SAMPLES, STEPS, LR = 40, 10, 0.4
"""Ten steps of an epoch of one worker."""
SCHEDULES: dict[str, dict[str, Any]] = {
    "StepLR": {"step_size": 3, "gamma": 0.5},
    "MultiStepLR": {"milestones": [2, 5, 12], "gamma": 0.5},
    "ConstantLR": {"factor": 0.5, "total_iters": 4},
    "LinearLR": {"start_factor": 0.1, "total_iters": 4},
    "ExponentialLR": {"gamma": 0.9},
    "CosineAnnealingLR": {"T_max": 20},
    "CosineAnnealingWarmRestarts": {"T_0": 3, "T_mult": 2},
    "PolynomialLR": {"total_iters": 12, "power": 2.0},
    "CyclicLR": {"base_lr": 0.01, "max_lr": 0.3, "step_size_up": 3},
    "OneCycleLR": {"max_lr": 0.5, "total_steps": 20},
    "ReduceLROnPlateau": {"patience": 100},
    "SequentialLR": {
        "schedulers": [
            {"call": "LinearLR", "start_factor": 0.1, "total_iters": 3},
            {"call": "CosineAnnealingLR", "T_max": 17},
        ],
        "milestones": [3],
    },
    "ChainedScheduler": {
        "schedulers": [{"call": "ConstantLR", "factor": 0.5, "total_iters": 3}, {"call": "ExponentialLR", "gamma": 0.9}]
    },
}
FUNCTIONS = {"LambdaLR", "MultiplicativeLR"}
"""Schedules by functions."""


class Watched(torch.optim.SGD):
    """Remembers the rate of each of its steps."""

    seen: list[float] = []  # noqa: RUF012 - of all ranks

    def step(self, closure: Any = None) -> Any:
        if any(parameter.grad is not None for group in self.param_groups for parameter in group["params"]):
            self.seen.append(self.param_groups[0]["lr"])
        return super().step(closure)


JOB = pt.Job(
    model=lambda: nn.Linear(4, 2),
    data=lambda folder: pt.Data(points(SAMPLES, 0, torch.float32), points(8, 1, torch.float32)),
    loss=nn.functional.mse_loss,
    optimizer=lambda parameters, lr: Watched(parameters, lr=lr, momentum=0.5),
    lr=LR,
    batch_size=4,
    epochs=2,
)


def rates(job: pt.Job, *, strategy: Any = "sync_sgd()", workers: int = 1, **options: Any) -> list[float]:
    Watched.seen.clear()
    pt.simulate(job, strategy, workers, threads=1, **options)
    return list(Watched.seen)


def plain(name: str, steps: int, **changed: Any) -> list[float]:
    """The rates of torch's own object."""
    optimizer = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=LR, momentum=0.5)
    schedule, found = torchs(optimizer, name, SCHEDULES[name] | changed), []
    for _ in range(steps):
        found.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        if name != "ReduceLROnPlateau":
            schedule.step()
    return found


def torchs(optimizer: Any, name: str, arguments: Mapping[str, Any]) -> Any:
    make = getattr(lr_scheduler, name)
    if "schedulers" not in arguments:
        return make(optimizer, **arguments)
    parts = [
        torchs(optimizer, each["call"], {k: v for k, v in each.items() if k != "call"})
        for each in arguments["schedulers"]
    ]
    return make(schedulers=parts, optimizer=optimizer, **{k: v for k, v in arguments.items() if k != "schedulers"})


def toml(value: Any) -> str:
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{key} = {toml(each)}" for key, each in value.items()) + " }"
    if isinstance(value, list):
        return f"[{', '.join(map(toml, value))}]"
    return json.dumps(value)


def named(name: str, folder: Path, **changed: Any) -> pt.Job:
    """The job with a job file's schedule."""
    file = folder / "job.toml"
    parts = 'model = "torch.nn:Identity"\ndata = "digits"\nloss = "mse_loss"\noptimizer = "SGD"\n'
    file.write_text(f"{parts}schedule = {toml({'call': name} | SCHEDULES.get(name, {}) | changed)}\n")
    return replace(JOB, schedule=job_from_file(file).schedule)


def test_every_schedule_of_torch_is_here() -> None:
    assert SCHEDULES.keys() | FUNCTIONS == set(lr_scheduler.__all__) - {"LRScheduler"}


@pytest.mark.parametrize("name", SCHEDULES)
def test_the_rates_of_torch(name: str, tmp_path: Path) -> None:
    assert rates(named(name, tmp_path), steps=14) == pytest.approx(plain(name, 14))


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_batch_of_twice_the_size_has_every_other_rate(name: str, tmp_path: Path) -> None:
    """The first epoch has ten steps and the second one five, at the places that its samples have in the schedule."""
    expected = plain(name, 20)
    assert rates(named(name, tmp_path), epochs=2, batch_growth={1: 2}) == pytest.approx(expected[:10] + expected[10::2])


@pytest.mark.parametrize("name", SCHEDULES)
def test_rounds_of_clients_have_a_rate_each(name: str, tmp_path: Path) -> None:
    """A client has five samples, and trains two steps in a round; the simulator prices a third one."""
    job, strategy = named(name, tmp_path), pt.federated.fed_avg(1, batch_size=3)
    if name == "ReduceLROnPlateau":
        with pytest.raises(ValueError, match="PT15"):
            rates(job, strategy=strategy, steps=4, clients="iid(8)")
        return
    found = rates(job, strategy=strategy, steps=8, clients="iid(8)")
    assert found[::3] == found[1::3] == pytest.approx(plain(name, 8))


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_server_has_the_rate_of_a_batchs_place(name: str, tmp_path: Path) -> None:
    job = replace(named(name, tmp_path), optimizer=lambda p, lr: torch.optim.SGD(p, lr=lr, momentum=0.5))
    still = {"OneCycleLR", "CyclicLR"}
    if name == "ReduceLROnPlateau" or name in still:
        with pytest.raises(ValueError, match="PT1551" if name not in still else "use cycle_momentum=False"):
            rates(job, strategy="async_sgd()", epochs=1)
        return
    history = pt.simulate(job, "async_sgd()", 1, epochs=1, threads=1, out=tmp_path / "run").history
    assert history.of("train").column("lr") == pytest.approx(plain(name, 10))


# ---------------------------------------------------------------------- resumed runs

CUT, END = 7, 14
CHANGES: list[tuple[str, str, dict[str, Any]]] = [
    *((name, name, {}) for name in SCHEDULES),
    ("", "CosineAnnealingLR", {}),
    ("CosineAnnealingLR", "", {}),
    ("OneCycleLR", "", {}),
    ("CosineAnnealingLR", "CosineAnnealingLR", {"T_max": 14}),
    ("CosineAnnealingLR", "OneCycleLR", {}),
    ("OneCycleLR", "CosineAnnealingLR", {}),
    ("OneCycleLR", "OneCycleLR", {"max_lr": 0.1}),
    ("StepLR", "StepLR", {"gamma": 0.1}),
    ("ChainedScheduler", "SequentialLR", {}),
    ("ReduceLROnPlateau", "ExponentialLR", {}),
    ("ExponentialLR", "ReduceLROnPlateau", {}),
]
"""The schedules of a run before and after its resume; "": none."""


@pytest.mark.process
def test_a_resumed_run_has_the_rates_of_the_schedule_that_it_is_given(tmp_path: Path) -> None:
    """The same as if the run had begun with it."""

    def work(world: ProcessWorld) -> Result:
        found = []
        for number, (before, after, changed) in enumerate(CHANGES):
            for steps, name, more in ((CUT, before, {}), (END, after, changed)):
                job = named(name, tmp_path, **more) if name else JOB
                Watched.seen.clear()
                options = {"steps": steps, "out": tmp_path / str(number), "resume": steps == END, "threads": 1}
                pt.Trainer(job, pt.strategies.sync_sgd(), world=world, **options).fit()
            found.append(list(Watched.seen))
        return found

    (all_found,) = together(1, work)
    for found, (before, after, changed) in zip(all_found, CHANGES, strict=True):
        expected = plain(after, END, **changed)[CUT:] if after else [LR] * (END - CUT)
        assert found == pytest.approx(expected), f"{before} → {after} {changed}"


# ---------------------------------------------------------------------- words


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("LambdaLR(lr_lambda=warm)", "lr_lambda is 'warm', and it takes a function; write one of your own"),
        ("MultiplicativeLR(lr_lambda=0.9)", "lr_lambda is 0.9, and it takes a function"),
        ("CyclicLR(base_lr=0.1, max_lr=1, scale_fn=warm)", "scale_fn is 'warm', and it takes a function"),
        ("SequentialLR(milestones=3)", "in a job file `schedulers` is a list of tables"),
        ("ChainedScheduler", "in a job file `schedulers` is a list of tables"),
        ("LRScheduler", "there is no LRScheduler; try"),
        ("warnings", "there is no warnings; try"),
    ],
)
def test_a_schedule_that_no_text_is(text: str, said: str) -> None:
    with pytest.raises(ValueError, match=re.escape(said)):
        rates(replace(JOB, schedule=text), steps=2)


def test_functions_are_named_in_a_job_file(tmp_path: Path) -> None:
    """`call` makes them."""
    (tmp_path / "falling_rates.py").write_text("def halves():\n    return lambda step: 0.5**step\n")
    job = named("LambdaLR", tmp_path, lr_lambda={"call": "falling_rates:halves"})
    assert rates(job, steps=3) == [LR, LR / 2, LR / 4]


def test_a_schedule_without_a_count_is_refused() -> None:
    class Uncounted(lr_scheduler.ChainedScheduler):
        """Has no last_epoch, as its base."""

    job = replace(JOB, schedule=lambda o, steps: Uncounted([lr_scheduler.ExponentialLR(o, 0.9)], o))
    with pytest.raises(ValueError, match=r"an Uncounted without last_epoch .* a schedule that counts its steps"):
        rates(job, steps=2)


def test_parts_of_a_run_in_a_sequence(tmp_path: Path) -> None:
    """A warm-up for a tenth of the run, then a cosine to its end."""
    parts = [
        {"call": "LinearLR", "start_factor": 0.1, "total_iters": "0.1 run"},
        {"call": "CosineAnnealingLR", "T_max": "0.9 run"},
    ]
    job = named("SequentialLR", tmp_path, schedulers=parts, milestones=["0.1 run"])
    lengths = [parts[0] | {"total_iters": 2}, parts[1] | {"T_max": 18}]
    assert rates(job, epochs=2) == pytest.approx(plain("SequentialLR", 20, schedulers=lengths, milestones=[2]))
