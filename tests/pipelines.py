"""Pipelines for tests: models cut into a chain, and training of them in the virtual world."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor, nn

import polytempo as pt
from polytempo.core import Port, Strategy
from polytempo.core.state import Saved
from polytempo.partition.cut import Cut
from polytempo.partition.cutting import cut
from polytempo.partition.schedules import (
    Schedule,
    ddg,
    features_replay,
    gpipe,
    interleaved,
    one_f_one_b,
    pipedream,
    pipedream_2bw,
    pipelined_backprop,
    pipemare,
    spectrain,
    synthetic_gradients,
    zero_bubble,
)
from polytempo.partition.wires import AS_THEY_ARE, Wires
from polytempo.training.checkpoint.optimizer_state import optimizer_restore, optimizer_saved
from polytempo.training.pipeline.late.estimators import estimators_of
from polytempo.training.pipeline.late.late_stage import late_stage
from polytempo.training.pipeline.pipeline_stage import Loss, MakeOptimizer, PipelineStage, laid_out, schedule_of
from polytempo.training.pipeline.stage_program import MicroBatch, StageProgram
from polytempo.worlds import VirtualWorld

WIDTH, SAMPLES = 6, 8

WAITING = {
    "gpipe": lambda stages: gpipe(stages, 4),
    "gpipe without recomputation": lambda stages: gpipe(stages, 4, recompute=False),
    "one_f_one_b": lambda stages: one_f_one_b(stages, 4),
    "interleaved": lambda stages: interleaved(stages, 4),
    "zero_bubble": lambda stages: zero_bubble(stages, 4),
}
"""Schedules that compute the same as one process, by the number of stages."""
DELAYED = {
    "ddg": ddg,
    "ddg in lockstep": lambda stages: ddg(stages, lockstep=True),
    "ddg with current parameters": lambda stages: ddg(stages, weights="current"),
    "features_replay": features_replay,
    "pipelined_backprop": pipelined_backprop,
    "pipedream": pipedream,
    "pipedream with vertical sync": lambda stages: pipedream(stages, vertical_sync=True),
    "pipelined_backprop with pipemare": lambda stages: pipelined_backprop(stages, correction=pipemare(5, decay=0.2)),
    "pipelined_backprop with spectrain": lambda stages: pipelined_backprop(stages, correction=spectrain()),
    "synthetic_gradients": lambda stages: synthetic_gradients(stages, lr=0.01, hidden_layers=1, width=8),
}


def perceptron(num_layers: int = 8, *, seed: int = 0, dtype: torch.dtype = torch.float64) -> nn.Sequential:
    """Layers of equal width; a Linear and a Tanh each."""
    torch.manual_seed(seed)
    return nn.Sequential(*[nn.Sequential(nn.Linear(WIDTH, WIDTH, dtype=dtype), nn.Tanh()) for _ in range(num_layers)])


def chain(model: nn.Sequential, parts: int) -> Cut:
    """The layers in so many parts of equal length."""
    return cut(model, parts, sample=torch.zeros(1, WIDTH, dtype=torch.float64))


def batches(steps: int, *, seed: int = 1, dtype: torch.dtype = torch.float64) -> list[tuple[Tensor, Tensor]]:
    """Inputs and targets."""
    generator = torch.Generator().manual_seed(seed)
    return [
        (
            torch.randn(SAMPLES, WIDTH, generator=generator, dtype=dtype),
            torch.randn(SAMPLES, WIDTH, generator=generator, dtype=dtype),
        )
        for _ in range(steps)
    ]


def micro_batches(batch: tuple[Tensor, Tensor], count: int, parts: Cut, flops: float = 0.0) -> list[MicroBatch]:
    """The parts of a batch, with losses that add up to its mean loss."""
    found = []
    for x, y in zip(batch[0].chunk(count), batch[1].chunk(count), strict=True):

        def head(output: Tensor, y: Tensor = y) -> Tensor:
            return nn.functional.mse_loss(output, y) * (len(y) / len(batch[1]))

        layouts = {value.name: ((len(x), WIDTH), x.dtype) for value in parts.values}
        found.append(MicroBatch((x,), layouts, head, lambda part: None, flops * len(x), y))
    return found


class Trained(NamedTuple):
    """The end of a pipeline."""

    model: nn.Sequential
    losses: list[float]
    seconds: float
    programs: list[StageProgram]
    sent_bytes: list[int]


def trained(
    schedule: Schedule,
    *,
    steps: int = 6,
    lr: float = 0.05,
    momentum: float = 0.9,
    flops: float = 0.0,
    cluster: pt.cluster.Cluster | None = None,
    wires: Wires = AS_THEY_ARE,
) -> Trained:
    """Train a perceptron by SGD in a virtual world, a rank a stage."""
    model, schedule = perceptron(), replace(schedule, wires=wires)
    whole = chain(model, schedule.stages * schedule.parts)
    programs = [_program(whole, schedule, stage, lr, momentum) for stage in range(schedule.stages)]
    losses: list[float] = []

    async def program(port: Port) -> None:
        for batch in batches(steps):
            parts = micro_batches(batch, schedule.micro_batches, whole, flops)
            loss = await programs[port.rank].step(port, parts)
            if loss is not None:
                losses.append(float(loss))

    world = VirtualWorld(cluster or pt.cluster.ethernet(gbit_per_s=1000), schedule.stages)
    outcome = world.run(program)
    return Trained(model, losses, outcome.seconds, programs, list(outcome.trace.bytes_sent.values()))


def _program(whole: Cut, schedule: Schedule, stage: int, lr: float, momentum: float) -> StageProgram:
    own = [p for part in whole.stages if part.index % schedule.stages == stage for p in part.module.parameters()]
    optimizer = torch.optim.SGD(own, lr=lr, momentum=momentum)

    async def update() -> None:
        optimizer.step()
        optimizer.zero_grad()

    return StageProgram(
        whole,
        schedule,
        stage,
        update,
        estimators=estimators_of(schedule, stage),
        late=late_stage(schedule, stage, own, optimizer),
    )


def plainly_trained(*, steps: int = 6, lr: float = 0.05, momentum: float = 0.9) -> Trained:
    """The same by one process's back-propagation."""
    model, losses = perceptron(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=momentum)
    for x, y in batches(steps):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return Trained(model, losses, 0.0, [], [])


def two_versions(stages: int) -> Schedule:
    """PipeDream-2BW with as many micro-batches as the tests' batches are cut into."""
    return pipedream_2bw(stages, 4)


class Ended(NamedTuple):
    """Losses of the batches, and the whole model's state afterwards."""

    losses: list[float]
    state: dict[str, Tensor]


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    """SGD on the trained parameters."""
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1, momentum=0.9)


def staged(
    make: Callable[[], nn.Module],
    strategy: Strategy,
    loss: Loss,
    given: Sequence[tuple[Tensor, Tensor]],
    *,
    optimizer: MakeOptimizer = sgd,
    max_norm: float | None = None,
    resumed_after: int = 0,
    replicas: int = 1,
) -> Ended:
    """Train by `strategy` in a virtual world, all replicas by the same batches.

    With `resumed_after` in two runs, the second from the state of the first.
    """
    schedule, losses, found = schedule_of(strategy), list[float](), list[dict[str, Tensor]]()
    saved: dict[int, tuple[dict[str, Tensor], Saved, Saved]] = {}

    def run(coming: Sequence[tuple[Tensor, Tensor]], *, ends: bool) -> None:
        models = [make() for _ in range(replicas)]
        cuts = [cut(model, schedule.stages * schedule.parts, sample=given[0][0]) for model in models]

        async def program(port: Port) -> None:
            whole, replica = laid_out(port, schedule.stages), port.rank // schedule.stages
            model, parts = models[replica], cuts[replica]
            stage = PipelineStage(model, parts, optimizer, loss, strategy, whole, seed=0, max_norm=max_norm)
            if port.rank in saved:
                tensors, steps, under_way = saved[port.rank]
                stage.model.load_state_dict(tensors)
                optimizer_restore(stage.optimizer, steps)
                stage.restore(under_way)
            for x, y in coming:
                answer = await stage.step((x,), y)
                losses.extend([] if answer is None else [float(answer)])
            if ends:
                await stage.finish()
                found.append(await stage.state_dict())
            else:
                kept = dict(stage.model.state_dict()), optimizer_saved(stage.optimizer), stage.state()
                saved[port.rank] = deepcopy(kept)

        VirtualWorld(pt.cluster.ethernet(gbit_per_s=1000), schedule.stages * replicas).run(program)

    if resumed_after:
        run(given[:resumed_after], ends=False)
    run(given[resumed_after:], ends=True)
    return Ended(losses, found[0])
