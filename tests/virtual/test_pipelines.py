"""Pipelines at work in the virtual world, against one process and against rules written by hand."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD

import polytempo as pt
from pipelines import DELAYED, SAMPLES, WAITING, batches, chain, perceptron, plainly_trained, trained, two_versions
from polytempo.core import Port
from polytempo.partition import cut, striped, unstriped
from polytempo.partition.schedules import Action, Schedule, ddg, features_replay, pipedream, pipelined_backprop
from polytempo.partition.schedules.facts import facts
from polytempo.partition.schedules.timetable import StageTimes, played
from polytempo.training.pipeline.pipeline import strategy_of
from polytempo.training.pipeline.pipeline_stage import PipelineStage, laid_out, of_parameters
from polytempo.training.pipeline.stage_program import MicroBatch, StageProgram
from polytempo.worlds import VirtualWorld

EVERY = WAITING | DELAYED | {"pipedream_2bw": two_versions}
every = pytest.mark.parametrize("name", EVERY)


@every
def test_one_stage_is_plain_back_propagation(name: str) -> None:
    """Equal to the bit where a batch is not cut; else to the rounding of sums in another order."""
    schedule = EVERY[name](1)
    ours, plain = trained(schedule), plainly_trained()
    assert ours.losses == pytest.approx(plain.losses, abs=1e-14)
    for mine, other in zip(ours.model.parameters(), plain.model.parameters(), strict=True):
        torch.testing.assert_close(mine, other, rtol=0, atol=0 if schedule.micro_batches == 1 else 1e-14)


@pytest.mark.parametrize("stages", [2, 4])
@pytest.mark.parametrize("name", WAITING)
def test_schedules_that_wait_compute_what_one_process_does(name: str, stages: int) -> None:
    ours, plain = trained(WAITING[name](stages)), plainly_trained()
    assert ours.losses == pytest.approx(plain.losses, abs=1e-12)
    for mine, other in zip(ours.model.parameters(), plain.model.parameters(), strict=True):
        torch.testing.assert_close(mine, other, rtol=0, atol=1e-12)


RULES: dict[str, tuple[Callable[[int], Schedule], int, str]] = {
    "ddg": (ddg, 1, "stashed"),
    "ddg with current parameters": (lambda stages: ddg(stages, weights="current"), 1, "current"),
    "features_replay": (features_replay, 1, "replayed"),
    "pipelined_backprop": (pipelined_backprop, 2, "current"),
    "pipedream": (pipedream, 1, "stashed"),
}


@pytest.mark.parametrize("stages", [2, 4])
@pytest.mark.parametrize("name", RULES)
def test_late_gradients_are_those_of_the_rule_written_by_hand(name: str, stages: int) -> None:
    make, distance, weights = RULES[name]
    steps, lr = 9, 0.2
    ours = trained(make(stages), steps=steps, lr=lr, momentum=0.0)
    expected, losses = by_hand(stages, steps, lr, distance, weights)
    assert ours.losses == pytest.approx(losses, abs=1e-13)
    for mine, other in zip(ours.model.parameters(), expected, strict=True):
        torch.testing.assert_close(mine, other, rtol=0, atol=1e-13)


def by_hand(stages: int, steps: int, lr: float, distance: int, weights: str) -> tuple[list[Tensor], list[float]]:
    """W(k), b(k) after `steps` steps, and the losses: h = tanh(W h + b), layer by layer, without autograd.

    Stage k forwards batch t with its parameters after max(0, t - d(k)) updates, and updates by batch t's gradient as
    its t-th update.
    """
    layers = [[(layer[0].weight.detach().clone(), layer[0].bias.detach().clone())] for layer in perceptron()]
    each = len(layers) // stages
    delay = [distance * (stages - 1 - number // each) for number in range(len(layers))]
    losses = []
    for step, (x, y) in enumerate(batches(steps)):
        inputs, outputs = [], [x]
        for versions, late in zip(layers, delay, strict=True):
            w, b = versions[max(0, step - late)]
            inputs.append(outputs[-1])
            outputs.append(torch.tanh(inputs[-1] @ w.t() + b))
        losses.append(float(((outputs[-1] - y) ** 2).mean()))
        error = 2 * (outputs[-1] - y) / y.numel()
        for stage in reversed(range(stages)):
            own = range(stage * each, (stage + 1) * each)
            now = {n: layers[n][step if weights != "stashed" else max(0, step - delay[n])] for n in own}
            if weights == "replayed":
                for n in own:
                    inputs[n] = inputs[n] if n == own[0] else outputs[n]
                    outputs[n + 1] = torch.tanh(inputs[n] @ now[n][0].t() + now[n][1])
            for n in reversed(own):
                error = error * (1 - outputs[n + 1] ** 2)
                w, b = layers[n][step]
                layers[n].append((w - lr * error.t() @ inputs[n], b - lr * error.sum(0)))
                error = error @ now[n][0]
    ended = [versions[max(0, steps - late)] for versions, late in zip(layers, delay, strict=True)]
    return [tensor for pair in ended for tensor in pair], losses


@every
def test_two_pipelines_of_a_world_send_each_other_nothing(name: str) -> None:
    """Behind a pipeline that is left with messages under way another one works as if alone."""
    schedule, models = EVERY[name](2), (perceptron(), perceptron())
    strategy = strategy_of(schedule, None)
    sgd = partial(SGD, lr=0.05, momentum=0.9)
    cuts = [chain(model, schedule.stages * schedule.parts) for model in models]

    async def program(port: Port) -> None:
        for number, (model, parts) in enumerate(zip(models, cuts, strict=True)):
            whole, loss = laid_out(port, 2), nn.functional.mse_loss
            stage = PipelineStage(model, parts, of_parameters(sgd), loss, strategy, whole, seed=0, series=number)
            for x, y in batches(3 + 3 * number):
                await stage.step((x,), y)

    VirtualWorld(pt.cluster.ethernet(gbit_per_s=1), 2).run(program)
    for mine, other in zip(models[1].parameters(), trained(schedule).model.parameters(), strict=True):
        assert torch.equal(mine, other)


@every
def test_a_stage_holds_what_its_schedule_says(name: str) -> None:
    schedule = EVERY[name](4)
    ours = trained(schedule, steps=12)
    for stage, program in enumerate(ours.programs):
        assert program.most_held == facts(schedule, stage).held
        assert program.most_versions == facts(schedule, stage).versions


@every
def test_each_tensor_crosses_a_cut_once_forward_and_once_back(name: str) -> None:
    schedule, steps = EVERY[name](4), 12
    ours = trained(schedule, steps=steps)
    cuts = schedule.stages * schedule.parts - 1
    one_way = steps * cuts * SAMPLES * 6 * 8
    sent = sum(ours.sent_bytes)
    late = sum(facts(schedule, stage).held for stage in range(1, 4)) if name in DELAYED else 0
    assert one_way < sent <= 2 * one_way
    if not late:
        assert sent == 2 * one_way or name == "pipedream_2bw"


@every
def test_the_virtual_world_takes_the_time_of_the_timetable(name: str) -> None:
    """Equal stages on a network that costs nothing: the same steps as the schedule, played with the same times."""
    schedule, steps = EVERY[name](4), 12
    cluster = pt.cluster.ethernet(gbit_per_s=1e9, latency_us=0.0)
    flops = 1e12
    ours = trained(schedule, steps=steps, flops=flops, cluster=cluster)
    forward_s = flops * SAMPLES / schedule.micro_batches / 3 / (4 * schedule.parts) / cluster.flops_per_s
    timetable = played(schedule, steps, StageTimes(forward_s, 2 * forward_s, forward_s))
    assert ours.seconds == pytest.approx(timetable.seconds, rel=1e-6)


def test_stripes_of_a_layer_are_trained_as_the_layer_is() -> None:
    """Only the bits of a sum differ without delay."""

    def order(stage: int, stages: int, micro_batches: int) -> tuple[Action, ...]:
        return Action("forward"), Action("backward"), Action("update")

    schedule, losses = Schedule("in turn", 3, 1, order, stripes=2), []
    whole = nn.Sequential(*perceptron(3)[:2], perceptron(3)[2][0])
    model = striped(whole, "2", 2)
    parts = cut(model, sample=batches(1)[0][0], by=["2.stripes.0", "2.stripes.1"])
    optimizers = [SGD(each.module.parameters(), lr=0.1, momentum=0.9) for each in parts.stages]
    programs = [StageProgram(parts, schedule, k, stepping(own)) for k, own in enumerate(optimizers)]

    async def program(port: Port) -> None:
        for x, y in batches(6):
            batch = MicroBatch((x,), parts.layouts(x), lambda output, y=y: nn.functional.mse_loss(output, y), no_seed)
            if (loss := await programs[port.rank].step(port, [batch])) is not None:
                losses.append(float(loss))

    VirtualWorld(pt.cluster.ethernet(gbit_per_s=1), 3).run(program)
    plain, optimizer = [], SGD(whole.parameters(), lr=0.1, momentum=0.9)
    for x, y in batches(6):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(whole(x), y)
        loss.backward()
        optimizer.step()
        plain.append(float(loss.detach()))
    assert losses == pytest.approx(plain, abs=1e-13)
    for name, tensor in unstriped(model.state_dict()).items():
        torch.testing.assert_close(tensor, whole.state_dict()[name], rtol=0, atol=1e-13)


def no_seed(part: int) -> None:
    """Nothing is drawn."""


def stepping(optimizer: SGD) -> Callable[[], Any]:
    async def update() -> None:
        optimizer.step()
        optimizer.zero_grad()

    return update


@pytest.mark.parametrize("strategy", [pt.strategies.gpipe(2, 1), pt.strategies.zero_bubble(2, 1)], ids=str)
def test_stages_of_16_bits_with_norms_that_stay_float32_are_the_whole_model(strategy: pt.Strategy) -> None:
    """Equal to the bit, where no batch is cut and crossing tensors have 16 bits anyway."""
    x, y = torch.randn(2, 24, 6, generator=torch.Generator().manual_seed(0)).unbind()

    def model() -> nn.Module:
        return nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 6))

    job = pt.Job(
        model=model,
        data=lambda path: pt.Data(torch.utils.data.TensorDataset(x, y)),
        loss=nn.functional.mse_loss,
        optimizer=lambda parameters, lr: torch.optim.AdamW(parameters, lr=lr),
        batch_size=8,
        lr=0.01,
    )
    ours, plain = (
        pt.simulate(job, each, workers, pt.cluster.one_host(), steps=5, precision="bf16", threads=1)
        for each, workers in ((strategy, 2), (pt.strategies.sync_sgd(), 1))
    )
    assert ours.parameters_sha256 == plain.parameters_sha256
