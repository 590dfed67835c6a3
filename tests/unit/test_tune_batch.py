"""`polytempo tune batch`: its result in a known case, its output, and its refusals."""

from __future__ import annotations

import json
import math
import shlex
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import polytempo as pt
from command_output import asking
from polytempo.spec.job_calls import data_of
from polytempo.training.tuning.batch_advice import advise_batch, range_test
from polytempo.training.tuning.trial import Trial

JOB = """
import torch
from torch import nn
from torch.utils.data import TensorDataset
import polytempo as pt

x = torch.randn(256, 4, generator=torch.Generator().manual_seed(0))
train = TensorDataset(x, x.sum(1, keepdim=True) + torch.randn(256, 1, generator=torch.Generator().manual_seed(1)))

job = pt.Job(
    model=lambda: nn.Linear(4, 1),
    data=lambda path: pt.Data(train),
    loss=nn.functional.mse_loss,
    optimizer=lambda parameters, lr: torch.optim.SGD(parameters, lr=lr),
    batch_size=16, lr=0.02, epochs=4, name="noisy",
)
"""


def noisy(tmp_path: Path, lr: float = 0.02) -> pt.Job:
    """A line with noise, from a file."""
    (tmp_path / "noisy.py").write_text(JOB.replace("lr=0.02", f"lr={lr}"), encoding="utf-8")
    return pt.jobs.find(f"{tmp_path}/noisy.py:job")


def far(samples: int = 4096) -> pt.Job:
    """θ is 2 from its goal in each of 4 dims: gradients are (θ - x) with x ~ N(0, I), so |G|² = 16 and tr Σ = 4."""
    x = torch.randn(samples, 4, generator=torch.Generator().manual_seed(0))
    return pt.Job(
        model=lambda: Mean(),
        data=lambda folder: pt.Data(TensorDataset(x, x)),
        loss=lambda output, target: (output - target).square().sum(1).mean() / 2,
        optimizer=lambda parameters, lr: torch.optim.SGD(parameters, lr=lr),
        batch_size=64,
        lr=1e-9,
        epochs=1,
    )


class Mean(nn.Module):
    """A point that all samples are answered with."""

    def __init__(self) -> None:
        super().__init__()
        self.point = nn.Parameter(torch.full((4,), 2.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.point.expand_as(x)


def test_the_noise_scale_of_gaussian_gradients_is_found() -> None:
    """4 / 16 of a sample; the rate is so small that the point stays."""
    job = far()
    trial = Trial(job, data_of(job, None), batch=64, parts=8)
    trial.train(4096)
    of_gradient = sum(each.of_gradient for each in trial.noise) / len(trial.noise)
    of_noise = sum(each.of_noise for each in trial.noise) / len(trial.noise)
    assert of_gradient == pytest.approx(16, rel=0.05)
    assert of_noise == pytest.approx(4, rel=0.05)


def test_parts_make_the_step_of_the_whole_batch(tmp_path: Path) -> None:
    job = noisy(tmp_path)
    data = data_of(job, None)
    whole, parts = (Trial(job, data, batch=16, parts=count) for count in (1, 4))
    for trial in (whole, parts):
        trial.train(300)
    assert (whole.samples, whole.steps) == (parts.samples, parts.steps) == (304, 19)
    for a, b in zip(whole.model.parameters(), parts.model.parameters(), strict=True):
        assert torch.allclose(a, b, atol=1e-6)


def test_the_range_test_stops_where_descent_does(tmp_path: Path) -> None:
    """Gradient descent on ½ h w² diverges beyond 2 / h; the loss here has h = 2."""
    job = noisy(tmp_path)
    found = range_test(job, data_of(job, None), batch=64, steps=60)
    assert 0.05 < found.top < 2
    assert found.rates[-1] < 20, "it ends soon after the loss grows"
    assert found.samples == 64 * len(found.rates) or not math.isfinite(found.losses[-1])


def test_advice_keeps_its_budget_and_says_what_it_stands_on(tmp_path: Path) -> None:
    job = noisy(tmp_path)
    found = advise_batch(job, data_of(job, None), workers=2, budget=4.0)
    assert found.global_batch_size == 2 * found.batch_size
    assert found.global_batch_size <= max(2, 0.1 * found.noise.second)
    assert found.samples <= 1.3 * 4 * job.epochs * 256
    rates = [each.lr for each in found.tried]
    assert found.range.top < found.noise.lr == job.lr  # of two samples a step the range test sees noise
    assert sorted(rates, reverse=True) == pytest.approx([job.lr / 2**k for k in range(6)])
    assert found.lr == rates[-1]
    assert found.tried[-1].samples == max(each.samples for each in found.tried)
    assert any("one seed" in sentence for sentence in found.unsure)


def test_a_job_that_diverges_is_tried_with_smaller_rates_and_refused_by_name(tmp_path: Path) -> None:
    job = noisy(tmp_path, lr=1e5)
    with pytest.raises(ValueError, match="job noisy: training diverges with lr=100000, and with a hundredth of it"):
        advise_batch(job, data_of(job, None), workers=2)


def test_losses_below_zero_are_advised_on_as_those_above(tmp_path: Path) -> None:
    """The same job with 100 less of a loss: gradients are the same, so the advice is."""
    job = noisy(tmp_path)
    data = data_of(job, None)
    below = replace(job, loss=lambda output, target: nn.functional.mse_loss(output, target) - 100)
    one, other = (advise_batch(each, data, workers=2) for each in (job, below))
    assert max(each.loss for each in other.tried) < 0
    assert other.noise == pytest.approx(one.noise)
    assert (other.global_batch_size, other.noise.lr) == (one.global_batch_size, job.lr)


asked = asking("tune", "batch")


def test_what_it_prints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    noisy(tmp_path)
    monkeypatch.chdir(tmp_path)
    url = "https://me:key@host/a&b.csv?signed=1"
    options = ("--data", url, "--workers", "4", "--budget", "2", "--out", "tune", "--ui")
    out, err = asked(capsys, "noisy.py:job", *options)
    assert err.startswith("live page: http://127.0.0.1:")
    kept = json.loads((tmp_path / "tune" / "tune.trials.json").read_text())["command"]
    for command, data in ((out, url), (kept, "https://host/a&b.csv")):
        given = ["--data", data, "--workers", "4", "--global-batch-size"]
        assert shlex.split(command.partition("\n")[0])[:8] == ["polytempo", "train", "noisy.py:job", *given]
    for said in ("samples in a step", "learning rate", "workers that pay", "noise scale", "range test", "Unsure:"):
        assert said in out
    plain = json.loads(asked(capsys, "noisy.py:job", "--budget", "2", "--json")[0])
    assert plain["global_batch_size"] == plain["workers"] * plain["batch_size"]
    assert plain["command"].startswith("polytempo train noisy.py:job")
    assert len(plain["tried"]) == 6


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("dogits",), "no job 'dogits'"),
        (("digits", "--workers", "0"), "--workers 0: must be a "),
        (("digits", "--extra", "0"), "--extra 0: must be a "),
        (("digits", "--budget", "-1"), "--budget -1: must be a "),
        (("digits", "--seed", "-1"), "--seed -1: must be a "),
        (("digits", "--ui"), "--ui needs --out, to show its files; add --out runs/tune"),
    ],
)
def test_what_cannot_be_asked(arguments: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert said in asked(capsys, *arguments, code=2)[1]
