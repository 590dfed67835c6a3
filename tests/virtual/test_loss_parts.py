"""Parts of a batch, each with its own loss, add up to the batch's loss, with any divisor of the loss: plain torch's."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import TensorDataset

import polytempo as pt
from pipelines import sgd, staged
from polytempo.core import Strategy
from polytempo.data.shard import DataShard
from polytempo.jobs.digits import job as digits
from polytempo.spec.objective import part_weights
from polytempo.training.job.evaluate import Evaluation, tensors_of
from polytempo.training.job.growth import next_pieces
from polytempo.training.job.training_loss import PortionLoss
from polytempo.training.model.requirements import check_loss

s = pt.strategies
CLASSES, SAMPLES, PLACES = 5, 10, 3
WEIGHT = torch.tensor([0.5, 2.0, 1.0, 3.0, 0.0], dtype=torch.float64)
random = torch.Generator().manual_seed(2)


def batch() -> tuple[Tensor, Tensor]:
    """Targets, some of them -100, and some 0; all of the first samples' are -100."""
    x = torch.randn(SAMPLES, 4, generator=random, dtype=torch.float64)
    y = torch.randint(0, CLASSES, (SAMPLES, PLACES), generator=random)
    y[torch.rand(y.shape, generator=random) < 0.3] = -100
    y[:2] = -100
    return x, y


BATCHES = [batch() for _ in range(3)]


def padded(output: Tensor, target: Tensor) -> Tensor:
    return functional.cross_entropy(output, target.clamp(min=0), ignore_index=0)


def summed(output: Tensor, target: Tensor) -> Tensor:
    return functional.cross_entropy(output, target, reduction="sum") / 50


LOSSES: dict[str, Callable[[Any, Any], Tensor]] = {
    "cross_entropy": functional.cross_entropy,
    "cross_entropy with weights": partial(functional.cross_entropy, weight=WEIGHT),
    "CrossEntropyLoss": nn.CrossEntropyLoss(weight=WEIGHT, label_smoothing=0.1),
    "a sum": partial(functional.cross_entropy, reduction="sum"),
    "a divisor of its own": pt.divided_by(padded, lambda target: (target > 0).sum()),
    "a sum of its own": pt.divided_by(summed, None),
}
each = pytest.mark.parametrize("name", LOSSES)


def model() -> nn.Module:
    torch.manual_seed(1)
    layers = (nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, CLASSES * PLACES), nn.Unflatten(1, (CLASSES, PLACES)))
    return nn.Sequential(*layers).double()


@each
@pytest.mark.parametrize("strategy", [s.one_f_one_b(2, 4), s.zero_bubble(2, 4)], ids=str)
def test_micro_batches_add_up_to_the_loss_of_the_batch(name: str, strategy: Strategy) -> None:
    loss, whole = LOSSES[name], model()
    ours = staged(model, strategy, loss, BATCHES)
    optimizer, losses = sgd(whole), []
    for x, y in BATCHES:
        optimizer.zero_grad()
        found = loss(whole(x), y)
        found.backward()
        optimizer.step()
        losses.append(float(found.detach()))
    assert ours.losses == pytest.approx(losses, rel=1e-12)
    for key, expected in whole.state_dict().items():
        torch.testing.assert_close(ours.state[key], expected, rtol=0, atol=1e-12, msg=key)


@pytest.mark.parametrize("loss", [summed, padded])
def test_a_loss_that_is_no_mean_over_samples_is_warned_of(loss: Callable[[Any, Any], Tensor]) -> None:
    """A function as loss, about which nothing is known."""
    with pytest.warns(UserWarning, match=r"pt\.divided_by"):
        staged(model, s.gpipe(2, 2), loss, BATCHES)


def test_a_mean_over_samples_is_not_warned_of() -> None:
    """Parts of other lengths, and computed again; and a loss of values without rows of samples."""
    staged(model, s.gpipe(2, 4), lambda output, y: functional.mse_loss(output[:, 0], y.double()), BATCHES)

    def turned() -> nn.Module:
        return nn.Sequential(model(), nn.Flatten(0, 1))

    staged(turned, s.gpipe(2, 2), lambda output, y: output.sum() / len(y), BATCHES)


def job(loss: Callable[[Any, Any], Tensor]) -> pt.Job:
    x, y = (torch.cat(each) for each in zip(*BATCHES, strict=True))
    return replace(
        digits, model=model, data=lambda _: pt.Data(TensorDataset(x, y), TensorDataset(x, y)), loss=loss, correct=None
    )


@each
def test_pieces_of_a_batch_that_has_grown_add_up_to_its_loss(name: str) -> None:
    own, net, whole = job(LOSSES[name]), model(), model()
    shard = DataShard(own.data(None).train, rank=0, size=1, batch_size=4, seed=3)
    shard.grow(16, 4)
    pieces = next_pieces(own, shard, iter(shard), 0, 0)
    assert pieces is not None

    def backward(part: Any, weight: float) -> Tensor:
        loss = own.loss(net(part[0]), part[1])
        (loss * weight).backward()
        return loss

    found = pieces.computed(backward)
    x, y = (torch.cat([piece.batch[place] for piece in pieces.pieces]) for place in (0, 1))
    expected = own.loss(whole(x), y)
    expected.backward()
    assert len(x) == 16
    torch.testing.assert_close(found.double(), expected.detach(), rtol=1e-6, atol=0)
    for ours, other in zip(net.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, other.grad, rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", [name for name in LOSSES if "sum" not in name])
def test_a_test_set_has_the_loss_that_it_would_have_as_one_batch(name: str) -> None:
    own, net = job(LOSSES[name]), model()
    found = Evaluation(own, net, own.data(None)).score(tensors_of(net), parts=4).loss
    x, y = (torch.cat(each) for each in zip(*BATCHES, strict=True))
    assert found == pytest.approx(float(own.loss(model()(x), y).detach()), rel=1e-12)


def test_a_loss_of_the_whole_batch_says_what_it_divides_by() -> None:
    own = job(pt.divided_by(pt.of_batch(lambda net, batch: net(batch[0]).sum()), lambda batch: batch[2]))
    assert part_weights(own, [(None, None, 1), (None, None, 3), (None, None, 0)]) == [0.25, 0.75, 0.0]
    assert part_weights(job(summed), [None]) is None


@pytest.mark.parametrize("name", ["cross_entropy with weights", "a sum", "a divisor of its own"])
@pytest.mark.parametrize("strategy", [pt.parse_strategy("sync_sgd(route=invariant)"), s.flexrr()], ids=str)
def test_slices_and_portions_count_by_samples_and_refuse_a_loss_that_does_not(name: str, strategy: Strategy) -> None:
    check_loss(functional.cross_entropy, strategy)
    check_loss(padded, strategy)
    with pytest.raises(ValueError, match="by their samples"):
        check_loss(LOSSES[name], strategy)
    own = job(LOSSES[name])
    with pytest.raises(ValueError, match="L-BFGS joins"):
        PortionLoss(own, model(), own.data(None), 0)
