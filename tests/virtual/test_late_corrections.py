"""PipeMare and SpecTrain at work in the virtual world, against their rules written by hand."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.optim import Adam

from pipelines import batches, perceptron, plainly_trained, trained
from polytempo.partition.schedules import Schedule, ddg, features_replay, pipedream, pipelined_backprop
from polytempo.partition.schedules.correction import Correction, PipeMare, pipemare, spectrain
from polytempo.training.pipeline.late.late_stage import late_stage

STEPS, LR, MOMENTUM = 12, 0.1, 0.6
CORRECTIONS: dict[str, Correction] = {
    "rates": pipemare(anneal_steps=7),
    "rates and backward passes": pipemare(anneal_steps=7, decay=0.3),
    "predicted parameters": spectrain(),
}
MAKES: dict[str, tuple[Callable[..., Schedule], int]] = {
    "ddg": (lambda stages, correction: ddg(stages, weights="current", correction=correction), 1),
    "pipelined_backprop": (lambda stages, correction: pipelined_backprop(stages, correction=correction), 2),
}


@pytest.mark.parametrize("stages", [2, 4])
@pytest.mark.parametrize("make", MAKES)
@pytest.mark.parametrize("name", CORRECTIONS)
def test_a_correction_is_the_rule_written_by_hand(name: str, make: str, stages: int) -> None:
    schedule, distance = MAKES[make]
    correction = CORRECTIONS[name]
    ours = trained(schedule(stages, correction), steps=STEPS, lr=LR, momentum=MOMENTUM)
    expected, losses = by_hand(stages, distance, correction)
    assert ours.losses == pytest.approx(losses, abs=1e-13)
    for mine, other in zip(ours.model.parameters(), expected, strict=True):
        torch.testing.assert_close(mine, other, rtol=0, atol=1e-13)
    uncorrected = trained(schedule(stages, None), steps=STEPS, lr=LR, momentum=MOMENTUM)
    late_by_one = distance * (stages - 1) == 1  # PipeMare's rates are then the optimizer's own
    assert (uncorrected.losses != ours.losses) == (name != "rates" or not late_by_one)


class Layer:
    """W and b after 0, 1, 2, … updates, and the memory of them; pairs are of W and of b."""

    def __init__(self, w: Tensor, b: Tensor, delay: int) -> None:
        self.versions, self.delay = [(w, b)], delay
        self.momentum = [(torch.zeros_like(w), torch.zeros_like(b))]
        self.moved = [torch.zeros_like(w), torch.zeros_like(b)]


def by_hand(stages: int, distance: int, correction: Correction) -> tuple[list[Tensor], list[float]]:
    """Parameters after the last step, and the losses: h = tanh(W h + b), layer by layer, without autograd.

    Stage k forwards batch t after max(0, t - d(k)) updates, and its t-th update is by batch t's gradient.
    """
    model = perceptron()
    each = len(model) // stages
    layers = [
        Layer(own[0].weight.detach().clone(), own[0].bias.detach().clone(), distance * (stages - 1 - number // each))
        for number, own in enumerate(model)
    ]
    losses = []
    for step, (x, y) in enumerate(batches(STEPS)):
        outputs = [x]
        for layer in layers:
            w, b = forward_values(layer, max(0, step - layer.delay), correction)
            outputs.append(torch.tanh(outputs[-1] @ w.t() + b))
        losses.append(float(((outputs[-1] - y) ** 2).mean()))
        error = 2 * (outputs[-1] - y) / y.numel()
        for number in reversed(range(len(layers))):
            layer = layers[number]
            error = error * (1 - outputs[number + 1] ** 2)
            gradients = error.t() @ outputs[number], error.sum(0)
            w = layer.versions[step][0]
            if isinstance(correction, PipeMare) and correction.decay and layer.delay:
                w = w - layer.delay * layer.moved[0]
            update(layer, gradients, step, correction)
            error = error @ w
    ended = [layer.versions[max(0, STEPS - layer.delay)] for layer in layers]
    return [tensor for pair in ended for tensor in pair], losses


def forward_values(layer: Layer, version: int, correction: Correction) -> tuple[Tensor, Tensor]:
    (w, b), (of_w, of_b) = layer.versions[version], layer.momentum[version]
    ahead = 0.0 if isinstance(correction, PipeMare) else layer.delay * LR
    return w - ahead * of_w, b - ahead * of_b


def update(layer: Layer, gradients: tuple[Tensor, Tensor], step: int, correction: Correction) -> None:
    rate = LR
    if isinstance(correction, PipeMare) and layer.delay:
        rate = LR / max(1, layer.delay) ** max(0.0, 1 - step / correction.anneal_steps)
    now, velocities = layer.versions[step], layer.momentum[step]
    velocities = tuple(MOMENTUM * v + g for v, g in zip(velocities, gradients, strict=True))
    layer.momentum.append(velocities)
    layer.versions.append(tuple(p - rate * v for p, v in zip(now, velocities, strict=True)))
    if isinstance(correction, PipeMare) and correction.decay and layer.delay:
        kept = correction.decay ** (1 / layer.delay)
        layer.moved = [
            kept * moved + (1 - kept) * (after - before)
            for moved, after, before in zip(layer.moved, layer.versions[-1], now, strict=True)
        ]


def test_nothing_is_corrected_where_nothing_is_late() -> None:
    for correction in CORRECTIONS.values():
        assert trained(pipelined_backprop(1, correction=correction)).losses == plainly_trained().losses


@pytest.mark.parametrize("make", [ddg, pipedream, features_replay])
def test_rates_go_with_every_late_schedule(make: Callable[..., Schedule]) -> None:
    """Far from the end of the annealing the first stage's rate is a third."""
    slow = trained(make(4, correction=pipemare(10**9)), steps=8, momentum=0.0)
    plain = trained(make(4), steps=8, momentum=0.0)
    first = perceptron()[0][0].weight.detach()
    moved, moved_plainly = ((each.model[0][0].weight.detach() - first).norm() for each in (slow, plain))
    assert float(moved / moved_plainly) == pytest.approx(1 / 3, rel=0.05)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: ddg(2, correction=spectrain()), r'spectrain\(\).* of ddg with weights="stashed" are given; use'),
        (lambda: pipedream(2, correction=pipemare(10, decay=0.1)), "or pipemare without decay"),
        (lambda: features_replay(2, correction=pipemare(10, decay=0.1)), "are computed again are given"),
        (lambda: pipemare(0), "got anneal_steps=0"),
        (lambda: pipemare(10, decay=1.5), "decay=1.5"),
        (lambda: trained(pipelined_backprop(2, correction=spectrain()), momentum=0.0), "use torch.optim.SGD with mom"),
    ],
)
def test_what_cannot_be_corrected_is_refused(make: Callable[[], object], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        make()


@pytest.mark.parametrize("stage", [0, 1])
def test_an_optimizer_without_momentum_is_refused_on_every_stage(stage: int) -> None:
    """Also on the last one, where nothing is late, and which would wait for the others."""
    layer = torch.nn.Linear(2, 2)
    with pytest.raises(ValueError, match=r"use torch\.optim\.SGD with mom"):
        late_stage(
            pipelined_backprop(2, correction=spectrain()), stage, [*layer.parameters()], Adam(layer.parameters())
        )
