"""Digits by late and estimated gradients, one seed: the short version of `benchmarks/pipeline/convergence.py`."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from benchmark_module import benchmark

convergence = benchmark("pipeline/convergence.py")
SETTING = convergence.DIGITS._replace(layers=(64, 48, 48, 48, 10))
MAKES = convergence.LATE | convergence.ESTIMATED
EPOCHS = 8


def error(name: str, lr: float, setting: Any = SETTING) -> float:
    found: float = convergence.error_of(setting, MAKES[name](4), lr, EPOCHS, seed=0)
    return found


def test_gradients_that_are_six_updates_late_learn_at_a_small_rate_and_not_at_a_large_one() -> None:
    """Back-propagation learns at both."""
    plain = error("back-propagation", 0.003)
    assert plain < 0.08
    assert error("pipelined_backprop", 0.003) < plain + 0.06
    assert error("back-propagation", 0.05) < 0.2
    assert error("pipelined_backprop", 0.05) > 0.5


def test_estimated_gradients_learn_with_labels_nearly_as_well_as_true_ones_and_better_than_without() -> None:
    by_adam = SETTING._replace(optimizer=convergence.MNIST.optimizer)
    plain = error("back-propagation", 0.001, by_adam)
    with_labels = error("synthetic_gradients, labels", 0.001, by_adam)
    assert plain < 0.08
    assert with_labels < plain + 0.04
    assert with_labels < error("synthetic_gradients", 0.001, by_adam)


def test_estimated_gradients_correlate_with_true_ones_on_digits_that_were_not_trained_on() -> None:
    """More than 0.5, where the estimators know the labels, at each of two hidden layers."""
    by_adam = SETTING._replace(layers=(64, 48, 48, 10), optimizer=convergence.MNIST.optimizer)
    schedule = MAKES["synthetic_gradients, labels"](3)
    model, parts, stages = convergence.trained_by(by_adam, schedule, 0.001, EPOCHS, seed=0)
    x, y = by_adam.data().test
    first = model[:2](x).detach().requires_grad_()
    second = model[2:4](first)
    second.retain_grad()
    nn.functional.cross_entropy(model[4:](second), y).backward()
    for stage, h in enumerate((first, second)):
        [name] = parts.stages[stage].gives
        estimators = stages[stage].estimators
        estimators.see(-1, {name: h.detach()}, y)
        [estimate] = estimators.estimates(-1, [name])
        assert h.grad is not None
        correlation = float(torch.corrcoef(torch.stack([estimate.flatten(), h.grad.flatten()]))[0, 1])
        assert correlation > 0.5, (stage, correlation)
