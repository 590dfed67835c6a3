"""Replicas of the stages of a pipeline, on processes: their exchanges, and their checks."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer
from torch.utils.data import TensorDataset

import polytempo as pt
import staged_job
from pipelines import WIDTH, batches, chain, perceptron
from polytempo.core import Drifted, Port
from polytempo.partition import schedules
from polytempo.partition.schedules import ddg, one_f_one_b
from polytempo.training.pipeline.pipeline import strategy_of
from polytempo.training.pipeline.pipeline_stage import PipelineStage, laid_out, of_parameters
from polytempo.worlds import ProcessWorld, VirtualWorld
from process.crew import together

pytestmark = pytest.mark.process

SAMPLE = torch.zeros(1, WIDTH, dtype=torch.float64)
mse = nn.functional.mse_loss


def sgd(parameters: Any) -> Optimizer:
    return SGD(parameters, lr=0.05, momentum=0.9)


def plain(state: dict[str, Tensor]) -> dict[str, Any]:
    return {name: tensor.tolist() for name, tensor in state.items()}


def test_estimators_of_a_stage_s_replicas_stay_equal_and_learn_by_the_mean() -> None:
    """Four ranks as data=2 x stage=2 on different batches; another one's estimators alone would be others."""

    def work(world: ProcessWorld) -> Any:
        pipe = pt.pipeline(perceptron(), sgd, mse, schedules.synthetic_gradients(2, lr=0.01), sample=SAMPLE)
        for x, y in batches(4, seed=1 + pipe.ports.data.rank):
            pipe.step(x, y)
        tensors = pipe.training_state()["stage"]["tensors"]
        pipe.finish()
        return plain({name: t for name, t in tensors.items() if name.startswith("estimators/module/")})

    first, last, other_first, other_last = together(4, work)
    assert first == other_first
    assert len(first) == 2
    assert all(any(map(any, value)) if isinstance(value[0], list) else any(value) for value in first.values())
    assert last == other_last == {}


def test_replicas_of_two_stages_average_their_gradients() -> None:
    """Four ranks as data=2 x stage=2, clipped by the whole model's norm: one process on both replicas' batches."""

    def work(world: ProcessWorld) -> Any:
        found = []
        for schedule in (one_f_one_b(2, 2), schedules.interleaved(2, 2, parts=4)):
            pipe = pt.pipeline(perceptron(), sgd, mse, schedule, sample=SAMPLE, max_norm=0.02)
            replica = pipe.ports.data.rank
            for x, y in batches(4):
                pipe.step(x.chunk(2)[replica], y.chunk(2)[replica])
            found.append(plain(pipe.state_dict()))
        return found

    model = perceptron()
    optimizer = sgd(model.parameters())
    for x, y in batches(4):
        optimizer.zero_grad()
        mse(model(x), y).backward()
        assert nn.utils.clip_grad_norm_(model.parameters(), 0.02) > 0.02
        optimizer.step()
    first, *others = together(4, work)
    assert [first] * 3 == others
    for state in first:
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(torch.tensor(state[name], dtype=torch.float64), parameter, rtol=0, atol=1e-12)


def test_shares_of_a_short_batch_weigh_replicas_also_where_gradients_are_late() -> None:
    """Seven samples in batches of four: the replicas' last ones hold two and one. `ddg` as its two stages alone."""
    data = TensorDataset(*(torch.cat(each)[:7] for each in zip(*batches(2), strict=True)))
    made = {"one_f_one_b": one_f_one_b(2, 1), "ddg": ddg(2)}

    def work(world: ProcessWorld) -> Any:
        loader, found = pt.shard(data, batch_size=2, seed=3), {}
        for name, schedule in made.items():
            pipe = pt.pipeline(perceptron(), sgd, mse, schedule, sample=SAMPLE)
            loader.set_epoch(0)
            for _ in range(3):
                for x, y in loader:
                    pipe.step(x.clone(), y * 1.0)
            pipe.finish()
            found[name] = plain(pipe.state_dict())
        return found

    whole = pt.data.DataShard(data, rank=0, size=1, batch_size=4, seed=3)
    dealt = [batch for _ in range(3) for batch in whole]
    assert [len(x) for x, _ in dealt] == [4, 3] * 3
    model = perceptron()
    optimizer = sgd(model.parameters())
    for x, y in dealt:
        optimizer.zero_grad()
        mse(model(x), y).backward()
        optimizer.step()
    expected = {"one_f_one_b": model, "ddg": alone(ddg(2), dealt)}
    first, *others = together(4, work, mesh={"data": 2, "stage": 2})
    assert [first] * 3 == others
    for name, model in expected.items():
        for key, parameter in model.named_parameters():
            mine = torch.tensor(first[name][key], dtype=torch.float64)
            torch.testing.assert_close(mine, parameter, rtol=0, atol=1e-12)


def alone(schedule: schedules.Schedule, data: list[Any]) -> nn.Module:
    """The pipeline's stages without replicas, in the virtual world."""
    model, strategy = perceptron(), strategy_of(schedule, None)
    parts = chain(model, schedule.stages)

    async def program(port: Port) -> None:
        whole = laid_out(port, schedule.stages)
        stage = PipelineStage(model, parts, of_parameters(sgd), mse, strategy, whole, seed=0)
        for x, y in data:
            await stage.step((x,), y)
        await stage.finish()

    VirtualWorld(pt.cluster.ethernet(gbit_per_s=1), schedule.stages).run(program)
    return model


def test_replicas_of_a_stage_that_differ_are_named() -> None:
    """Rank 3 is the second stage of the second replica; only replicas of one stage are compared."""

    def work(world: ProcessWorld) -> str:
        pipe = pt.pipeline(perceptron(), sgd, mse, ddg(2), sample=SAMPLE)
        for x, y in batches(3):
            pipe.step(x, y)
        if world.rank == 3:
            dict(pipe.model.named_parameters())["7.0.weight"].detach()[0, 0] += 1
        try:
            pipe.finish()
        except Drifted as error:
            return f"{error.ranks}: {error}"
        return "equal"

    first, second, *others = together(4, work)
    assert [first, others[0]] == ["equal", "equal"]
    assert second == others[1]
    assert "parameter '7.0.weight'" in second


def other_rate(parameters: Any, lr: float) -> Optimizer:
    """The job's optimizer, with another learning rate on rank 3."""
    return SGD(parameters, lr=lr * (1 + (os.environ.get("POLYTEMPO_RANK") == "3")))


def test_a_run_whose_replicas_of_a_stage_differ_is_ended() -> None:
    job = replace(staged_job.plain(), optimizer=other_rate, schedule=None)
    with pytest.raises(pt.errors.WorkerDied, match=r"Drifted: step \d+: ranks 1, 3 have drifted apart.*option 'lr'"):
        pt.run(job, pt.strategies.one_f_one_b(2, 2), 4, steps=12, threads=1)
    ignored = pt.run(job, pt.strategies.one_f_one_b(2, 2), 4, steps=2, threads=1, on_drift="ignore")
    assert ignored.steps == 2
