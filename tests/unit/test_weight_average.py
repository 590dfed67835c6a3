"""A moving average of weights: its formula, its limits, and that a run with it is the run without it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import polytempo as pt
from polytempo.jobs.digits import job
from polytempo.large_batch import WeightAverage
from polytempo.spec.run_spec import RunSpec
from polytempo.training.job.start import replica_of

STEPS = 6


def model(dtype: torch.dtype = torch.float64) -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)).to(dtype)


def moved(each: nn.Module, step: int) -> None:
    """Weights after a step of training."""
    drawn = torch.Generator().manual_seed(step)
    with torch.no_grad():
        for parameter in each.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=drawn, dtype=torch.float64).to(parameter))


@pytest.mark.parametrize("decay", [0.9999, 0.3])
def test_the_average_is_the_papers_with_a_smaller_decay_in_the_first_steps(decay: float) -> None:
    net = model()
    average = WeightAverage(net, decay)
    expected = {name: weight.detach().clone() for name, weight in net.named_parameters()}
    for step in range(1, STEPS + 1):
        moved(net, step)
        average.update()
        keeps = min(decay, (1 + step) / (10 + step))
        expected = {n: keeps * expected[n] + (1 - keeps) * w.detach() for n, w in net.named_parameters()}
    torch.testing.assert_close(average.tensors, expected)


def test_16_bit_weights_are_averaged_in_32() -> None:
    """1 - 0.9999 added to a bfloat16 changes nothing."""
    net = model(torch.bfloat16)
    average = WeightAverage(net, 0.9999)
    average.steps = 10**6
    before = average.state_dict()["average"]["0.weight"].clone()
    moved(net, 1)
    average.update()
    after = average.state_dict()["average"]["0.weight"]
    assert (before.dtype, average.tensors["0.weight"].dtype) == (torch.float32, torch.bfloat16)
    torch.testing.assert_close(after, before.lerp(dict(net.named_parameters())["0.weight"].detach().float(), 1e-4))
    assert not torch.equal(after, before)


def test_a_model_borrows_the_average_and_has_its_own_memory_back() -> None:
    net = model()
    average = WeightAverage(net, 0.5)
    moved(net, 1)
    average.update()
    own = {name: (weight.data_ptr(), weight.detach().clone()) for name, weight in net.named_parameters()}
    with pytest.raises(KeyError), average.lent():
        _borrowed(net, average)
    for name, weight in net.named_parameters():
        assert weight.data_ptr() == own[name][0]
        assert torch.equal(weight, own[name][1])


def _borrowed(net: nn.Module, average: WeightAverage) -> None:
    """The model has the average inside; writes to it reach no other tensor."""
    for name, weight in net.named_parameters():
        assert torch.equal(weight, average.tensors[name])
    before = average.tensors["0.weight"].clone()
    with torch.no_grad():
        next(net.parameters()).zero_()
    assert torch.equal(average.tensors["0.weight"], before)
    raise KeyError


def test_an_average_is_saved_and_goes_on_and_refuses_what_is_not_its_own() -> None:
    net, twin = model(), model()
    average = WeightAverage(net, 0.9)
    moved(net, 1)
    average.update()
    again = WeightAverage(twin, 0.9)
    again.load_state_dict(average.state_dict())
    twin.load_state_dict(net.state_dict())
    for each, of in ((net, average), (twin, again)):
        moved(each, 2)
        of.update()
    for name, tensor in average.tensors.items():
        assert torch.equal(tensor, again.tensors[name])
    with pytest.raises(ValueError, match=r"the saved average has decay 0.9, and this one 0.5"):
        WeightAverage(net, 0.5).load_state_dict(average.state_dict())
    with pytest.raises(ValueError, match=r"of another model: weight differ|of another model: .*weight"):
        WeightAverage(nn.Linear(3, 4), 0.9).load_state_dict(average.state_dict())
    with pytest.raises(ValueError, match="above 0 and below 1, got 1"):
        WeightAverage(net, 1)


def test_a_mask_of_infinities_is_no_weight() -> None:
    net = nn.Linear(2, 2)
    net.mask = nn.Parameter(torch.full((2,), -torch.inf), requires_grad=False)
    assert sorted(WeightAverage(net).tensors) == ["bias", "weight"]


STRATEGIES = [
    pt.strategies.sync_sgd(),
    pt.strategies.local_sgd(period=3),
    pt.strategies.gossip(),
    pt.strategies.top_k_sgd(0.1),
]


def trained(strategy: pt.Strategy, **options: Any) -> pt.Result:
    """A virtual run of three workers."""
    return pt.simulate(job, strategy, workers=3, threads=1, **options)


@pytest.mark.parametrize("strategy", STRATEGIES, ids=str)
def test_training_does_not_see_the_average(strategy: pt.Strategy) -> None:
    """The same weights, operations and times; another score."""
    plain, averaged = (trained(strategy, ema=ema, epochs=1) for ema in (None, 0.9))
    for name in ("parameters_sha256", "trace_hash", "seconds", "steps", "samples", "train_loss"):
        assert getattr(plain, name) == getattr(averaged, name), name
    assert plain.loss != averaged.loss


@pytest.mark.parametrize("strategy", STRATEGIES[:2], ids=str)
def test_a_run_scores_and_saves_the_average_of_its_weights(strategy: pt.Strategy, tmp_path: Path) -> None:
    """Rebuilt from the weights that runs of 1, 2 and 3 steps have saved; where ranks differ, from their mean."""
    spec = RunSpec.of(job, strategy, 3, pt.RunOptions())
    expected = {name: weight.detach().clone() for name, weight in replica_of(spec)[0].named_parameters()}
    for step in (1, 2, 3):
        found = trained(strategy, steps=step, checkpoint_every=step, ema=0.9, out=tmp_path / str(step))
        weights = pt.training.checkpoint_model(tmp_path / str(step))
        keeps = (1 + step) / (10 + step)
        expected = {name: keeps * each + (1 - keeps) * weights[name] for name, each in expected.items()}
    average = job.model()
    average.load_state_dict(pt.training.checkpoint_model(tmp_path / "3", average=True))
    for name, weight in average.named_parameters():
        torch.testing.assert_close(weight.detach(), expected[name])
    samples, labels = pt.data.digits()[1].tensors
    with torch.no_grad():
        loss = nn.functional.cross_entropy(average(samples), labels)
    assert found.loss == pytest.approx(float(loss), rel=1e-5)


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"strategy": pt.strategies.downpour(), "reshape": {1: 2}}, "PT1609"),
        ({"strategy": pt.strategies.hogwild()}, "PT1603"),
        ({"strategy": pt.strategies.gpipe(stages=2)}, "PT1602"),
        ({"on_drift": "restore"}, "PT1604"),
        ({"min_workers": 1}, "PT1605"),
    ],
)
def test_what_has_no_common_weights_in_each_step_is_refused(options: dict[str, Any], why: str) -> None:
    given = {"strategy": pt.strategies.sync_sgd(), **options}
    with pytest.raises(ValueError, match=why + r".*leave out ema=0\.9"):
        pt.run(replace(job), given.pop("strategy"), 2, ema=0.9, **given)


def test_a_decay_that_is_none_is_refused() -> None:
    with pytest.raises(ValueError, match=r"ema=1\.5: must be"):
        pt.RunOptions(ema=1.5)
    with pytest.raises(ValueError, match=r"PT1321.*leave out ema=0\.9"):
        pt.simulate(job, pt.strategies.sync_sgd(), meta=True, ema=0.9)
