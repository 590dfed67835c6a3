"""The sampler tpe: Optuna's, repeated from the seed, with nothing of Optuna on the disk."""

from __future__ import annotations

import optuna
import pytest

from polytempo.report.saved_trials import SavedTrial, Setting
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
