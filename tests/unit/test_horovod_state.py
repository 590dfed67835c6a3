"""States of Horovod's elastic API in one process: saved values come back; without a launcher there is one call."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import polytempo.horovod.torch as hvd
from polytempo.horovod.elastic_place import ElasticPlace
from polytempo.horovod.torch.elastic import HostsUpdatedInterrupt
from polytempo.horovod.torch.elastic import state as states
from polytempo.horovod.torch.process_state import PROCESS


@pytest.fixture(autouse=True)
def alone() -> Iterator[None]:
    hvd.init()
    yield
    hvd.shutdown()


def trained_once(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    (model(torch.arange(6.0).view(2, 3)) * torch.arange(4.0).view(2, 2)).sum().backward()
    optimizer.step()


def everything(state: Any) -> tuple[list[float], float, list[int], int, list[int]]:
    """The compared values."""
    (moment,) = [each["exp_avg"] for each in state.optimizer.state.values()][:1] or [torch.zeros(1)]
    values = [value for p in state.model.state_dict().values() for value in p.flatten().tolist()]
    return values, moment.sum().item(), sorted(state.sampler.processed_indices), state.epoch, list(state.seen)


def test_a_torch_state_goes_back_to_its_commit() -> None:
    model = nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 2))
    optimizer = torch.optim.Adam(model.parameters())
    sampler = hvd.elastic.ElasticSampler(range(8))
    state: Any = hvd.elastic.TorchState(model, optimizer, sampler=sampler, epoch=0, seen=[])
    trained_once(model, optimizer)
    sampler.record_batch(0, 2)
    state.epoch, state.seen = 1, [7]
    state.commit()
    committed = everything(state)
    trained_once(model, optimizer)
    sampler.record_batch(1, 2)
    state.epoch = 2
    state.seen.append(8)
    assert all(mine != theirs for mine, theirs in zip(everything(state), committed, strict=True))
    state.restore()
    assert everything(state) == committed
    state.sync()
    assert everything(state) == committed
    state.model = nn.Linear(3, 2)
    state.save()
    with torch.no_grad():
        state.model.weight.add_(1)
    before = state.model.weight.clone()
    state.restore()
    assert torch.equal(state.model.weight + 1, before)


def test_a_value_without_a_name_is_an_error() -> None:
    state: Any = hvd.elastic.ObjectState(hvd.broadcast_object, hvd.rank, epoch=3)
    with pytest.raises(AttributeError, match="no value 'batch'; name it when the state is made"):
        state.batch += 1


def test_callbacks_of_a_reset_and_samplers() -> None:
    sampler = hvd.elastic.ElasticSampler(range(6), shuffle=False)
    sampler.record_batch(0, 2)
    state = hvd.elastic.TorchState(sampler=sampler)
    called: list[str] = []
    state.register_reset_callbacks([lambda: called.append("a"), lambda: called.append("b")])
    state.on_reset()
    assert (called, list(sampler)) == (["a", "b"], [2, 3, 4, 5])


def test_without_a_launcher_the_function_is_called_once_and_raises() -> None:
    state: Any = hvd.elastic.ObjectState(epoch=3)

    @hvd.elastic.run
    def train(state: Any, more: int) -> int:
        state.commit()
        state.check_host_updates()
        return int(state.epoch) + more

    @hvd.elastic.run
    def fails(state: Any) -> None:
        raise hvd.HorovodInternalError("lost")

    assert train(state, more=2) == 5
    with pytest.raises(hvd.HorovodInternalError, match="lost"):
        fails(state)


class Wishing:
    """A place with a launcher that wants the group to stop."""

    def __init__(self, steps: list[str], stops: bool) -> None:
        self.steps, self.stops = steps, stops

    def wishes(self) -> tuple[bool, bool]:
        return self.stops, False

    def begins_commit(self) -> None:
        self.steps.append("holds")

    def drops_commit(self) -> None:
        self.steps.append("drops")

    def has_committed(self) -> None:
        self.steps.append("committed")

    def has_synchronized(self) -> None:
        self.steps.append("synchronized")


@pytest.mark.parametrize("stops", [False, True])
def test_a_commit_saves_once_all_hold_it_and_then_tells_of_updates(
    monkeypatch: pytest.MonkeyPatch, stops: bool
) -> None:
    steps: list[str] = []
    place: ElasticPlace = Wishing(steps, stops)  # type: ignore[assignment]
    monkeypatch.setattr(PROCESS, "_place", place)

    class Noting(hvd.elastic.ObjectState):
        def save(self) -> None:
            steps.append("saved")

    state = Noting()
    if stops:
        with pytest.raises(HostsUpdatedInterrupt):
            state.commit()
        with pytest.raises(HostsUpdatedInterrupt):
            state.check_host_updates()
    else:
        state.commit()
        state.check_host_updates()
    assert steps == ["holds", "saved", "committed"]


def test_what_one_rank_has_recorded_is_shared_in_a_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    steps: list[str] = []
    place: ElasticPlace = Wishing(steps, stops=False)  # type: ignore[assignment]
    monkeypatch.setattr(PROCESS, "_place", place)
    sampler = hvd.elastic.ElasticSampler(range(6))
    state = hvd.elastic.TorchState(sampler=sampler)
    sampler.record_indices([4, 1])
    state.commit()
    assert (sampler.recorded_alone, sampler.processed_indices) == (frozenset(), {1, 4})
    assert steps == ["holds", "drops", "holds", "committed"], "none holds the state before the others' news are in it"


def test_a_rank_that_is_lost_while_states_are_synchronized_leaves_no_mixture(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Linear(3, 2)
    optimizer = torch.optim.Adam(model.parameters())
    sampler = hvd.elastic.ElasticSampler(range(8))

    def lost(obj: Any, root_rank: int, name: str) -> Any:
        raise hvd.HorovodInternalError("lost")

    state: Any = hvd.elastic.TorchState(model, optimizer, sampler=sampler, epoch=0, seen=[], bcast_object=lost)
    trained_once(model, optimizer)
    sampler.record_batch(0, 2)
    state.epoch = 1
    state.commit()
    committed = everything(state)
    trained_once(model, optimizer)
    sampler.record_batch(1, 2)
    state.epoch = 2
    with pytest.raises(hvd.HorovodInternalError, match="lost"):
        state.sync()
    state.restore()
    assert everything(state) == committed


def test_a_rank_that_is_lost_in_a_callback_of_a_reset_ends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    steps: list[str] = []
    monkeypatch.setattr(PROCESS, "_place", Wishing(steps, stops=False))
    monkeypatch.setattr(states, "shutdown", lambda: steps.append("left"))
    monkeypatch.setattr(states, "init", lambda: steps.append("joined"))
    errors: list[Exception] = [HostsUpdatedInterrupt()]
    lost: list[Exception] = [hvd.HorovodInternalError("lost in a callback")]

    def callback() -> None:
        if lost:
            raise lost.pop()

    state: Any = hvd.elastic.ObjectState(epoch=1)
    state.register_reset_callbacks([callback])

    @hvd.elastic.run
    def train(state: Any) -> int:
        if errors:
            state.epoch = 2
            raise errors.pop()
        return int(state.epoch)

    assert train(state) == 1, "back to the commit"
    assert steps == ["synchronized", "left", "joined", "left", "joined", "synchronized"]


def test_a_strategy_is_refused_in_an_elastic_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PROCESS, "_place", Wishing([], stops=False))
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ValueError, match="belongs to one group of ranks"):
        hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters(), strategy="sync_sgd()")
