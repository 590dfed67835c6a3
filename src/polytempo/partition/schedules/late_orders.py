"""Schedules that do not wait: each step a stage takes one batch forward, and an older one back. No bubble.

Stage k of K (0 is the first) updates by the gradient of a batch d(k) steps after it has forwarded it:

    ddg, features_replay, pipedream    d(k) = K - 1 - k
        stage 0   F0 F1 F2 .  .  B0 F3 B1 F4 B2 …
        stage 1   .  F0 F1 .  B0 F2 B1 F3 B2 F4 B3 …
        stage 2   .  .  F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 …
    pipelined_backprop                 d(k) = 2(K - 1 - k)        messages may take as long as a batch in a stage
    pipedream_2bw                      one update everywhere

They differ in the parameters of a late backward pass (`Schedule.weights`). `correction` is a stage's remedy for the
delay: `pipemare` or `spectrain`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Literal

from torch import nn
from torch.optim import Optimizer

from polytempo.partition.schedules.action import Action, Order, Schedule, Weights
from polytempo.partition.schedules.correction import Correction, Estimation, Make

_UPDATE = Action("update")


def ddg(
    stages: int,
    *,
    weights: Literal["stashed", "current"] = "stashed",
    lockstep: bool = False,
    correction: Correction | None = None,
) -> Schedule:
    """Decoupled parallel backpropagation with delayed gradients.

        w(k) ← w(k) - γ ∇ f(x(t - d(k))),    d(k) = K - 1 - k

    `weights`: "stashed" evaluates the gradient at the parameters of the forward pass, as the theory has it; "current"
    multiplies by the present ones on the way back, as the authors' code does. With `lockstep` a batch goes forward
    through all stages before the next one begins, as the paper times it: a step takes T_F + T_B / K. Without, stages
    need not wait for each other's ends, and a step takes (T_F + T_B) / K.

    Memory: stage k holds K - k batches, and with stashed parameters as many versions. Source: Z. Huo et al., "Decoupled
    parallel backpropagation with convergence guarantee", 2018.
    """
    return Schedule("ddg", stages, 1, _older_by(1), weights=weights, lockstep=lockstep, correction=correction)


def features_replay(stages: int, *, lockstep: bool = False, correction: Correction | None = None) -> Schedule:
    """DDG that keeps a batch's inputs only, and computes its activations again with the present parameters.

    Memory: one batch's activations, and K - k batches' inputs. Cost: a second forward pass. Running statistics and
    dropout masks are the first pass's. Source: Z. Huo et al., "Training neural networks using features replay", 2018.
    Deviation: the authors' code draws new dropout masks, and updates running statistics twice.
    """
    replayed = Schedule("features_replay", stages, 1, _older_by(1), weights="current", recomputes=True)
    return replace(replayed, lockstep=lockstep, correction=correction)


def pipelined_backprop(stages: int, *, stripes: int = 1, correction: Correction | None = None) -> Schedule:
    """Pipelined back-propagation: batches stream through the layers, and parameters are used as they are.

    d(k) = 2(K - 1 - k), and 0 at the top. With `stripes`, the last so many stages have each a stripe of one layer that
    is too large for one of them (`partition.striped`): d = 0 at the last one, which has the loss, and 2 at the others;
    then 4, 6, … Memory: stage k holds d(k) + 1 batches, and one version of the parameters. Source: X. Chen et al.,
    "Pipelined back-propagation for context-dependent deep neural networks", 2012.
    """
    order = _older_by(2, stripes)
    return Schedule("pipelined_backprop", stages, 1, order, weights="current", stripes=stripes, correction=correction)


def pipedream(stages: int, *, vertical_sync: bool = False, correction: Correction | None = None) -> Schedule:
    """1F1B without a flush: a backward pass uses the parameters that its forward pass has used.

        w(t + 1) = w(t) - ν ∇ f(w₁(t - K + 1), …, w_K(t))

    With `vertical_sync` a batch sees at all stages the parameters of one moment, w(t - K + 1), which costs K - k more
    versions. Memory: stage k holds K - k batches and as many versions of its parameters. Source: D. Narayanan et al.,
    "PipeDream: generalized pipeline parallelism for DNN training", 2019.
    """
    weights: Weights = "vertical" if vertical_sync else "stashed"
    return Schedule("pipedream", stages, 1, _older_by(1), weights=weights, correction=correction)


def pipedream_2bw(stages: int, micro_batches: int) -> Schedule:
    """PipeDream with two versions of the parameters: gradients of a batch of M micro-batches, one update late.

        w(t + 1) = w(t) - ν ∇ f(w(t - 1))          on every stage; one stage alone is not late

    `micro_batches` is at least `stages` - 1. Memory: stage k holds K - k micro-batches; two versions of its parameters.
    Source: D. Narayanan et al., "Memory-efficient pipeline-parallel DNN training", 2021.
    """
    if micro_batches < stages - 1:
        raise ValueError(
            f"pipedream_2bw with stages={stages} needs at least {stages - 1} micro-batches, not {micro_batches}, for a "
            f"gradient has to come back within a step; give micro_batches={stages}"
        )
    weights: Weights = "previous" if stages > 1 else "stashed"
    return Schedule("pipedream_2bw", stages, micro_batches, _two_versions, weights=weights)


def _two_versions(stage: int, stages: int, micro_batches: int) -> tuple[Action, ...]:
    ahead = stages - 1 - stage
    actions: list[Action] = []
    for m in range(micro_batches):
        actions += [Action("forward", m), Action("backward", m - ahead)]
        if (m - ahead) % micro_batches == micro_batches - 1:
            actions.append(_UPDATE)
    return tuple(actions)


def _older_by(steps: int, stripes: int = 1) -> Order:
    """Forward, backward and update, with so many steps of delay more at each stage further from the top.

    Of stripes the last one is the top, and the others are one stage from it.
    """

    def order(stage: int, stages: int, micro_batches: int) -> tuple[Action, ...]:
        del micro_batches
        before_stripes = stages - stripes - stage
        distance = before_stripes + (stripes > 1) if before_stripes > 0 else int(stage < stages - 1)
        return Action("forward"), Action("backward", -steps * distance), _UPDATE

    return order


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
    """Decoupled neural interfaces (DNI): a stage updates immediately, by an estimate of its output's gradient.

        h = f(x; w),  δ̂ = M(h) or M(h, label),    w ← w - γ δ̂ ∂h/∂w             immediately
        δ = δ̂' ∂f'/∂h of the stage behind, with its own estimate δ̂'           sent back, one batch later
        M ← M - lr ∂/∂M ‖M(h) - δ‖²                                             L: M learns

        stage 0   F0 B0 F1 B1 L0 F2 B2 L1 F3 B3 L2
        stage 1   .  F0 B0 F1 B1 L0 F2 B2 L1 F3 B3 L2
        stage 2   .  .  F0 B0 F1 B1 .  F2 B2 .  F3 B3

    The last stage has the true gradient. The update of every stage has no delay; an estimator's target comes one batch
    late. `classes` gives estimators the label, one-hot (cDNI); the other arguments are fields of `Estimation`. An
    estimator predicts a sample's own gradient, the gradient of the batch's loss times the number of samples, so `lr`
    means the same for all sizes of batches. It begins at zero: hidden stages begin to move when it has learnt.

    Memory: one batch's activations, the outputs of two batches, one version of the parameters, and the estimators.
    Source: M. Jaderberg et al., "Decoupled neural interfaces using synthetic gradients", 2017.
    """
    estimation = Estimation(classes, hidden_layers, width, lr, estimator, optimizer)
    return Schedule("synthetic_gradients", stages, 1, _estimated, estimation=estimation)


def _estimated(stage: int, stages: int, micro_batches: int) -> tuple[Action, ...]:
    del micro_batches
    learn = (Action("learn", -1),) if stage < stages - 1 else ()
    return Action("forward"), Action("backward"), Action("update"), *learn
