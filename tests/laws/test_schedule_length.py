"""A schedule of the run's length: "run" is as many steps as the run has, whoever trains, resumes or sweeps it."""

from __future__ import annotations

import math
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import ChainedScheduler, ExponentialLR, MultiStepLR, StepLR

import polytempo as pt
from laws.combination_runs import points
from polytempo.spec.rates.schedules import FileSchedule, NamedSchedule, RunLength, for_run
from polytempo.training.job.growth import follow
from polytempo.training.tuning.trial import Trial

SAMPLES, STEPS = 80, 10
"""Steps of an epoch, of two workers with batches of 4."""
LR = 0.4
COSINE = "CosineAnnealingLR(T_max=run)"

JOB = pt.Job(
    model=lambda: nn.Linear(4, 2),
    data=lambda folder: pt.Data(points(SAMPLES, 0, torch.float32), points(8, 1, torch.float32)),
    loss=nn.functional.mse_loss,
    optimizer=lambda parameters, lr: torch.optim.SGD(parameters, lr=lr, momentum=0.5),
    lr=LR,
    batch_size=4,
    epochs=3,
)


def made(text: str, epochs: float | None = 2, steps: int | None = None) -> Any:
    optimizer = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=LR)
    return for_run(NamedSchedule(text), RunLength(epochs, steps))(optimizer, STEPS)


@pytest.mark.parametrize(
    ("epochs", "steps", "expected"),
    [(2, None, 20), (None, 7, 7), (2, 7, 7), (2, 70, 20), (0.25, None, 3), (0.01, None, 1)],
)
def test_the_length_of_a_run(epochs: float | None, steps: int | None, expected: int) -> None:
    assert RunLength(epochs, steps).in_steps(STEPS) == expected
    for text in (COSINE, "CosineAnnealingLR", "CosineAnnealingLR(eta_min=0.1)", "CosineAnnealingLR(T_max='1 run')"):
        assert made(text, epochs, steps).T_max == expected


def test_parts_of_a_run() -> None:
    listed = FileSchedule(MultiStepLR, lambda: {"milestones": ["0.25 run", ".75 run", "1 epoch"]}, "schedule")
    optimizer = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=LR)
    assert sorted(for_run(listed, RunLength(2, None))(optimizer, STEPS).milestones) == [5, 10, 15]
    with pytest.raises(ValueError, match="milestones is the run's length"):
        listed(optimizer, STEPS)
    assert made("OneCycleLR(max_lr=0.1)").total_steps == 20
    assert made("OneCycleLR(max_lr=0.1, epochs=3, steps_per_epoch=5)").total_steps == 15
    assert made("OneCycleLR(max_lr=0.1, total_steps=9)").total_steps == 9
    assert made("CosineAnnealingLR(T_max=9)").T_max == 9
    assert made("LinearLR(total_iters='0.1 run')").total_iters == 2


@pytest.mark.parametrize("text", ["half run", "-1 epochs", "1 2 epochs", "ten runs"])
def test_other_lengths_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match=f"T_max={text!r}: write run, '0.1 run', '10 epochs' or a number of steps"):
        made(f"CosineAnnealingLR(T_max='{text}')")


def test_a_length_that_nobody_knows_is_refused() -> None:
    optimizer = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=LR)
    with pytest.raises(ValueError, match="T_max is the run's length, and its number of steps is unknown here"):
        NamedSchedule("CosineAnnealingLR")(optimizer, STEPS)
    with pytest.raises(ValueError, match="step_size is the run's length"):
        NamedSchedule("StepLR(step_size='0.1 run')")(optimizer, STEPS)


@pytest.mark.parametrize("options", [{"epochs": 2}, {"steps": 13}, {"epochs": 2, "steps": 13}, {}])
@pytest.mark.parametrize(
    "strategy", ["sync_sgd()", "local_sgd(period=4)", "downpour()", "hogwild()", "gpipe(stages=2)"]
)
def test_a_run_has_the_rates_of_its_own_length(strategy: str, options: dict[str, Any]) -> None:
    job = JOB if "stages" not in strategy else replace(JOB, batch_size=8)
    if "stages" in strategy:
        job = replace(job, model=lambda: nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)))
    epochs = options.get("epochs", 9 if options else JOB.epochs)
    expected = min(options.get("steps", 90), STEPS * epochs)
    given, written = (
        pt.simulate(job, strategy, 2, threads=1, schedule=f"CosineAnnealingLR(T_max={told})", **options)
        for told in ("run", expected)
    )
    assert given.parameters_sha256 == written.parameters_sha256
    assert given.samples == written.samples
    if strategy != "downpour()":  # its steps are the server's updates
        assert given.steps == expected


@pytest.mark.parametrize("strategy", ["sync_sgd()", "downpour()"])
def test_rows_of_training_have_the_rate(strategy: str, tmp_path: Path) -> None:
    history = pt.simulate(JOB, strategy, 2, epochs=2, threads=1, schedule=COSINE, out=tmp_path).history
    first, *_, last = history.of("train").column("lr")
    assert LR >= first > 0.9 * LR
    assert 0 <= last < 0.1 * LR


def watched(folder: Path, **more: Any) -> pt.Job:
    """The job; its processes write the rate of each of their steps to a file in `folder`."""
    folder.mkdir()

    class Watched(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            with (folder / str(os.getpid())).open("a") as file:
                file.write(f"{self.param_groups[0]['lr']}\n")
            return super().step(closure)

    return replace(JOB, optimizer=lambda parameters, lr: Watched(parameters, lr=lr), **more)


def rates(folder: Path) -> list[list[float]]:
    """The rates of each process."""
    return [[float(line) for line in file.read_text().splitlines()] for file in folder.iterdir()]


def cosine(steps: int, begin: int = 0) -> Any:
    return pytest.approx([LR * (1 + math.cos(math.pi * step / steps)) / 2 for step in range(begin, steps)])


FILE = """
model = { call = "perceptron", inputs = 3, outputs = 2 }
data = { call = "csv_classes", path = "t.csv", target = "colour" }
loss = "cross_entropy"
optimizer = "SGD"
schedule = SCHEDULE
lr = 0.4
batch_size = 4
epochs = 10
"""


@pytest.mark.parametrize("write", ['"CosineAnnealingLR"', '{ call = "CosineAnnealingLR", T_max = "run" }'])
def test_a_job_files_schedule_has_the_length_of_the_commands_epochs(write: str, tmp_path: Path) -> None:
    rows = "".join(f"{i},{i % 3},1,{'red' if i % 2 else 'blue'}\n" for i in range(40))
    (tmp_path / "t.csv").write_text(f"a,b,c,colour\n{rows}")
    file = tmp_path / "job.toml"
    found = []
    for schedule in (write, '{ call = "CosineAnnealingLR", T_max = "3 epochs" }'):
        file.write_text(FILE.replace("SCHEDULE", schedule))
        found.append(pt.simulate(str(file), "sync_sgd()", 2, epochs=3).parameters_sha256)
    assert found[0] == found[1]


@pytest.mark.process
@pytest.mark.parametrize("more", [{}, {"min_workers": 1}], ids=["fixed", "elastic"])
def test_a_resumed_run_has_the_rates_of_its_new_length(more: dict[str, Any], tmp_path: Path) -> None:
    for number, (epochs, resume) in enumerate([(2, False), (4, True)]):
        job = watched(tmp_path / str(number), schedule=COSINE)
        pt.run(job, "sync_sgd()", 2, epochs=epochs, threads=1, out=tmp_path / "run", resume=resume, **more)
    assert rates(tmp_path / "0") == [cosine(20)] * 2
    assert rates(tmp_path / "1") == [cosine(40, 20)] * 2


@pytest.mark.process
@pytest.mark.parametrize(("workers", "batch"), [(1, 4), (4, 4), (2, 8)])
def test_a_run_resumed_with_other_steps_of_an_epoch_has_the_rates_of_its_place(
    workers: int, batch: int, tmp_path: Path
) -> None:
    """Two of four epochs are behind it, so half of the schedule is."""
    an_epoch = SAMPLES // (workers * batch)
    for number, given in enumerate([(2, 4), (workers, batch)]):
        job = watched(tmp_path / str(number), schedule=COSINE, batch_size=given[1])
        epochs = 2 + 2 * number
        pt.run(job, "sync_sgd()", given[0], epochs=epochs, threads=1, out=tmp_path / "run", resume=number == 1)
    assert rates(tmp_path / "1") == [cosine(4 * an_epoch, 2 * an_epoch)] * workers


@pytest.mark.process
@pytest.mark.parametrize("schedule", [COSINE, "OneCycleLR(max_lr=0.5)"])
def test_an_interrupted_run_has_the_bits_of_an_undisturbed_one(schedule: str, tmp_path: Path) -> None:
    class Stopper(pt.callbacks.Callback):
        def on_evaluation(self, facts: Any) -> pt.callbacks.Control:
            return pt.callbacks.Control(stop=True)

    job = replace(JOB, schedule=schedule)
    straight = pt.run(job, "sync_sgd()", 2, epochs=2, threads=1)
    cut = pt.run(job, "sync_sgd()", 2, epochs=2, threads=1, out=tmp_path, eval_every=7, callbacks=[Stopper()])
    assert cut.steps == 7
    again = pt.run(job, "sync_sgd()", 2, epochs=2, threads=1, out=tmp_path, resume=True)
    assert again.parameters_sha256 == straight.parameters_sha256


def test_a_trial_of_a_sweep_has_the_rates_of_its_epochs(tmp_path: Path) -> None:
    found = pt.sweep(replace(JOB, schedule=COSINE), "epochs=1|2", out=tmp_path, cluster="ethernet", threads=1)
    for trial, steps in zip(found.trials, (10, 20), strict=True):
        written = replace(JOB, schedule=f"CosineAnnealingLR(T_max={steps})")
        assert trial.value == pt.simulate(written, "sync_sgd()", 2, "ethernet", steps=steps, threads=1).loss


def test_a_schedule_stays_at_its_end_in_later_steps() -> None:
    """An elastic round that lost a worker has more steps, and OneCycleLR raises in these."""
    schedule = made("OneCycleLR(max_lr=0.5)")
    schedule.optimizer.step()
    follow(schedule, 1.9, STEPS)
    last = schedule.get_last_lr()
    follow(schedule, 3.0, STEPS)
    assert schedule.get_last_lr() == last
    assert last[0] > 0
    assert schedule.last_epoch == 19


def chained(optimizer: Any, steps_per_epoch: int, total_steps: int) -> Any:
    parts = [ExponentialLR(optimizer, 0.5), StepLR(optimizer, total_steps // 2)]
    return ChainedScheduler(parts, optimizer=optimizer)


def nothing(optimizer: Any, steps_per_epoch: int, total_steps: int) -> None:
    """A schedule that forgets its answer."""


def test_a_function_of_ones_own_has_the_runs_length() -> None:
    own = FileSchedule(chained, dict, "schedule")
    found = pt.simulate(replace(JOB, schedule=own), "sync_sgd()", 2, epochs=1, threads=1)
    assert found.steps == STEPS
    with pytest.raises(ValueError, match=r"expected a torch\.optim\.lr_scheduler"):
        pt.simulate(replace(JOB, schedule=replace(own, make=nothing)), "sync_sgd()", 2, epochs=1, threads=1)


def test_a_run_that_counts_other_steps_than_its_schedule_is_refused() -> None:
    with pytest.raises(ValueError, match="with batch_growth epochs= alone"):
        pt.simulate(JOB, "sync_sgd()", 2, steps=8, batch_growth={1: 2}, schedule=COSINE, threads=1)
    grown = {"epochs": 2, "batch_growth": {1: 2}, "threads": 1}
    one, other = (
        pt.simulate(JOB, "sync_sgd()", 2, schedule=f"CosineAnnealingLR(T_max={told})", **grown)  # type: ignore[arg-type]
        for told in ("run", 20)
    )
    assert one.parameters_sha256 == other.parameters_sha256
    with pytest.raises(ValueError, match="PT15"):
        pt.run(JOB, "sync_sgd()", 2, epochs=1, min_workers=1, scaling="local", schedule=COSINE)


def test_a_trial_of_tuning_may_be_longer_than_the_schedule() -> None:
    trial = Trial(replace(JOB, schedule="OneCycleLR(max_lr=0.5)", epochs=1), JOB.data(None), batch=8)
    for _ in range(12):
        trial.step()
    assert trial.steps == 12


@pytest.mark.process
def test_a_schedule_that_was_made_one_of_the_run_goes_on_as_one(tmp_path: Path) -> None:
    for number, (epochs, schedule) in enumerate([(2, "CosineAnnealingLR(T_max=20)"), (4, COSINE)]):
        job = watched(tmp_path / str(number), schedule=schedule)
        pt.run(job, "sync_sgd()", 2, epochs=epochs, threads=1, out=tmp_path / "run", resume=number == 1)
    assert rates(tmp_path / "1") == [cosine(40, 20)] * 2


def test_rounds_of_clients_are_steps() -> None:
    strategy = pt.federated.fed_avg(3, batch_size=4)
    given, written = (
        pt.simulate(JOB, strategy, 1, clients="iid(8)", steps=4, threads=1, schedule=f"CosineAnnealingLR(T_max={told})")
        for told in ("run", 4)
    )
    assert given.parameters_sha256 == written.parameters_sha256
    with pytest.raises(ValueError, match="give the run steps="):
        pt.simulate(JOB, strategy, 1, clients="iid(8)", epochs=2, threads=1, schedule=COSINE)
