"""Sweeps: the space from text, trials that repeat, and a sweep that goes on as if it had not been interrupted."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import pytest
import torch
from torch import nn

import polytempo as pt
from laws.combination_runs import points
from live_pages import write_run
from polytempo.report.pages.trials_page import trials_page
from polytempo.report.saved_trials import SavedTrial, SavedTrials, read_trials, write_trials
from polytempo.spec.callbacks.callback import CallbackFacts, Control
from polytempo.spec.callbacks.median_stop import median_stop
from polytempo.sweeps.sampler import sampler_of, settings_of
from polytempo.sweeps.search_space import Choice, Range, space_of
from polytempo.sweeps.sweep import FILE
from polytempo.ui.run_list import RunList

JOB = pt.Job(
    model=lambda: nn.Linear(4, 2),
    data=lambda folder: pt.Data(points(24, 0, torch.float32), points(8, 1, torch.float32)),
    loss=nn.functional.mse_loss,
    optimizer=lambda parameters, lr: torch.optim.SGD(parameters, lr=lr),
    batch_size=4,
)


def swept(out: Path, over: Any = "lr=1e-3..1:log", job: pt.Job = JOB, **options: Any) -> Any:
    given = {"sampler": "random", "trials": 3, "cluster": "ethernet", "epochs": 1, "threads": 1} | options
    return pt.sweep(job, over, out=out, **given)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("lr=1e-4..1e-1:log", {"lr": Range(1e-4, 1e-1, log=True, whole=False)}),
        ("batch-size=16..64", {"batch_size": Range(16, 64, log=False, whole=True)}),
        ("batch_size=16|32, 64", {"batch_size": Choice((16, 32, 64))}),
        (
            "strategy=local_sgd(period=8, codec=bf16),sync_sgd",
            {"strategy": Choice(("local_sgd(period=8, codec=bf16)", "sync_sgd"))},
        ),
        (
            "schedule=plateau(patience=1)|StepLR(step_size='1 epoch')",
            {"schedule": Choice(("plateau(patience=1)", "StepLR(step_size='1 epoch')"))},
        ),
        ("workers=1|2", {"workers": Choice((1, 2))}),
    ],
)
def test_a_space_and_its_text(text: str, expected: Any) -> None:
    space = space_of(text)
    assert space == expected
    assert space_of({name: str(each) for name, each in space.items()}) == expected


@pytest.mark.parametrize(
    ("over", "words"),
    [
        ("lr", "write name=values"),
        ("rate=1|2", "there is no option 'rate'"),
        ("lr=1..0.1", "below the second"),
        ("lr=0..1:log", "begin above 0"),
        ("lr=-1|0.1", "over lr=-1"),
        ("batch_size=0.5..8", "over batch_size=0.5"),
        ("strategy=sync_sgd|exec('1')", "over strategy"),
        ("lr=0.1|0.1", "give different values"),
        ("out=a|b", "of the sweep as a whole"),
        (["lr=0.1|0.2", "lr=0.3"], "given twice"),
        ([], "needs a setting"),
        ({"workers": [0]}, "whole number above 0"),
    ],
)
def test_mistakes_in_a_space(over: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        space_of(over)


def test_draws_stay_within_the_range() -> None:
    for text in ("lr=1e-4..1e-1:log", "batch_size=3..5:log", "batch_size=3..5", "lr=0.1..0.2"):
        [(_, found)] = space_of(text).items()
        assert isinstance(found, Range)
        drawn = [found.draw(Random(seed)) for seed in range(50)]
        assert all(found.low <= float(each) <= found.high for each in drawn)
        assert not found.whole or {type(each) for each in drawn} == {int}


def test_samplers() -> None:
    space = space_of(["lr=0.1|0.2", "workers=1|2"])
    assert sampler_of(None, space, None) == "grid"
    rows = [settings_of("grid", space, 0, number, [], "less") for number in range(4)]
    assert rows == [{"lr": lr, "workers": workers} for lr in (0.1, 0.2) for workers in (1, 2)]
    assert settings_of("random", space, 7, 3, [], "less") == settings_of("random", space, 7, 3, [], "more")
    with pytest.raises(ValueError, match="a range has too many"):
        sampler_of("grid", space_of("lr=0.1..1"), None)


def test_the_command_repeats_the_best_trial(tmp_path: Path) -> None:
    found = pt.sweep("digits", "lr=0.1|0.3", out=tmp_path, cluster="ethernet", steps=3, threads=1, batch_size=16)
    told = found.as_json()["command"]
    assert told.startswith("polytempo simulate digits --strategy 'sync_sgd(")
    for part in (
        f"--lr {found.best.settings['lr']}",
        "--steps 3",
        "--batch-size 16",
        "--cluster 'ethernet(gbit_per_s=10)'",
    ):
        assert part in told


def test_equal_sweeps_have_equal_trials_also_if_they_were_interrupted(tmp_path: Path) -> None:
    once = swept(tmp_path / "a")
    swept(tmp_path / "b", trials=1)
    told = read_trials(tmp_path / "b" / FILE)
    left = SavedTrial(number=1, settings={"lr": 0.5}, state="running", run="trial-001")  # as a kill leaves it
    write_trials(tmp_path / "b" / FILE, msgspec.structs.replace(told, trials=[*told.trials, left]))
    on = swept(tmp_path / "b", resume=True)
    assert on.trials == once.trials
    assert [each.state for each in on.trials] == ["finished"] * 3
    assert on.best.value == min(each.value for each in on.trials)
    assert swept(tmp_path / "c", seed=1).trials != once.trials
    assert f"--lr {on.best.settings['lr']:.6g}" in on.as_json()["command"]
    with pytest.raises(ValueError, match="holds a sweep; go on with resume"):
        swept(tmp_path / "b")
    with pytest.raises(ValueError, match="holds a sweep with space"):
        swept(tmp_path / "b", "lr=1e-2..1:log", resume=True)


def test_a_trial_that_fails_is_told_and_the_sweep_goes_on(tmp_path: Path) -> None:
    found = swept(tmp_path, {"lr": [0.1, 1e30], "batch_size": [4]}, sampler="grid", trials=None)
    assert [each.state for each in found.trials] == ["finished", "failed"]
    assert "loss" in found.trials[1].why
    assert found.best.number == 0
    assert found.trials[1].why.split(":")[0] in (tmp_path / "report.html").read_text(encoding="utf-8")


def test_a_bad_trial_is_stopped_early(tmp_path: Path) -> None:
    """Four good rates, then a rate of nearly nothing."""
    found = swept(tmp_path, {"lr": [0.1, 0.11, 0.12, 0.13, 1e-6]}, sampler="grid", trials=None, prune=True, epochs=3)
    assert [each.state for each in found.trials] == ["finished"] * 4 + ["pruned"]
    assert found.trials[-1].steps < found.trials[0].steps


@pytest.mark.parametrize(
    ("metric", "medians", "values", "stops"),
    [
        ("loss", "1.0 0.5 0.2", [0.9, 0.6], 2),
        ("loss", "1.0 0.5", [0.9, 0.4, 9.0], None),
        ("accuracy", "0.5 0.7", [0.6, 0.65], 2),
        ("accuracy", "0.5 0.7", [0.8, 0.1, 0.1], None),  # the best so far counts
        ("loss", "1.0", [float("nan")], 1),
    ],
)
def test_the_median_rule(metric: str, medians: str, values: list[float], stops: int | None) -> None:
    found = median_stop(metric, medians)
    asked = [found.on_evaluation(CallbackFacts(values={metric: value})) for value in values]
    assert [each.stop for each in asked].index(True) + 1 == stops if stops else asked == [Control()] * len(values)
    again = median_stop(metric, medians)
    again.load_state_dict(found.state_dict())
    assert again.state_dict() == found.state_dict()


def test_a_sweep_is_listed_with_its_best_trial(tmp_path: Path) -> None:
    write_run(tmp_path / "s" / "trial-000")
    trials = [
        SavedTrial(number=n, settings={"lr": v}, state="finished", value=v) for n, v in enumerate((0.5, 0.2, 0.3))
    ]
    told = SavedTrials(title="<b>x", metric="loss", better="less", num_trials=4, trials=trials)
    write_trials(tmp_path / "s" / FILE, told)
    (tmp_path / "other.trials.json").write_text("{}")
    found = RunList(tmp_path)
    found.look()
    assert [(each["id"], each["best"], len(each["trials"])) for each in found.sweeps] == [(f"s/{FILE}", 1, 3)]
    assert found.plans == []
    assert "<b>x" not in trials_page(told)


@pytest.mark.parametrize("content", ["", "{}", "[" * 100_000, '{"format": "polytempo-trials", "version": 2}', "\x00"])
def test_another_file_is_one_error(content: str, tmp_path: Path) -> None:
    (tmp_path / "x.trials.json").write_text(content)
    with pytest.raises(ValueError, match="holds no trials"):
        read_trials(tmp_path / "x.trials.json")


def test_a_sweep_needs_a_folder_and_a_job_by_name_for_several_at_a_time(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="give out="):
        pt.sweep(JOB, "lr=0.1|0.2")
    with pytest.raises(ValueError, match="parallel trials find their job by name"):
        swept(tmp_path, parallel=2)
    with pytest.raises(ValueError, match="goal f1"):
        _ = swept(tmp_path / "x", goal="f1", trials=1).best


@pytest.mark.process
@pytest.mark.timeout(300)  # two interpreters import torch
def test_trials_in_processes_of_their_own_are_those_in_this_one(tmp_path: Path) -> None:
    job = replace(pt.jobs.find("digits"), epochs=1)
    found, here = (swept(tmp_path / str(k), "lr=0.01..0.1:log", job, trials=2, parallel=k) for k in (2, 1))
    assert [each.state for each in found.trials] == ["finished"] * 2, found.trials
    assert found.trials == here.trials
