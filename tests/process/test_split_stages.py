"""Data × stages × parts of layers, on a mesh of 2 × 2 × 2: one process's results; both worlds to the same bits."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import polytempo as pt
from parted_job import far, text_loss, texts
from polytempo.cluster import one_host
from polytempo.core import Port, Strategy
from polytempo.partition.cutting import cut
from polytempo.partition.tensor.way import SplitLayers
from polytempo.training.pipeline.pipeline_stage import PipelineStage, laid_out
from polytempo.worlds import ProcessWorld, VirtualWorld
from process.crew import together
from split_models import RULES, Transformer, made

pytestmark = pytest.mark.process

s = pt.strategies
STEPS, MAX_NORM, EACH = 4, 0.5, 4
"""Steps, the bound of the gradient's norm, and samples of a replica."""


def net() -> nn.Module:
    """No dropout: its masks follow micro-batches and parts in a pipeline."""
    return made(lambda: Transformer(0.0))


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.2, momentum=0.9)


def batch(step: int, replica: int) -> tuple[Tensor, Tensor]:
    inputs, targets = texts(2 * STEPS * EACH, 7).tensors
    begin = (2 * step + replica) * EACH
    return inputs[begin : begin + EACH], targets[begin : begin + EACH]


def alone() -> dict[str, Tensor]:
    """One process, with the batches of both replicas joined."""
    model = net()
    optimizer = sgd(model.parameters())
    for step in range(STEPS):
        optimizer.zero_grad()
        (x, target), (other, more) = batch(step, 0), batch(step, 1)
        text_loss(model(torch.cat([x, other])), torch.cat([target, more])).backward()
        nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
    return {name: p.detach() for name, p in model.named_parameters()}


RULES_OF_STAGES = {name: way for name, way in RULES.items() if name not in ("characters", "scores")}
"""The table of characters is also the table of scores, in the other stage: both are whole here."""


def strategy_of(kind: str) -> Strategy:
    inner = s.split(RULES_OF_STAGES, parts=2)
    return s.gpipe(2, 2, inner=inner) if kind == "gpipe" else s.one_f_one_b(2, 2, inner=inner)


def on_processes(world: ProcessWorld, strategy: Strategy) -> list[Any]:
    x, _ = batch(0, 0)
    pipe = pt.pipeline(net(), sgd, text_loss, strategy, sample=x, max_norm=MAX_NORM)
    replica = pipe.ports.data.rank
    for step in range(STEPS):
        pipe.step(*batch(step, replica))
    pipe.finish()
    return [{name: tensor.tolist() for name, tensor in pipe.state_dict().items()}, str(pipe.ports.whole.mesh)]


def stage_of(model: nn.Module, strategy: Strategy, port: Port) -> PipelineStage:
    parts = cut(model, 2, sample=batch(0, 0)[0])
    return PipelineStage(
        model, parts, lambda m: sgd(m.parameters()), text_loss, strategy, port, seed=0, max_norm=MAX_NORM
    )


def virtual(strategy: Strategy) -> list[dict[str, Tensor]]:
    async def program(port: Port) -> dict[str, Tensor]:
        assert isinstance(strategy.parted, SplitLayers)
        whole, own = laid_out(port, 2, 2), net()
        stage = stage_of(own, strategy, whole)
        for step in range(STEPS):
            inputs, target = batch(step, stage.ports.data.rank)
            await stage.step((inputs,), target)
        await stage.finish()
        return await stage.state_dict()

    outcome = VirtualWorld(one_host(8), 8).run(program)
    assert outcome.unreceived == 0
    return outcome.results  # type: ignore[return-value]


@pytest.mark.parametrize("kind", ["gpipe", "one_f_one_b"])
def test_eight_ranks_compute_what_one_process_does(kind: str) -> None:
    expected, strategy = alone(), strategy_of(kind)
    found = virtual(strategy)
    for rank in found:
        assert far({name: rank[name] for name in expected}, expected) < 1e-12
    if kind == "gpipe":
        return
    processes = together(8, lambda world: on_processes(world, strategy), timeout_s=180)
    for state, mesh in processes:
        assert mesh == "mesh(data=2, stage=2, model=2)"
        assert state == {name: tensor.tolist() for name, tensor in found[0].items()}


def as_tensors(numbers: dict[str, Any]) -> dict[str, Tensor]:
    return {name: torch.tensor(each, dtype=torch.float64) for name, each in numbers.items()}


@pytest.mark.parametrize("stages", [1, 2])
def test_one_part_is_whole_layers(stages: int) -> None:
    """So that a program that names its parts runs on one worker a stage, too."""

    def found(inner: Strategy | None, world: ProcessWorld) -> list[Any]:
        strategy = s.one_f_one_b(stages, 2, inner=inner)
        pipe = pt.pipeline(net(), sgd, text_loss, strategy, sample=batch(0, 0)[0])
        for step in range(STEPS):
            pipe.step(*batch(step, 0))
        return [{name: tensor.tolist() for name, tensor in pipe.state_dict().items()}]

    split, whole = (
        together(stages, partial(found, inner)) for inner in (s.split(RULES_OF_STAGES, parts=1), s.sync_sgd())
    )
    for (one,), (other,) in zip(split, whole, strict=True):
        assert far(as_tensors(one), as_tensors(other)) < 1e-12


def refused(strategy: Strategy, model: nn.Module, sample: Tensor, by: Any = "operations", size: int = 4) -> str:
    """The error that rank 0 gets when the stages are made, or at their first batch."""

    async def made_and_called(port: Port) -> None:
        parts, whole = cut(model, 2, sample=sample, by=by), laid_out(port, 2, 2)
        stage = PipelineStage(model, parts, lambda m: sgd(m.parameters()), text_loss, strategy, whole, seed=0)
        await stage.step((sample,), sample)

    with pytest.raises(
        (ValueError, pt.errors.Deadlock)
    ) as error:  # where others wait for this stage, its error is the cause
        VirtualWorld(one_host(size), size).run(made_and_called)
    return str(error.value.__cause__ or error.value)


def test_mistakes() -> None:
    def told(rules: Any, size: int = 4) -> str:
        return refused(s.gpipe(2, inner=s.split(rules)), net(), batch(0, 0)[0], size=size)

    assert "no layer '*.upp' (did you mean" in told({"*.upp": "column"})
    assert "give rules by name" in told("auto")
    assert "characters.weight is used by the parts [0, 1] of the model" in told({"characters": "embedding"})
    assert 'scores is split by "vocabulary", and the loss of a pipeline' in told({"scores": "vocabulary"})
    assert "6 ranks cannot be replicas of 2 stages each, of 2 ranks each; start 8" in told(RULES_OF_STAGES, 6)
    pair = s.gpipe(2, 1, inner=s.split({"0": "column", "2": "row"}))
    layers = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 4))
    assert "part 0 of the model answers another tensor on each rank" in refused(pair, layers, torch.ones(2, 4), ["2"])
