"""A step that is broken off at its commit point is finished or undone, as the next view says, and leaves no trace."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import polytempo as pt
from polytempo.core import Bundle, PeerLost, Port, Strategy, Transform
from polytempo.data.spans import PlaceSpan
from polytempo.membership.message import GroupView
from polytempo.spec.precision import precision_of
from polytempo.spec.run_options import RunOptions
from polytempo.spec.run_spec import RunSpec
from polytempo.synchronization import every
from polytempo.training.elastic import elastic_training
from polytempo.training.elastic.commit_point import Committed, Wishes, commit_point
from polytempo.training.elastic.elastic_training import ElasticTraining
from polytempo.training.elastic.island_member import IslandMember
from polytempo.training.elastic.local_round import LocalRound
from polytempo.worlds import ProcessWorld

STEPS = 12
BROKEN = 5
"""The commit point raises in this step."""


def spec(precision: str | None, strategy: Strategy) -> RunSpec:
    """Twelve steps of a model with running statistics, momentum and a schedule."""

    def data(path: Any) -> pt.Data:
        x = torch.randn(40, 3, generator=torch.Generator().manual_seed(0))
        return pt.Data(TensorDataset(x, x.sum(1, keepdim=True)), None)

    def schedule(optimizer: torch.optim.Optimizer, steps_per_epoch: int) -> Any:
        return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)

    job = pt.Job(
        model=lambda: nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)),
        data=data,
        loss=nn.functional.mse_loss,
        optimizer=lambda parameters, lr: torch.optim.SGD(parameters, lr, momentum=0.9),
        schedule=schedule,
        lr=0.05,
        batch_size=8,
        name="small",
    )
    options = RunOptions(steps=STEPS, min_workers=1, seed=3, precision=precision_of(precision))
    return RunSpec.of(job, strategy, 1, options)


def begun(precision: str | None = None, strategy: Strategy | None = None) -> ElasticTraining:
    """The only member of a run, at its beginning."""
    given = spec(precision, strategy or pt.strategies.sync_sgd())
    training = ElasticTraining(given, 0, Wishes, lambda row: None)
    training.enter(GroupView(1, (0,), 0, 0))
    training.begin(ProcessWorld(0, [0]), GroupView(1, (0,), 0, 0))
    return training


def trained(training: ElasticTraining) -> dict[str, Tensor]:
    """The model at the end of the run; the account of its samples closes."""
    assert training.context is not None
    assert training.account is not None
    training.train(training.context.observer._world)  # type: ignore[attr-defined]
    training.account.check(training.context.shard.epoch, training.context.shard.consumed)
    assert training.member.applied == STEPS
    return {name: tensor.clone() for name, tensor in training.model.state_dict().items()}


@pytest.mark.parametrize("finished", [True, False])
@pytest.mark.parametrize("precision", [None, "bf16", "fp16(loss_scale=1000)"])
def test_a_broken_step_is_finished_or_undone(
    precision: str | None, finished: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step with 16-bit parameters is finished on the masters, by the gradient without its scale."""
    calm = trained(begun(precision))
    training = begun(precision)
    committed: list[Any] = []

    async def breaks(port: Port, wishes: Any, own: Any) -> Committed:
        if training.member.applied == BROKEN and not committed:
            committed.append(own)
            raise PeerLost(0, BROKEN, "all_reduce", 1)
        return await commit_point(port, wishes, own)

    monkeypatch.setattr(elastic_training, "commit_point", breaks)
    with pytest.raises(PeerLost):
        trained(training)
    report = training.member.report()
    assert (report.applied, report.holds, report.stateful) == (BROKEN, True, True)
    view = GroupView(2, (0,), 1, BROKEN + finished)
    training.enter(view)
    assert training.account is not None
    if finished:  # another member has seen it committed, and its account comes with the view
        training.account.add(committed[0])
    training.begin(ProcessWorld(0, [0]), view)
    again = trained(training)
    assert all(torch.equal(again[name], tensor) for name, tensor in calm.items())


def test_a_group_that_breaks_as_it_begins_leaves_the_training_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    """The members have hooks of the new group, but not yet their state in it."""
    calm = trained(begun())
    training = begun()
    sent = elastic_training.broadcast_json
    broken: list[int] = []

    async def stops(port: Port, wishes: Any, own: Any) -> Committed:
        if training.member.applied == BROKEN and not broken:
            raise PeerLost(0, BROKEN, "all_reduce", 1)
        return await commit_point(port, wishes, own)

    async def breaks(port: Port, value: Any) -> Any:
        if not broken:
            broken.append(training.member.applied)
            raise PeerLost(0, BROKEN, "broadcast", 1)
        return await sent(port, value)

    monkeypatch.setattr(elastic_training, "commit_point", stops)
    monkeypatch.setattr(elastic_training, "broadcast_json", breaks)
    with pytest.raises(PeerLost):
        trained(training)
    view = GroupView(2, (0,), 1, BROKEN)
    training.enter(view)
    with pytest.raises(PeerLost):
        training.begin(ProcessWorld(0, [0]), view)
    view = GroupView(3, (0,), 1, BROKEN)
    training.enter(view)
    training.begin(ProcessWorld(0, [0]), view)
    again = trained(training)
    assert broken == [BROKEN]
    assert all(torch.equal(again[name], tensor) for name, tensor in calm.items())


@pytest.mark.parametrize("finished", [True, False])
def test_a_step_inside_an_island_is_finished_or_undone(finished: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another member of the island has made the step that is broken off, or none has."""

    async def answers(port: Port, bundle: Bundle, state: None) -> tuple[Bundle, None]:
        return bundle.copy(), None  # a mean does nothing where one is alone

    copies = Transform(lambda parameters: None, answers)
    outer = Strategy("outer", parameters=every(4, copies), synchronized=False)
    strategy = pt.strategies.islands(Strategy("inner", gradients=copies), outer)
    calm = trained(begun(strategy=strategy))
    training = begun(strategy=strategy)
    step, deal = IslandMember.step, IslandMember.deal
    broken: list[LocalRound] = []

    async def breaks(self: IslandMember, port: Port, own: LocalRound, spans: Any) -> list[PlaceSpan]:
        found = await step(self, port, own, spans)
        assert training.context is not None
        if own.steps == BROKEN % 4 and training.member.applied == 4 and not broken:
            broken.append(LocalRound(own.steps + 1, [*own.spans, *found], training.context.shard.state_dict()))
            raise PeerLost(0, BROKEN, "all_gather", 1)
        return found

    async def dealt(self: IslandMember, port: Port, stateful: int, own: LocalRound) -> LocalRound | None:
        assert self.holds
        assert await deal(self, port, stateful, own) is None
        return broken[0] if finished else None

    monkeypatch.setattr(IslandMember, "step", breaks)
    with pytest.raises(PeerLost):
        trained(training)
    report = training.member.report()
    assert (report.applied, report.holds, report.stateful) == (4, 0, True)
    view = GroupView(2, (0,), 1, 4)
    training.enter(view)
    monkeypatch.setattr(IslandMember, "deal", dealt)
    training.begin(ProcessWorld(0, [0]), view)
    assert training.member.applied == BROKEN + finished
    again = trained(training)
    assert all(torch.equal(again[name], tensor) for name, tensor in calm.items())
