"""`pt.find_rate` and `polytempo tune rate`: known cases, laws, the output, and refusals."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import polytempo as pt
from command_output import asking
from polytempo.training.tuning.rate_range import RateRange, growing_rates


class Curve(nn.Module):
    """½ Σ Lᵢ wᵢ², from w = 1; the data does not matter."""

    def __init__(self, curvatures: tuple[float, ...]) -> None:
        super().__init__()
        self.curvatures = torch.tensor(curvatures)
        self.w = nn.Parameter(torch.ones(len(curvatures)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.curvatures * self.w.square()).sum() / 2 + 0 * x


def quadratic(curvatures: tuple[float, ...], lr: float = 0.01) -> pt.Job:
    """Gradient descent on it is stable below a rate of 2 / max Lᵢ."""
    data = TensorDataset(torch.zeros(64, 1), torch.zeros(64, 1))
    return pt.Job(
        model=lambda: Curve(curvatures),
        data=lambda folder: pt.Data(data),
        loss=lambda output, target: output.mean(),
        optimizer=lambda parameters, rate: torch.optim.SGD(parameters, lr=rate),
        batch_size=8,
        lr=lr,
        epochs=1,
        name="quadratic",
    )


@pytest.mark.parametrize("curvatures", [(1.0,), (10.0,), (0.1, 1.0, 100.0)])
@pytest.mark.parametrize("workers", [1, 3])
def test_on_a_quadratic_the_suggested_rate_is_stable_and_learns(curvatures: tuple[float, ...], workers: int) -> None:
    limit = 2 / max(curvatures)
    found = pt.find_rate(quadratic(curvatures), "sync_sgd", workers, lowest=1e-4 * limit, highest=1e4 * limit)
    assert found.diverged
    assert limit / 100 < found.suggested < limit
    assert found.suggested == min(found.steepest, found.least / 10)


def test_rates_and_losses_are_those_of_gradient_descent() -> None:
    """w ← w (1 - η) in each step, and the loss before it is w² / 2."""
    found = pt.find_rate(quadratic((1.0,)), lowest=1e-3, highest=1e-1, steps=10)
    rates, expected, w = growing_rates(1e-3, 1e-1, 10), RateRange(), 1.0
    for rate in rates:
        expected.add(rate, w * w / 2)
        w *= 1 - rate
    assert found.rates == pytest.approx(rates)
    assert found.losses == pytest.approx(expected.losses, rel=1e-5)
    assert not found.diverged


def test_options_of_a_run_that_is_scored_change_no_rate() -> None:
    job, bounds = quadratic((1.0,)), {"lowest": 1e-3, "highest": 1e-1, "steps": 10}
    more = {"schedule": "StepLR(step_size=1)", "until": {"loss": 0.1}, "eval_every": 2, "epochs": 3, "lr": 5.0}
    assert pt.find_rate(job, **bounds, **more) == pt.find_rate(job, **bounds)  # type: ignore[arg-type]


def test_smoothing_has_no_bias_and_a_growing_loss_ends_the_test() -> None:
    found = RateRange()
    assert not any(found.add(rate, 2.0) for rate in (1.0, 2.0, 3.0))
    assert found.losses == pytest.approx([2.0] * 3)
    assert (found.least, found.steepest) == (1.0, 1.0)
    assert [found.add(4.0, 20.0), found.add(5.0, 0.0)] == [True, True]
    assert found.rates == [1.0, 2.0, 3.0, 4.0]


def test_a_loss_that_is_not_finite_ends_the_test() -> None:
    found = RateRange()
    assert [found.add(1.0, 1.0), found.add(2.0, math.nan)] == [False, True]
    with pytest.raises(ValueError, match="not finite in the first step"):
        RateRange().check("mine")


@pytest.mark.parametrize(
    "strategy",
    ["sync_sgd", "downpour()", "hogwild", "gpipe(stages=2)", "local_sgd(period=4)", "diloco(period=4)"],
)
def test_every_kind_of_strategy_has_a_rate(strategy: str) -> None:
    job = pt.jobs.find("digits")
    found = pt.find_rate(job, strategy, 2, steps=40)
    assert job.lr / 1e3 <= found.suggested <= job.lr * 10
    assert found.rates == sorted(found.rates)
    assert len(found.rates) > 10


def test_nothing_of_the_program_changes(tmp_path: Path) -> None:
    """Later runs have the same bits, and torch goes on with the same random numbers; no file is written."""
    before = pt.simulate("digits", "local_sgd(period=4)", 2, steps=6)
    torch.manual_seed(5)
    state = torch.get_rng_state()
    pt.find_rate("digits", "local_sgd(period=4)", 2, steps=20)
    assert torch.equal(torch.get_rng_state(), state)
    assert pt.simulate("digits", "local_sgd(period=4)", 2, steps=6).parameters_sha256 == before.parameters_sha256


def test_callbacks_of_scores_are_left_out() -> None:
    """Nothing is scored; other callbacks are in the run."""
    steps = list[int]()

    class Steps(pt.callbacks.Callback):
        def on_step(self, facts: pt.callbacks.CallbackFacts) -> None:
            steps.append(facts.step)

    scored = [pt.callbacks.early_stop(metric="accuracy"), pt.callbacks.keep(best=1)]
    found = pt.find_rate("digits", steps=10, callbacks=[*scored, Steps()])
    assert found.rates == pt.find_rate("digits", steps=10).rates
    assert steps


@pytest.mark.parametrize(
    "wrong", [{"lowest": 1.0, "highest": 0.5}, {"lowest": 0.0}, {"lowest": -1.0}, {"highest": math.inf}, {"steps": 9}]
)
def test_impossible_bounds_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="give 0 < lowest < highest"):
        pt.find_rate("digits", **wrong)  # type: ignore[arg-type]


asked = asking("tune", "rate")


def test_the_command_prints_the_next_command_and_draws(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    out, _ = asked(capsys, "digits", "--steps", "30", "--picture", str(tmp_path / "rate.png"), "--batch-size", "64")
    assert out.startswith("polytempo train digits --strategy 'sync_sgd' --workers 1 --batch-size 64 --lr ")
    assert "least" in out
    assert (tmp_path / "rate.png").read_bytes().startswith(b"\x89PNG")
    out, _ = asked(capsys, "digits", "--steps", "30", "--json")
    told = json.loads(out)
    assert told["suggested"] == min(told["steepest"], told["least"] / 10)
    assert len(told["rates"]) == len(told["losses"])


def test_the_command_refuses_a_picture_that_is_no_png(capsys: pytest.CaptureFixture[str]) -> None:
    _, err = asked(capsys, "digits", "--picture", "rate.gif", code=2)
    assert "ends in .png" in err
