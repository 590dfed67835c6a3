"""Sweeps by Optuna: its sampler repeats from the seed, and its own storage and pruner find a sweep's trials."""

from __future__ import annotations

from pathlib import Path
from random import Random

import optuna
import pytest
import torch
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from torch import nn

import polytempo as pt
from laws.combination_runs import points
from polytempo.report.saved_trials import SavedTrial, Setting, read_trials
from polytempo.report.status.rows import read_metrics
from polytempo.spec.callbacks.callback import CallbackFacts
from polytempo.spec.callbacks.median_stop import median_stop
from polytempo.sweeps.sampler import settings_of
from polytempo.sweeps.search_space import space_of

SPACE = space_of(["lr=1e-4..1:log", "batch_size=16|32|64", "workers=1..4"])


def loss(settings: dict[str, Setting]) -> float:
    return abs(float(settings["lr"]) - 0.01) + (settings["batch_size"] != 32) + 0.1 * float(settings["workers"])


def searched(seed: int, begin: list[SavedTrial] | None = None, trials: int = 25) -> list[SavedTrial]:
    seen = list(begin or [])
    for number in range(len(seen), trials):
        found = settings_of("tpe", SPACE, seed, number, seen, "less")
        seen.append(SavedTrial(number=number, settings=found, state="finished", value=loss(found)))
    return seen


def test_a_search_repeats_and_goes_on() -> None:
    once = searched(3)
    assert searched(3) == once == searched(3, once[:11])
    assert searched(4) != once
    values = [each.value or 0.0 for each in once]
    assert min(values[12:]) < min(values[:6]), "it learns"


@pytest.mark.parametrize("values", [[0.9, 0.6, 0.1], [0.2, 0.9, 0.9], [2.0, 0.1, 0.1]])
def test_the_median_rule_is_optunas(values: list[float]) -> None:
    others = [[1.0, 0.5, 0.4], [0.8, 0.7, 0.3], [1.2, 0.6, 0.5], [0.7, 0.4, 0.2], [0.9, 0.5, 0.1]]
    study = optuna.create_study(pruner=optuna.pruners.MedianPruner(n_startup_trials=4))
    for curve in others:
        made = study.ask()
        for step, value in enumerate(curve):
            made.report(value, step)
        study.tell(made, curve[-1])
    ours = median_stop("loss", " ".join(str(sorted(column)[2]) for column in zip(*others, strict=True)))
    trial = study.ask()
    for step, value in enumerate(values):
        trial.report(value, step)
        assert ours.on_evaluation(CallbackFacts(values={"loss": value})).stop == trial.should_prune()


SEED, TRIALS = 3, 16
JOB = pt.Job(
    model=lambda: nn.Linear(4, 2),
    data=lambda folder: pt.Data(points(40, 0, torch.float32), points(16, 1, torch.float32)),
    loss=nn.functional.mse_loss,
    optimizer=lambda parameters, lr: torch.optim.SGD(parameters, lr=lr),
    batch_size=4,
)
OVER = ["lr=1e-3..0.5:log", "batch_size=4|8", "strategy=sync_sgd,local_sgd(period=2)", "workers=1..2"]


def curve(run: Path) -> list[float]:
    """The loss of each evaluation."""
    rows = {row["step"]: row["loss"] for row in read_metrics(run) if row["kind"] == "test"}
    return [loss for _, loss in sorted(rows.items())]


def test_optunas_storage_and_pruner_find_the_trials_of_a_sweep(tmp_path: Path) -> None:
    """Trial by trial Optuna, which reads the trials before from its own journal, asks for the settings that the sweep
    had, and prunes the trials that the sweep pruned, at the same evaluation."""
    out = tmp_path / "sweep"
    options = {"trials": TRIALS, "seed": SEED, "epochs": 5, "threads": 1, "eval_every": "1 epoch"}
    found = pt.sweep(JOB, OVER, sampler="tpe", prune=True, cluster="ethernet", goal="loss", out=out, **options)
    trials = read_trials(out / "sweep.trials.json").trials
    assert {each.state for each in trials} == {"finished", "pruned"}
    categories, numbers = optuna.distributions.CategoricalDistribution, optuna.distributions.FloatDistribution
    space = {
        "lr": numbers(1e-3, 0.5, log=True),
        "batch_size": categories([4, 8]),
        "strategy": categories(["sync_sgd", "local_sgd(period=2)"]),
        "workers": optuna.distributions.IntDistribution(1, 2),
    }
    journal = str(tmp_path / "journal.log")
    optuna.create_study(study_name="sweep", storage=JournalStorage(JournalFileBackend(journal)))
    for each in trials:
        sampler = optuna.samplers.TPESampler(seed=Random(f"polytempo-{SEED}-{each.number}").getrandbits(31))
        pruner = optuna.pruners.MedianPruner(n_startup_trials=4, n_min_trials=4)
        storage = JournalStorage(JournalFileBackend(journal))
        study = optuna.load_study(study_name="sweep", storage=storage, sampler=sampler, pruner=pruner)
        asked = study.ask(space)
        assert asked.params == each.settings
        stops = []
        for step, loss in enumerate(curve(out / each.run)):
            asked.report(loss, step)
            stops.append(bool(asked.should_prune()))
        assert any(stops) == (each.state == "pruned")
        assert not any(stops[:-2]), "at most the run's last evaluation comes later"
        assert each.value is not None
        study.tell(asked, each.value)
    kept = optuna.load_study(study_name="sweep", storage=JournalStorage(JournalFileBackend(journal)))
    assert [each.value for each in kept.trials] == [each.value for each in found.trials]
    assert kept.best_value <= (found.best.value or 0.0)
