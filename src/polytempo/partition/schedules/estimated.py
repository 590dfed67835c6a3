"""A schedule whose stages estimate the gradient of their output, and do not wait for it: synthetic gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from torch import nn
from torch.optim import Optimizer

from polytempo.partition.schedules.action import Action, Schedule
from polytempo.partition.schedules.estimation import Estimation, Make


def synthetic_gradients(
    stages: int,
    *,
    classes: int = 0,
    hidden_layers: int = 0,
    width: int = 256,
    lr: float = 1e-3,
    estimator: Make | None = None,
    optimizer: Callable[[Iterable[nn.Parameter]], Optimizer] | None = None,
) -> Schedule:
    """Decoupled neural interfaces (DNI): a stage updates at once, by an estimate of its output's gradient.

        h = f(x; w),  δ̂ = M(h) or M(h, label),    w ← w - γ δ̂ ∂h/∂w             at once
        δ = δ̂' ∂f'/∂h of the stage behind, whose δ̂' is estimated too            sent back, one batch later
        M ← M - lr ∂/∂M ‖M(h) - δ‖²                                             L: M learns

        stage 0   F0 B0 F1 B1 L0 F2 B2 L1 F3 B3 L2
        stage 1   .  F0 B0 F1 B1 L0 F2 B2 L1 F3 B3 L2
        stage 2   .  .  F0 B0 F1 B1 .  F2 B2 .  F3 B3

    The last stage has the true gradient. The update of every stage has no delay; an estimator's target comes one batch
    late. `classes` gives estimators the label, one-hot (cDNI); `hidden_layers`, `width`, `lr`, `estimator` and
    `optimizer` are those of `Estimation`. An estimator predicts a sample's own gradient, that of the batch's loss times
    the number of samples, so `lr` means the same for all sizes of batches. It begins at zero: hidden stages begin to
    move when it has learnt.

    Memory: one batch's activations, the outputs of two batches, one version of the parameters, and the estimators.
    Source: M. Jaderberg et al., "Decoupled neural interfaces using synthetic gradients", 2017.
    """
    estimation = Estimation(classes, hidden_layers, width, lr, estimator, optimizer)
    return Schedule("synthetic_gradients", stages, 1, _estimated, estimation=estimation)


def _estimated(stage: int, stages: int, micro_batches: int) -> tuple[Action, ...]:
    del micro_batches
    learn = (Action("learn", -1),) if stage < stages - 1 else ()
    return Action("forward"), Action("backward"), Action("update"), *learn
