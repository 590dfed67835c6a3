"""`PipeMare`, `SpecTrain` and `Estimation`: remedies of a stage for late or missing gradients, as plain data."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from torch import nn
from torch.optim import Optimizer


@dataclass(frozen=True, repr=False)
class PipeMare:
    """Smaller steps the later a stage's gradients are, at first; and backward passes with parameters as they were.

    T1  lr(t) = lr / max(1, τ)^p,    p = 1 - min(t / anneal_steps, 1)          t updates so far, τ updates of delay
    T2  δ ← γ δ + (1 - γ) (w(t+1) - w(t)),    γ = D^(1/τ)                      with D = `decay` > 0
        a backward pass multiplies by w(t) - τ δ

    Source: B. Yang et al., "PipeMare: asynchronous pipeline parallel DNN training", 2021: learning rate rescheduling
    (T1), discrepancy correction (T2); its τ_fwd - τ_bkwd is τ here, for a backward pass has the present parameters.
    Deviations: τ counts the updates between a batch's forward pass and its own update, 2(K - 1 - k) in a pipeline that
    streams; the paper's 2(P - i) + 1 counts that update, too. Epochs of a synchronous warm-up (T3) are left out.
    """

    anneal_steps: int
    decay: float = 0.0
    """D, 0 to 1: the part of a change of the parameters that is still in δ after τ updates. 0: no correction back."""

    def __post_init__(self) -> None:
        if self.anneal_steps < 1 or not 0 <= self.decay < 1:
            raise ValueError(
                "pipemare needs anneal_steps of 1 or more and a decay from 0 to 1, got "
                f"anneal_steps={self.anneal_steps} and decay={self.decay}"
            )

    def __repr__(self) -> str:
        return f"pipemare(anneal_steps={self.anneal_steps}, decay={self.decay})"

    def rate(self, updates: int, delay: int) -> float:
        """The factor of the learning rate after so many updates."""
        power = max(0.0, 1 - updates / self.anneal_steps)
        return float(max(1, delay) ** -power)

    def smoothing(self, delay: int) -> float:
        """The part of δ that stays in each update."""
        return float(self.decay ** (1 / delay))


@dataclass(frozen=True, repr=False)
class SpecTrain:
    """Forward passes with the parameters that a batch's own update will find, as momentum predicts them.

        ŵ = w - s η v         s updates until this batch's, the stage's delay; v: SGD's momentum; η: its learning rate

    A backward pass has the present parameters: then s is 0. The optimizer is SGD with momentum; v is torch's buffer, μ
    v + (1 - dampening) g; the paper's γ v + (1 - γ) g is the case dampening = μ. Nesterov's addition to a step is not
    predicted.

    Source: C.-C. Chen et al., "Efficient and robust parallel DNN training through model parallelism on multi-GPU
    platform", 2018, the prediction of weights s versions ahead. Deviation: the paper counts s for a pipeline with
    stages that take turns, ⌊k/2⌋ + N - k - 1 forward and ⌊k/2⌋ back; here s is counted from the schedule, by each
    stage's own updates, and a batch is predicted the same version at every stage.
    """

    def __repr__(self) -> str:
        return "spectrain()"


Correction = PipeMare | SpecTrain


def pipemare(anneal_steps: int, decay: float = 0.0) -> PipeMare:
    """Learning rates by delay; see `PipeMare`. The paper's experiments have a `decay` of 0.1 to 0.5."""
    return PipeMare(anneal_steps, decay)


def spectrain() -> SpecTrain:
    """Weight prediction by momentum; see `SpecTrain`."""
    return SpecTrain()


Shape = tuple[int, ...]
Make = Callable[[Shape, int], nn.Module]
"""(shape of one sample's output, number of classes) -> `module(h)` or, with classes, `module(h, labels)`: h of
(samples, *shape), labels of (samples, classes), one-hot; the answer has the shape of h."""


@dataclass(frozen=True)
class Estimation:
    """The estimators M of a pipeline, one for each tensor that crosses a cut, and how they learn.

    Without `make`: layers on the last dimension, or 3 × 3 convolutions on maps (samples, channels, height, width);
    `hidden_layers` of `width` features with ReLU, then a layer that begins with zeros.
    """

    classes: int = 0
    """Labels are given to the estimators, one-hot among so many classes; 0: they are not."""
    hidden_layers: int = 0
    width: int = 256
    lr: float = 1e-3
    make: Make | None = None
    optimizer: Callable[[Iterable[nn.Parameter]], Optimizer] | None = None
    """None: Adam with `lr`."""

    def __post_init__(self) -> None:
        if self.classes < 0 or self.hidden_layers < 0 or self.width < 1 or self.lr < 0:
            raise ValueError(
                "an estimator needs classes, hidden_layers and lr of 0 or more and a width of 1 or more, got "
                f"classes={self.classes}, hidden_layers={self.hidden_layers}, lr={self.lr}, width={self.width}"
            )
