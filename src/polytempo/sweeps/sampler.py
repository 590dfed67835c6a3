"""Samplers: the settings of a trial, from the seed, its number and the trials that it may know.

grid      all combinations, in order
random    each setting drawn for itself
tpe       Optuna's tree-structured Parzen estimator (Bergstra et al., 2011), in memory; needs the extra `optuna`

The same arguments give the same settings, so a sweep repeats, and goes on after an interruption as if there was none.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from importlib.util import find_spec
from itertools import product
from math import prod
from random import Random
from typing import Any, Literal, get_args

from polytempo.report.saved_trials import SavedTrial, Setting
from polytempo.sweeps.search_space import Choice, Range, Space

Sampler = Literal["grid", "random", "tpe"]


def sampler_of(given: str | None, space: Space, trials: int | None) -> Sampler:
    """The sampler: as given; else all combinations where they are few values, else by the installed packages."""
    if given is None:
        few = all(isinstance(each, Choice) for each in space.values()) and trials is None
        return "grid" if few else "tpe" if find_spec("optuna") else "random"
    for name in get_args(Sampler):
        if given == name:
            if name == "tpe" and find_spec("optuna") is None:
                raise ValueError(
                    "sampler tpe needs the package optuna; run: pip install 'polytempo[optuna]', or use random"
                )
            if name == "grid" and not all(isinstance(each, Choice) for each in space.values()):
                raise ValueError("sampler grid tries all combinations of values, and a range has too many; list values")
            found: Sampler = name
            return found
    raise ValueError(f"sampler {given!r} must be one of {', '.join(get_args(Sampler))}")


def combinations_of(space: Space) -> int:
    """The number of trials of a grid."""
    return prod(len(each.values) for each in space.values() if isinstance(each, Choice))


def settings_of(
    sampler: str, space: Space, seed: int, number: int, seen: Sequence[SavedTrial], better: str
) -> dict[str, Setting]:
    """The settings of trial `number`. `seen`: the ended trials that it may know, by their numbers."""
    if sampler == "grid":
        rows = product(*(each.values for each in space.values() if isinstance(each, Choice)))
        return dict(zip(space, list(rows)[number], strict=True))
    if sampler == "random":
        random = Random(f"polytempo-{seed}-{number}")
        return {name: each.draw(random) for name, each in space.items()}
    return _suggested(space, seed, number, seen, better)


def _suggested(space: Space, seed: int, number: int, seen: Sequence[SavedTrial], better: str) -> dict[str, Setting]:
    optuna: Any = import_module("optuna")  # optional, and takes a second
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    mixed = Random(f"polytempo-{seed}-{number}").getrandbits(31)
    study = optuna.create_study(
        sampler=optuna.samplers.TPESampler(seed=mixed), direction="minimize" if better == "less" else "maximize"
    )
    distributions = {name: _distribution(optuna, each) for name, each in space.items()}
    for each in seen:
        if each.value is not None:
            made: Any = optuna.trial.create_trial(
                params=dict(each.settings), distributions=distributions, value=each.value
            )
            study.add_trial(made)
    return dict(study.ask(distributions).params)


def _distribution(optuna: Any, given: Range | Choice) -> Any:
    if isinstance(given, Choice):
        return optuna.distributions.CategoricalDistribution(given.values)
    kind = optuna.distributions.IntDistribution if given.whole else optuna.distributions.FloatDistribution
    low, high = (int(given.low), int(given.high)) if given.whole else (given.low, given.high)
    return kind(low, high, log=given.log)
