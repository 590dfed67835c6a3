"""Schedules that wait for a batch before they update: GPipe, 1F1B, interleaved 1F1B, and ZB-H1 (zero bubble).

All compute the same as one process: the mean over micro-batches of a batch's gradient, at one version of the
parameters. A bubble is the idle time of a stage, as a part of the time of a step: with equal stages, M micro-batches,
and times F and B of a forward and a backward pass of one micro-batch in one stage,

    gpipe, one_f_one_b    (K - 1) / (M + K - 1)
    interleaved           (K - 1) / (V M + K - 1)             V parts a stage
    zero_bubble           (K - 1)(F + I - W) / (M (F + I + W) + (K - 1)(F + I - W))       B = I + W
"""

from __future__ import annotations

from polytempo.partition.schedules.action import Action, Schedule

_UPDATE = Action("update")


def gpipe(stages: int, micro_batches: int, *, recompute: bool = True) -> Schedule:
    """All forward passes, then all backward passes, which are drawn twice as long here, and without recomputation.

        stage 0   F0 F1 F2 F3 .  .  .  B0    B1    B2    B3
        stage 1   .  F0 F1 F2 F3 B0    B1    B2    B3

    Memory: a stage holds M micro-batches: their inputs with `recompute`, which costs another forward pass; else all
    that autograd saves. Source: Y. Huang et al., "GPipe: efficient training of giant neural networks", 2019.
    """
    return Schedule("gpipe", stages, micro_batches, _gpipe, recomputes=recompute)


def _gpipe(stage: int, stages: int, micro_batches: int) -> tuple[Action, ...]:
    del stage, stages
    forward = [Action("forward", m) for m in range(micro_batches)]
    return (*forward, *(Action("backward", m) for m in range(micro_batches)), _UPDATE)


def one_f_one_b(stages: int, micro_batches: int) -> Schedule:
    """One backward pass for every forward pass, as soon as a micro-batch can come back.

        stage 0   F0 F1 .  .  B0    F2 B1    F3 B2    .  B3
        stage 1   .  F0 B0    F1 B1    F2 B2    F3 B3

    Memory: stage k holds at most min(K - k, M) micro-batches. Source: D. Narayanan et al., "PipeDream: generalized
    pipeline parallelism for DNN training", 2019; with a flush at the end of the batch: "Memory-efficient
    pipeline-parallel DNN training", 2021.
    """
    return Schedule("one_f_one_b", stages, micro_batches, _one_f_one_b)


def _one_f_one_b(stage: int, stages: int, micro_batches: int) -> tuple[Action, ...]:
    ahead = min(stages - 1 - stage, micro_batches)
    actions = [Action("forward", m) for m in range(ahead)]
    for m in range(ahead, micro_batches):
        actions += [Action("forward", m), Action("backward", m - ahead)]
    return (*actions, *(Action("backward", m) for m in range(micro_batches - ahead, micro_batches)), _UPDATE)


def interleaved(stages: int, micro_batches: int, parts: int = 2) -> Schedule:
    """1F1B over V parts of the model a stage: the bubble is V times smaller, the traffic V times larger.

    Stage k has parts k, k + K, …; it takes K micro-batches through one part, then through its next one. F0.1 is
    micro-batch 0 in the second part of its stage.

        stage 0   F0   F1   F0.1 F1.1 .    .    B0.1      .    B1.1      B0        B1
        stage 1   .    F0   F1   F0.1 B0.1      F1.1 B1.1      B0        B1

    `micro_batches` is a multiple of `stages`. Memory: stage k holds at most K(V + 1) - 2k - 1 micro-batches' parts, and
    never more than M V. Source: D. Narayanan et al., "Efficient large-scale language model training on GPU clusters
    using Megatron-LM", 2021.
    """
    if micro_batches % stages:
        raise ValueError(
            f"an interleaved pipeline takes as many micro-batches at a time as it has stages, so micro_batches has to "
            f"be a multiple of stages={stages}, not {micro_batches}; use {-(-micro_batches // stages) * stages}"
        )

    def order(stage: int, stages: int, micro_batches: int) -> tuple[Action, ...]:
        total = micro_batches * parts
        ahead = min(2 * (stages - 1 - stage) + (parts - 1) * stages, total)
        forward = [_turn("forward", i, stages, parts) for i in range(total)]
        backward = [_turn("backward", i, stages, parts) for i in range(total)]
        actions = forward[:ahead]
        for f, b in zip(forward[ahead:], backward[: total - ahead], strict=True):
            actions += [f, b]
        return (*actions, *backward[total - ahead :], _UPDATE)

    return Schedule("interleaved", stages, micro_batches, order, parts=parts)


def _turn(kind: str, turn: int, stages: int, parts: int) -> Action:
    """The pass number `turn` of a stage: K micro-batches through one part after the other."""
    group, place = divmod(turn, stages * parts)
    part, micro_batch = divmod(place, stages)
    number = group * stages + micro_batch
    return Action("forward", number, part) if kind == "forward" else Action("backward", number, parts - 1 - part)


def zero_bubble(stages: int, micro_batches: int) -> Schedule:
    """ZB-H1: 1F1B with the parameters' gradients computed when a stage has nothing else to do.

    A backward pass is split: the stage before waits for I, and no stage waits for W, the parameters' gradient. Stage k
    keeps k of its W's back.

        stage 0   F0 F1 .  I0 W0 F2 I1 W1 F3 I2 W2 I3 W3
        stage 1   .  F0 I0 F1 I1 W0 F2 I2 W1 F3 I3 W2 W3

    Memory: at most K micro-batches on every stage, as on 1F1B's first. Source: P. Qi et al., "Zero bubble pipeline
    parallelism", 2023. Deviation: the optimizer step waits for all gradients; the paper's validation of steps after the
    fact is left out.
    """
    return Schedule("zero_bubble", stages, micro_batches, _zero_bubble)


def _zero_bubble(stage: int, stages: int, micro_batches: int) -> tuple[Action, ...]:
    actions, kept = [], 0
    for action in _one_f_one_b(stage, stages, micro_batches):
        if action.kind == "backward":
            actions.append(Action("input", action.micro_batch))
            if action.micro_batch >= stage:
                actions.append(Action("weight", action.micro_batch - stage))
                kept += 1
        elif action.kind != "update":
            actions.append(action)
    return (*actions, *(Action("weight", m) for m in range(kept, micro_batches)), _UPDATE)
