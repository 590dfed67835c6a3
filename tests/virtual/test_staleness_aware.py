"""Zhang et al. 2016: with many stale gradients a fixed rate learns nothing; divided by τ it learns as if alone.

Divided by √τ it learns nothing either; divided by τ² it learns more slowly.

Digits, a perceptron 64 - 64 - 10, 30 learners with 8 samples a gradient, 40 epochs; plain SGD with α₀ = 1 is near the
edge of synchronous training (with a small α₀ everything would learn, and the test would show nothing).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from polytempo import data
from polytempo.core.rule import Staleness
from polytempo.server.rules.asynchronous import softsync
from polytempo.server.rules.staleness import constant, inverse, power
from virtual.learners import Desk, simulate

Array = npt.NDArray[np.float32]

LEARNERS, BATCH, RATE, EPOCHS = 30, 8, 1.0, 40
SHAPES = ((64, 64), (64,), (64, 10), (10,))


class Perceptron:
    """64 - 64 - 10 with ReLU, softmax and cross-entropy; its parameters are views of one flat vector."""

    def __init__(self, flat: Array) -> None:
        ends = np.cumsum([int(np.prod(shape)) for shape in SHAPES])
        self.flat = flat
        parts = np.split(flat, ends[:-1])
        self.w1, self.b1, self.w2, self.b2 = (p.reshape(s) for p, s in zip(parts, SHAPES, strict=True))

    def hidden(self, images: Array) -> Array:
        return np.maximum(images @ self.w1 + self.b1, 0)

    def error(self, images: Array, labels: npt.NDArray[np.int64]) -> float:
        return float(np.mean((self.hidden(images) @ self.w2 + self.b2).argmax(axis=1) != labels))

    def gradient(self, images: Array, labels: npt.NDArray[np.int64]) -> Array:
        """The gradient of the mean loss, flat."""
        hidden = self.hidden(images)
        scores = hidden @ self.w2 + self.b2
        wrong = np.exp(scores - scores.max(axis=1, keepdims=True))
        wrong /= wrong.sum(axis=1, keepdims=True)
        wrong[np.arange(len(labels)), labels] -= 1
        wrong /= len(labels)
        behind = (wrong @ self.w2.T) * (hidden > 0)
        return np.concatenate([(images.T @ behind).ravel(), behind.sum(0), (hidden.T @ wrong).ravel(), wrong.sum(0)])


def start(random: np.random.Generator) -> Perceptron:
    """torch's: uniform within 1/√inputs."""
    return Perceptron(random.uniform(-1 / 8, 1 / 8, sum(int(np.prod(s)) for s in SHAPES)).astype(np.float32))


def trained_error(scale: Staleness, seed: int) -> float:
    """The test error, under 30-softsync: c = 1, mean staleness 29."""
    random = np.random.default_rng(seed)
    split = data.digits()
    images, labels = (t.numpy() for t in split.train.tensors)
    model = start(random)
    order = np.concatenate([random.permutation(len(labels)) for _ in range(EPOCHS + 1)])
    batches = iter(order[: len(order) // BATCH * BATCH].reshape(-1, BATCH))

    def gradient() -> Array:
        picks = next(batches)
        return model.gradient(images[picks], labels[picks])

    def average(summed: list[tuple[float, Any]], divisor: float) -> None:
        for factor, part in summed:
            np.subtract(model.flat, RATE * factor / divisor * part, out=model.flat)

    desk = Desk(softsync(LEARNERS, scale), average, tuple(range(LEARNERS)))
    pushes = EPOCHS * len(labels) // BATCH
    simulate(desk, lambda worker: random.uniform(0.5, 1.5), lambda run: len(run.staleness) >= pushes, gradient)
    return model.error(*(t.numpy() for t in split.test.tensors))


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_a_fixed_rate_fails_and_the_rate_over_tau_learns(seed: int) -> None:
    with np.errstate(over="ignore", invalid="ignore"):
        assert trained_error(constant, seed) > 0.8
        assert trained_error(power(0.5), seed) > 0.8
    assert trained_error(inverse, seed) <= 0.03


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_rate_over_the_square_of_tau_learns_more_slowly(seed: int) -> None:
    """4.7, 5.8 and 6.4 % where 1/τ has 1.9, 1.7 and 1.4 %: a step has 1/29 of the rate that 1/τ leaves."""
    assert 0.03 < trained_error(power(2), seed) <= 0.08
