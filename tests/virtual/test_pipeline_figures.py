"""Figures of the papers on pipelines, from training in the virtual world: speed-ups of DDG and of MSRA's pipeline.

A stage's operations are declared; messages take no time of their own. Speed-ups are those over one worker.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from torch import nn

import polytempo as pt
from pipelines import SAMPLES, batches, chain, micro_batches, perceptron
from polytempo.core import Port
from polytempo.partition import striped
from polytempo.partition.cut import Cut
from polytempo.partition.cutting import cut
from polytempo.partition.schedules import Schedule, ddg, gpipe, interleaved, one_f_one_b, pipelined_backprop
from polytempo.partition.schedules import zero_bubble as zb_h1
from polytempo.training.pipeline.stage_program import MicroBatch, StageProgram
from polytempo.worlds import VirtualWorld

FLOPS = 1e12
"""The operations of a sample's passes through the whole model."""


def step_s(whole: Cut, schedule: Schedule, cut_batches: list[list[MicroBatch]]) -> float:
    """Seconds of a step in a pipeline that is full: between two runs, of all batches and of two thirds of them."""

    operations = [cost.operations for cost in whole.costs]
    shares = [each / sum(operations) for each in operations]

    def seconds(steps: int) -> float:
        programs = []
        for stage in range(schedule.stages):
            own = [p for part in whole.stages[stage :: schedule.stages] for p in part.module.parameters()]
            programs.append(StageProgram(whole, schedule, stage, _descent(own), shares))

        async def program(port: Port) -> None:
            for batch in cut_batches[:steps]:
                await programs[port.rank].step(port, batch)

        cluster = pt.cluster.ethernet(gbit_per_s=1e9, latency_us=0.0)
        return VirtualWorld(cluster, schedule.stages).run(program).seconds

    few = 2 * len(cut_batches) // 3
    return (seconds(len(cut_batches)) - seconds(few)) / (len(cut_batches) - few)


def _descent(parameters: list[nn.Parameter]):
    optimizer = torch.optim.SGD(parameters, lr=1e-3)

    async def update() -> None:
        optimizer.step()
        optimizer.zero_grad()

    return update


def declared(whole: Cut, operations: Sequence[float]) -> Cut:
    """The cut with stages of so many operations, in any unit."""
    costs = [replace(cost, operations=each) for cost, each in zip(whole.costs, operations, strict=True)]
    return replace(whole, costs=tuple(costs))


ONE_WORKER_S = FLOPS * SAMPLES / pt.cluster.ethernet(gbit_per_s=1.0).flops_per_s


def balanced(schedule: Schedule, steps: int = 24) -> float:
    """The speed-up with equal stages."""
    parts = schedule.stages * schedule.parts
    whole = declared(chain(perceptron(), parts), [1.0] * parts)
    cut_batches = [micro_batches(batch, schedule.micro_batches, whole, FLOPS) for batch in batches(steps)]
    return ONE_WORKER_S / step_s(whole, schedule, cut_batches)


@pytest.mark.parametrize(("stages", "published"), [(2, 1.5), (4, 2.0)])
def test_ddg_in_lockstep_is_as_much_faster_as_its_paper_says(stages: int, published: float) -> None:
    assert balanced(ddg(stages, lockstep=True)) == pytest.approx(published, rel=0.02)


def test_ddg_in_three_stages_is_as_much_faster_as_its_paper_says() -> None:
    whole = declared(chain(perceptron(6), 3), [1, 1, 1])
    cut_batches = [micro_batches(batch, 1, whole, FLOPS) for batch in batches(24)]
    assert ONE_WORKER_S / step_s(whole, ddg(3, lockstep=True), cut_batches) == pytest.approx(1.8, rel=0.02)


@pytest.mark.parametrize("stages", [2, 4])
def test_bubbles_in_the_virtual_world_are_those_of_the_papers(stages: int) -> None:
    """Speed-up = K (1 - bubble). ZB-H1 with a split backward pass of equal halves has a third of 1F1B's bubble time."""
    k, m = stages, 4
    flush = (k - 1) / (m + k - 1)
    bubbles = {
        gpipe(k, m, recompute=False): flush,
        one_f_one_b(k, m): flush,
        interleaved(k, m, parts=2): (k - 1) / (2 * m + k - 1),
        zb_h1(k, m): (k - 1) / (3 * m + k - 1),
        pipelined_backprop(k): 0.0,
    }
    for schedule, bubble in bubbles.items():
        assert balanced(schedule, steps=18) == pytest.approx(k * (1 - bubble), rel=1e-6), schedule


def speech_model(seed: int = 0) -> nn.Sequential:
    """Seven hidden layers and a top of the shape of MSRA's, 429 - 2048 x 7 - 9304, a thirty-second as wide."""
    torch.manual_seed(seed)
    sizes = [13, *[64] * 7, 291]
    layers = [m for a, b in pairwise(sizes) for m in (nn.Linear(a, b), nn.Sigmoid())]
    return nn.Sequential(*layers[:-1])


INPUT, HIDDEN, TOP = 4.0 * 429 * 2048, 6.0 * 2048 * 2048, 6.0 * 2048 * 9304
"""Operations of a sample, forward and backward; the input has no gradient."""
COPY = 4.0 * 2048 * 100
"""A copy of one sample's hidden activations from or to a stage, at 100 operations a byte: 600 Gflop/s and 6 GB/s."""


def speech(schedule: Schedule, begins: list[str], operations: Sequence[float]) -> float:
    """The speed-up of MSRA's model over one worker, which copies nothing."""
    model = speech_model() if schedule.stripes == 1 else striped(speech_model(), "14", schedule.stripes)
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(SAMPLES, 13, generator=generator), torch.randint(291, (SAMPLES,), generator=generator)
    whole = declared(cut(model, sample=x, by=begins), operations)
    layouts = whole.layouts(x)
    flops = FLOPS * SAMPLES * sum(operations) / (INPUT + 6 * HIDDEN + TOP)

    def head(output: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(output, y)

    batch = [MicroBatch((x,), layouts, head, lambda part: None, flops)]
    return ONE_WORKER_S / step_s(whole, schedule, [batch] * 30)


def test_msras_pipeline_is_as_much_faster_as_its_paper_says() -> None:
    """1.9 on two workers; 3.3 on four, with half of the top layer on each of the last two."""
    two = speech(pipelined_backprop(2), ["12"], [INPUT + 5 * HIDDEN + 2 * COPY, HIDDEN + TOP + 2 * COPY])
    assert two == pytest.approx(1.9, rel=0.02)
    stripe = TOP / 2 + 2 * COPY
    four = speech(
        pipelined_backprop(4, stripes=2),
        ["8", "14.stripes.0", "14.stripes.1"],
        [INPUT + 3 * HIDDEN + 2 * COPY, 3 * HIDDEN + 6 * COPY, stripe, stripe],
    )
    assert four == pytest.approx(3.3, rel=0.02)
    unstriped = speech(
        pipelined_backprop(4),
        ["4", "8", "14"],
        [INPUT + HIDDEN + 2 * COPY, 2 * HIDDEN + 4 * COPY, 3 * HIDDEN + 4 * COPY, TOP + 2 * COPY],
    )
    assert unstriped < 2.6


def test_a_top_layer_of_double_cost_is_made_up_for_by_stripes() -> None:
    """Stages of 1, 1, 1 and 2: 2.5 times as fast as one worker. In stripes, with 1.5, 1.5, 1 and 1: 3.3 times."""
    cut_batches = batches(30)
    whole = declared(cut(perceptron(7), sample=cut_batches[0][0], by=["2", "4", "6"]), [1, 1, 1, 2])
    plain = [micro_batches(batch, 1, whole, FLOPS) for batch in cut_batches]
    unstriped = ONE_WORKER_S / step_s(whole, pipelined_backprop(4), plain)
    assert unstriped == pytest.approx(2.5, rel=1e-3)
    model = nn.Sequential(*perceptron(7)[:6], perceptron(7)[6][0])
    parts = cut(striped(model, "6", 2), sample=cut_batches[0][0], by=["3", "6.stripes.0", "6.stripes.1"])
    striped_parts = declared(parts, [1.5, 1.5, 1, 1])
    layouts = striped_parts.layouts(cut_batches[0][0])
    in_stripes = [
        [each._replace(layouts=layouts) for each in micro_batches(batch, 1, striped_parts, FLOPS)]
        for batch in cut_batches
    ]
    assert ONE_WORKER_S / step_s(striped_parts, pipelined_backprop(4, stripes=2), in_stripes) >= 3.3
