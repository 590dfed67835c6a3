"""`polytempo cut`: a job's model in stages, and what each of them computes, keeps and sends."""

from __future__ import annotations

import sys
from dataclasses import asdict
from pathlib import Path

import torch
from torch import nn

from polytempo.cli.cut_schedules import COLUMNS, predictions
from polytempo.cli.plan import found_job
from polytempo.cli.request import CutRequest
from polytempo.cli.show import notes_on_stderr, show_json, show_table, size
from polytempo.partition.cut import Cut, StageCost
from polytempo.partition.cutting import cut as cut_model
from polytempo.report.summary import human_seconds
from polytempo.spec.job import Job
from polytempo.spec.job_calls import data_of, model_of, optimizer_of
from polytempo.training.staged_training import sample_of

MICRO_BATCHES = 8
"""In how many a batch is taken to be cut, for the table of schedules."""
_UNBALANCED = 1.25
"""How many times the mean time of a stage the slowest may have without a warning."""
_LONG = 40
_COLUMNS = ("stage", "layers", "parameters", "time", "share", "memory", "in", "out")


def cut(asked: CutRequest, data: Path | None, *, as_json: bool) -> None:
    """Cut the job's model, measure its stages, and show them."""
    job = found_job(asked.job)
    with notes_on_stderr():
        model = model_of(job)
        sample = sample_of(job, data_of(job, data), asked.batch_size or job.batch_size)
        state = state_per_parameter(job)
        found = cut_model(
            model,
            asked.stages,
            sample=sample,
            by=asked.by,
            state_per_parameter=state,
            measure=True,
        )
    foreseen = predictions([_seconds(cost) for cost in found.costs], MICRO_BATCHES) if len(found.stages) > 1 else []
    memory = [cost.memory_bytes(state) for cost in found.costs]
    if as_json:
        stages = [asdict(cost) | {"memory_bytes": each} for cost, each in zip(found.costs, memory, strict=True)]
        values = [asdict(value) for value in found.values]
        plain = {"job": job.name, "begins": found.begins, "stages": stages, "values": values, "shared": found.shared}
        show_json(plain | {"schedules": [each._asdict() for each in foreseen]})
    else:
        show_table(_COLUMNS, [_row(found, index, each) for index, each in enumerate(memory)])
        print(*notes(found), sep="\n")
        if foreseen:
            print(
                f"\nin {MICRO_BATCHES} micro-batches, or at once where gradients are late; messages take no time here:"
            )
            show_table(COLUMNS, [each.row for each in foreseen])
    if warning := unbalanced(found):
        print(f"warning: {warning}", file=sys.stderr)


def state_per_parameter(job: Job) -> float:
    """How many numbers the job's optimizer keeps for each that it trains, tried with a small matrix."""
    probe = nn.Linear(16, 16, bias=False)
    optimizer = optimizer_of(job, probe)
    probe.weight.grad = torch.ones_like(probe.weight)
    optimizer.step()
    kept = [each for each in optimizer.state[probe.weight].values() if isinstance(each, torch.Tensor)]
    return sum(each.numel() for each in kept if each.numel() > 1) / probe.weight.numel()


def notes(found: Cut) -> list[str]:
    """What a person reads below the table."""
    said = ["time, memory, in and out are those of a batch, forward and backward, on one thread"]
    if found.begins:
        said.append(f"the same by hand: --by {','.join(found.begins)}")
    said += [
        f"{name} is used by stages {', '.join(map(str, stages))}: their gradients are summed"
        for name, stages in found.shared.items()
    ]
    return said


def unbalanced(found: Cut) -> str:
    """What to say where a stage takes much longer than the others; "" where none does."""
    times = [_seconds(cost) for cost in found.costs]
    slowest = max(range(len(times)), key=times.__getitem__)
    mean = sum(times) / len(times)
    if times[slowest] <= _UNBALANCED * mean:
        return ""
    return (
        f"stage {slowest} ({_layers(found.costs[slowest])}) takes {times[slowest] / mean:.1f} times the mean, and a "
        f"pipeline is as slow as its slowest stage: {len(times)} stages are at most {sum(times) / times[slowest]:.1f} "
        "times as fast as one; take fewer stages, another --by, or divide that layer"
    )


def _row(found: Cut, index: int, memory: float) -> tuple[str, ...]:
    cost = found.costs[index]
    total = sum(_seconds(each) for each in found.costs)
    return (
        str(index),
        _layers(cost),
        f"{cost.parameters:,}",
        human_seconds(_seconds(cost)),
        f"{100 * _seconds(cost) / total:.0f} %",
        size(memory),
        size(cost.bytes_in) if cost.bytes_in else "-",
        size(cost.bytes_out) if cost.bytes_out else "-",
    )


def _layers(cost: StageCost) -> str:
    """All layers if they are short, or the first and the last."""
    every = ", ".join(cost.layers)
    return every if len(every) <= _LONG else f"{cost.layers[0]} … {cost.layers[-1]}"


def _seconds(cost: StageCost) -> float:
    assert cost.seconds is not None, "times were measured"
    return cost.seconds
