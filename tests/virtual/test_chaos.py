"""The server under seeded faults: everything promised is kept, and a seed is a run."""

from __future__ import annotations

import pytest

from polytempo.chaos.scenario import ChaosOutcome, draw, run
from polytempo.compression import delta, exact

SEEDS = 40


def told(outcome: ChaosOutcome) -> str:
    return "\n".join([f"seed {outcome.seed}: {outcome.violation}", outcome.scenario, *outcome.plan, *outcome.events])


@pytest.mark.parametrize("seed", range(SEEDS))
def test_what_is_promised_is_kept(seed: int) -> None:
    """Repeat one with `polytempo chaos --seeds 1 --first SEED`."""
    outcome = run(seed)
    assert outcome.violation is None, told(outcome)


@pytest.mark.parametrize("seed", range(100, 108))
def test_what_is_promised_is_kept_of_encoded_pushes_and_pulls_too(seed: int) -> None:
    """Every second seed pulls changed words alone, against the message that the worker holds."""
    outcome = run(seed, codec=exact(), pull_codec=delta() if seed % 2 else exact())
    assert outcome.violation is None, told(outcome)


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_the_same_seed_is_the_same_run(seed: int) -> None:
    first, second = run(seed), run(seed)
    assert first == second
    assert first.trace != run(seed + 100).trace


def test_seeds_bring_every_rule_and_every_fault() -> None:
    """Else a green run would say little."""
    drawn = [draw(seed) for seed in range(SEEDS)]
    rules = {scenario.rule.name.partition("(")[0] for scenario in drawn}
    expected = {"on_arrival", "softsync", "first", "all_but", "within", "hardsync", "quorum", "regional"}
    assert rules == expected, f"a new rule of draw_rule belongs here: {rules ^ expected}"
    faults = {type(fault).__name__ for scenario in drawn for fault in scenario.plan.faults}
    assert faults == {"LinkCut", "ProcessPause", "Death"}
    assert {scenario.replicas for scenario in drawn} == {0, 1}
    weathers = [scenario.plan.weather for scenario in drawn]
    assert any(weather.drop for weather in weathers)
    assert any(weather.duplicate for weather in weathers)


def test_a_bug_must_have_a_name() -> None:
    with pytest.raises(ValueError, match=r"no bug 'gremlin'; there are .*no_fence"):
        run(0, "gremlin")
