"""Synthetic gradients at work in the virtual world: the rule written by hand, with labels and zeros."""

from __future__ import annotations

from copy import deepcopy

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD

from pipelines import batches, perceptron, plainly_trained, trained
from polytempo.partition.schedules import synthetic_gradients
from polytempo.partition.schedules.correction import Estimation
from polytempo.partition.schedules.facts import facts
from polytempo.training.pipeline.late.estimators import Estimators, GradientEstimator


@pytest.mark.parametrize("stages", [2, 4])
def test_the_rule_is_the_one_written_by_hand(stages: int) -> None:
    steps, lr, estimator_lr = 9, 0.2, 0.1
    schedule = synthetic_gradients(stages, optimizer=lambda parameters: SGD(parameters, lr=estimator_lr))
    ours = trained(schedule, steps=steps, lr=lr, momentum=0.0)
    expected, losses = by_hand(stages, steps, lr, estimator_lr)
    assert ours.losses == pytest.approx(losses, abs=1e-13)
    for mine, other in zip(ours.model.parameters(), expected, strict=True):
        torch.testing.assert_close(mine, other, rtol=0, atol=1e-13)
    assert not torch.equal(expected[0], perceptron()[0][0].weight)


def by_hand(stages: int, steps: int, lr: float, estimator_lr: float) -> tuple[list[Tensor], list[float]]:
    """W(k), b(k) after `steps` steps, and the losses, without autograd: h = tanh(W h + b) and n δ̂ = A h + c.

    The estimator that estimates for batch t has learnt by the batches before t - 1.
    """
    layers = [(layer[0].weight.detach().clone(), layer[0].bias.detach().clone()) for layer in perceptron()]
    each = len(layers) // stages
    estimators = [(torch.zeros_like(w), torch.zeros_like(b)) for w, b in layers[: stages - 1]]
    targets: list[tuple[Tensor, Tensor]] = []
    losses = []
    for x, y in batches(steps):
        outputs = [x]
        for w, b in layers:
            outputs.append(torch.tanh(outputs[-1] @ w.t() + b))
        losses.append(float(((outputs[-1] - y) ** 2).mean()))
        sent = []
        for stage in range(stages):
            h, n = outputs[(stage + 1) * each], len(x)
            if stage == stages - 1:
                error = 2 * (h - y) / y.numel()
            else:
                a, c = estimators[stage]
                error = (h @ a.t() + c) / n
            for number in reversed(range(stage * each, (stage + 1) * each)):
                error = error * (1 - outputs[number + 1] ** 2)
                w, b = layers[number]
                layers[number] = (w - lr * error.t() @ outputs[number], b - lr * error.sum(0))
                error = error @ w
            sent.append(error)
        for stage, (h, true) in enumerate(targets):
            a, c = estimators[stage]
            off = h @ a.t() + c - len(h) * true
            estimators[stage] = (
                a - estimator_lr * 2 / len(h) * off.t() @ h,
                c - estimator_lr * 2 / len(h) * off.sum(0),
            )
        targets = [(outputs[(stage + 1) * each], sent[stage + 1]) for stage in range(stages - 1)]
    return [tensor for pair in layers for tensor in pair], losses


def test_stages_before_an_estimator_of_zero_do_not_move() -> None:
    ours = trained(synthetic_gradients(4, lr=0.0, hidden_layers=1), steps=8)
    for number, (mine, first) in enumerate(zip(ours.model, perceptron(), strict=True)):
        assert torch.equal(mine[0].weight, first[0].weight) == (number < 6)


def test_estimators_learn_what_plain_back_propagation_sends() -> None:
    """One batch again and again, and hidden layers that stand still: the estimate becomes the true gradient."""
    torch.manual_seed(0)
    own = Estimators(Estimation(lr=0.02))
    h, true = torch.randn(4, 6, dtype=torch.float64), torch.randn(4, 6, dtype=torch.float64)
    own.see(0, {"h": h}, None)
    assert torch.equal(own.estimates(0, ["h"])[0], torch.zeros_like(h))
    for number in range(1500):
        own.see(number, {"h": h}, None)
        own.descend(number, {"h": true})
        next(iter(own._optimizers.values())).step()
        own.modules.zero_grad()
    own.see(0, {"h": h}, None)
    torch.testing.assert_close(own.estimates(0, ["h"])[0], true, rtol=0, atol=1e-3)


def test_no_update_is_late_and_the_targets_are_one_batch_late() -> None:
    found = [facts(synthetic_gradients(4), stage) for stage in range(4)]
    assert [each.delay for each in found] == [0, 0, 0, 0]
    assert [each.target_delay for each in found] == [1, 1, 1, 0]
    assert [each.versions for each in found] == [1, 1, 1, 1]
    one = trained(synthetic_gradients(1))
    assert one.losses == plainly_trained().losses


def test_estimators_of_vectors_sequences_and_maps_take_labels() -> None:
    labels = nn.functional.one_hot(torch.tensor([0, 2]), 3).float()
    for shape in ((5,), (4, 5), (5, 4, 4)):
        module = GradientEstimator(shape, classes=3, hidden_layers=1, width=7)
        h = torch.randn(2, *shape)
        assert torch.equal(module(h, labels), torch.zeros_like(h))
        nn.init.ones_(module.body[-1].weight)
        assert not torch.equal(module(h, labels), module(h, labels.flip(0)))


def test_estimators_go_on_from_their_state() -> None:
    def seen(own: Estimators, number: int) -> Tensor:
        own.see(number, {"a.b": h}, None)
        own.descend(number, {"a.b": true})
        next(iter(own._optimizers.values())).step()
        own.modules.zero_grad()
        own.see(-1, {"a.b": h}, None)
        [found] = own.estimates(-1, ["a.b"])
        assert found is not None
        return found

    h, true = torch.randn(4, 6), torch.randn(4, 6)
    first, second = Estimators(Estimation(hidden_layers=1), seed=1), Estimators(Estimation(hidden_layers=1), seed=2)
    seen(first, 0)
    first.see(7, {"a.b": h}, None)
    second.restore(deepcopy(first.state()).at("here").under("here"))  # as from a file
    assert torch.equal(seen(first, 1), seen(second, 1))
    assert torch.equal(second.estimates(7, ["a.b"])[0], first.estimates(7, ["a.b"])[0])


@pytest.mark.parametrize(
    ("target", "words"),
    [
        (torch.zeros(2), r"one integer a sample; got \(2,\) torch.float32"),
        ("text", "got str"),
        (torch.tensor([0, 3]), "a label is 3, and the estimators know classes=3"),
    ],
)
def test_targets_that_are_no_labels_are_refused(target: object, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Estimators(Estimation(classes=3)).see(0, {"h": torch.zeros(2, 4)}, target)


def test_what_no_estimator_is_for_is_refused() -> None:
    with pytest.raises(ValueError, match=r"no estimator is known for outputs of shape \(1, 2, 3, 4\)"):
        Estimators(Estimation()).see(0, {"h": torch.zeros(2, 1, 2, 3, 4)}, None)
    with pytest.raises(ValueError, match="lr of 0 or more"):
        synthetic_gradients(2, lr=-1.0)
    own = Estimators(Estimation(make=lambda shape, classes: nn.Linear(4, 3)))
    own.see(0, {"h": torch.zeros(2, 4)}, None)
    with pytest.raises(ValueError, match=r"that of h has answered \(2, 3\)"):
        own.estimates(0, ["h"])
