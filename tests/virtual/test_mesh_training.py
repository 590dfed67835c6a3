"""The virtual world as data=2 x model=2: the bits of two worlds of two ranks, and one checkpoint of both halves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import polytempo as pt
from halves import MESH, STRATEGIES, half_job
from polytempo.cluster import one_host
from polytempo.core import Port, Strategy
from polytempo.data.shard import DataShard
from polytempo.one_host.hogwild import Updates
from polytempo.spec.result import parameters_sha256
from polytempo.spec.run_options import RunOptions
from polytempo.spec.run_spec import RunSpec
from polytempo.training.checkpoint.checkpoint_files import read_manifest, read_part
from polytempo.training.checkpoint.checkpoint_folders import latest
from polytempo.training.job.context import TrainingContext, TrainingSummary
from polytempo.training.job.evaluate import Evaluation
from polytempo.training.job.program import train
from polytempo.training.job.start import replica_of
from polytempo.training.model.parted_parameters import clip_grad_norm_
from polytempo.training.model.ports import ports_of
from polytempo.training.observe.holding import Whole
from polytempo.training.step.replica import Replica
from polytempo.training.step.step_cost import StepCost
from polytempo.training.virtual.virtual_observer import VirtualObserver
from polytempo.training.virtual.virtual_step import priced_step
from polytempo.worlds import VirtualWorld

s = pt.strategies


def context(port: Port, strategy: Strategy, options: RunOptions, observer: VirtualObserver) -> TrainingContext:
    """A virtual rank's context on the mesh: its half, and its data rank's samples."""
    job, data_port = half_job(port.coordinates["model"]), ports_of(port).data
    spec = RunSpec.of(job, strategy, port.size, options)
    model, optimizer = replica_of(spec)
    replica, data = Replica(model, optimizer, strategy, data_port.size), job.data(None)
    shard = DataShard(
        data.training(), rank=data_port.rank, size=data_port.size, batch_size=spec.batch_size, seed=spec.seed
    )
    take_step = priced_step(
        replica, RunSpec.of(job, replica.strategy, 1, RunOptions()), StepCost(100.0), Updates(strategy.one_copy)
    )
    return TrainingContext(spec, Whole(replica), shard, data, take_step, observer)


def simulated(strategy: Strategy, mesh: dict[str, int], options: RunOptions) -> list[TrainingSummary]:
    """Every rank's summary."""
    num_ranks = mesh["data"] * mesh["model"]
    world, first = VirtualWorld(one_host(num_ranks), num_ranks), half_job(0)
    observer = VirtualObserver(num_ranks, Evaluation(first, first.model(), first.data(None)))
    contexts = [context(world.port(r).meshed(**mesh), strategy, options, observer) for r in range(num_ranks)]

    async def program(port: Port) -> TrainingSummary:
        return await train(port.meshed(**mesh), contexts[port.rank])

    outcome = world.run(program)
    assert outcome.unreceived == 0
    return [summary for summary in outcome.results if summary is not None]


def hashes(summaries: list[TrainingSummary]) -> list[str]:
    return [parameters_sha256(summary.parameters.values()) for summary in summaries]


@pytest.mark.parametrize("strategy", STRATEGIES, ids=str)
def test_each_half_trains_as_if_it_were_alone(strategy: Strategy) -> None:
    both = simulated(strategy, MESH, RunOptions(steps=14))
    alone = [pt.simulate(half_job(number), strategy, 2, one_host(2), steps=14) for number in (0, 1)]
    assert hashes(both) == [alone[number].parameters_sha256 for number in (0, 1, 0, 1)]
    assert both[0].score is not None
    assert (both[0].score.loss, both[0].samples) == (alone[0].loss, alone[0].samples)


def test_all_halves_end_at_one_step() -> None:
    """`until` looks at the first half's score, and all ranks end at one step."""
    options = RunOptions(epochs=30, until={"loss": 1.25})
    summaries = simulated(s.local_sgd(period=3, route=pt.collectives.ring), MESH, options)
    assert len({summary.steps for summary in summaries}) == 1
    assert summaries[0].reached
    assert summaries[0].steps < 30 * 5


@pytest.mark.parametrize("strategy", [STRATEGIES[1], STRATEGIES[3]], ids=str)
def test_a_checkpoint_has_every_half(strategy: Strategy, tmp_path: Path) -> None:
    simulated(strategy, MESH, RunOptions(steps=6, checkpoint_every=3, out=tmp_path))
    folder = latest(tmp_path / "checkpoint")
    assert folder is not None
    assert read_manifest(folder).mesh.lengths == MESH
    for number in (0, 1):
        alone = tmp_path / f"alone-{number}"
        pt.simulate(half_job(number), strategy, 2, one_host(2), steps=6, checkpoint_every=3, out=alone)
        (expected,) = [path for path in (alone / "checkpoint").iterdir() if path.name == folder.name]
        for data in (0, 1):
            assert entries(read_part(folder, 2 * data + number)) == entries(read_part(expected, data))


def entries(part: Any) -> Any:
    """A rank's saved entries, except for its time."""
    scalars = {name: value for name, value in part.scalars.items() if name != "seconds"}
    return scalars, {name: tensor.tolist() for name, tensor in part.tensors.items()}


@pytest.mark.parametrize("max_norm", [0.1, 1e6])
def test_clipping_adds_up_the_squares_of_all_parts(max_norm: float) -> None:
    parameters = [torch.nn.Parameter(torch.zeros(n)) for n in (3, 0, 5, 2)]
    for i, parameter in enumerate(parameters[:3]):  # the last has none
        parameter.grad = torch.full_like(parameter, float(i + 1))
    whole = [torch.nn.Parameter(p.detach().clone()) for p in parameters]
    for mine, theirs in zip(whole, parameters, strict=True):
        mine.grad = None if theirs.grad is None else theirs.grad.clone()
    expected = torch.nn.utils.clip_grad_norm_(whole, max_norm)

    async def program(port: Port) -> float:
        return float(await clip_grad_norm_(port, [parameters[port.rank]], max_norm))

    norms = VirtualWorld(one_host(4), 4).run(program).results
    assert norms == [pytest.approx(float(expected), rel=1e-6)] * 4
    for mine, theirs in zip(whole, parameters, strict=True):
        if mine.grad is not None and theirs.grad is not None:
            torch.testing.assert_close(theirs.grad, mine.grad)
