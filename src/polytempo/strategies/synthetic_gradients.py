"""Synthetic gradients: a stage estimates the gradient of its output, and waits for nothing."""

from __future__ import annotations

from polytempo.core import Codec, Strategy
from polytempo.partition import schedules
from polytempo.partition.staged_strategy import staged_strategy
from polytempo.strategies.sync_sgd import sync_sgd


def synthetic_gradients(
    stages: int = 2,
    classes: int = 0,
    hidden_layers: int = 0,
    width: int = 256,
    lr: float = 1e-3,
    inner: Strategy | None = None,
    activations: Codec | None = None,
    gradients: Codec | None = None,
) -> Strategy:
    """Decoupled neural interfaces (DNI): every stage updates immediately, by an estimate M(h) of its output's gradient.

    w ← w - γ M(h) ∂h/∂w                 no update is late; the last stage has the true gradient
    M ← M - lr ∂/∂M ‖M(h) - δ‖²          δ: the answer of the stage behind, by its own estimate, one batch later

    With `classes`, targets are labels, and M is given them one-hot (cDNI): without them it is far less exact. M has
    `hidden_layers` of `width`, and learns by Adam with `lr`; it begins with zeros.
    `partition.schedules.synthetic_gradients` takes networks and optimizers of one's own. The parameters of M are in
    checkpoints, and not in the model.

    An estimate that is wrong drives h on, and by a rate that back-propagation just bears the outputs grow without end.
    So under SGD take a tenth to a fifth of that rate: the shipped job digits ends in NotFinite after some 200 steps
    with its lr=0.1, and `lr=0.02` learns to 98 % as back-propagation does.

    `inner`, `activations`, `gradients` and the number of workers: as in `gpipe`. Estimators of a stage's replicas learn
    by the mean of their gradients; with a parameter server each replica has its own, which begin again with it.

    Cost: no bubble; one batch's activations, one version of the parameters; M's passes.

    Source: M. Jaderberg et al., "Decoupled neural interfaces using synthetic gradients", 2017.
    """
    schedule = schedules.synthetic_gradients(stages, classes=classes, hidden_layers=hidden_layers, width=width, lr=lr)
    return staged_strategy(synthetic_gradients, locals(), schedule, inner or sync_sgd())
