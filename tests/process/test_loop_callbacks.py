"""Callbacks of loops of one's own: ranks hear rank 0's requests after the same step, and idle ones change nothing."""

from __future__ import annotations

import functools
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD
from torch.utils.data import TensorDataset

import polytempo as pt
from polytempo.core import Strategy
from polytempo.worlds import ProcessWorld
from process.crew import batches, flat, mine, small, squared, together

pytestmark = pytest.mark.process

s = pt.strategies
STRATEGIES = [s.sync_sgd(), s.local_sgd(period=4), s.delayed_sgd(delay=2), s.gossip(), s.shared_memory()]
ENOUGH = 20_000
"""Steps that take longer than two looks; a loop ends long before."""


class Asks(pt.callbacks.Callback):
    """Asks after a step, and notes its calls."""

    def __init__(self, step: int, **asked: bool) -> None:
        self.step, self.asked = step, pt.callbacks.Control(**asked)
        self.seen: list[str] = []
        self.epoch = 0.0

    def on_start(self, facts: pt.callbacks.CallbackFacts) -> None:
        self.seen = ["start"]

    def on_step(self, facts: pt.callbacks.CallbackFacts) -> pt.callbacks.Control | None:
        self.seen.append("step")
        self.epoch = facts.epoch
        return self.asked if facts.step == self.step else None

    def on_finish(self, facts: pt.callbacks.CallbackFacts) -> None:
        self.seen.append(facts.status)

    def state_dict(self) -> dict[str, Any]:
        return {"seen": self.seen}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.seen = list(state["seen"])


def samples() -> TensorDataset:
    random = torch.Generator().manual_seed(3)
    return TensorDataset(*(torch.randn(26, width, generator=random, dtype=torch.float64) for width in (4, 3)))


def trained(
    strategy: Strategy, callbacks: list[Any], steps: int = ENOUGH
) -> tuple[nn.Module, pt.training.Handle, tuple[int, int]]:
    """A model after so many steps at most, and its handle, detached; the bytes and messages of its trace."""
    net = small()
    optimizer = SGD(net.parameters(), lr=0.01)
    handle = pt.attach(net, optimizer, strategy, callbacks=callbacks)
    trace = handle.world.trace
    before = sum(trace.bytes_sent), len(trace.events)
    shard = pt.shard(samples(), batch_size=4, seed=1)
    while not handle.stopped and handle.step < steps:
        for inputs, targets in shard:
            optimizer.zero_grad()
            squared(net(inputs), targets).backward()
            optimizer.step()
            if handle.step == steps:
                break
    net.eval()
    assert len(list(pt.shard(samples(), batch_size=4))) == len(shard)  # evaluations still get batches
    handle.detach()
    return net, handle, (sum(trace.bytes_sent) - before[0], len(trace.events) - before[1])


@pytest.mark.parametrize("strategy", STRATEGIES, ids=str)
def test_ranks_stop_after_the_same_step_and_idle_callbacks_change_nothing(strategy: Strategy) -> None:
    """The model is the model of a loop of so many steps; bits, bytes and events of idle callbacks are equal as well."""

    def work(world: ProcessWorld) -> dict[str, Any]:
        asks = Asks(5, stop=True)
        net, handle, _ = trained(strategy, [asks])
        alone, _, sent = trained(strategy, [], handle.step)
        idle, _, sent_watched = trained(strategy, [Asks(0)], handle.step)
        same = flat(net) == flat(alone) == flat(idle) and sent == sent_watched
        return {"step": handle.step, "same": same, "seen": asks.seen}

    first, second = together(2, work)
    assert 5 <= first["step"] == second["step"] < ENOUGH
    assert first["same"]
    assert second["same"]
    assert first["seen"] == ["start", *["step"] * first["step"], "finished"]
    assert second["seen"] == []


def test_one_process_follows_at_once() -> None:
    def work(world: ProcessWorld) -> list[float]:
        asks = Asks(9, stop=True)
        _, handle, _ = trained(s.sync_sgd(), [asks])
        return [handle.step, asks.epoch]

    assert together(1, work) == [[9, (26 + 2 * 4) / 26]]


def test_a_loop_over_another_loader_breaks() -> None:
    def work(world: ProcessWorld) -> list[int]:
        net = small()
        optimizer = SGD(net.parameters(), lr=0.01)
        handle = pt.attach(net, optimizer, callbacks=[Asks(3, stop=True, save=True)])
        saves, (inputs, targets) = 0, next(mine(batches(1), world))
        for _ in range(ENOUGH):
            optimizer.zero_grad()
            squared(net(inputs), targets).backward()
            optimizer.step()
            saves += handle.asked().save
            if handle.stopped:
                break
        handle.detach()
        return [handle.step, saves]

    first, second = together(2, work)
    assert first == second
    assert first[0] < ENOUGH
    assert first[1] == 1


def test_requests_of_an_evaluation_are_heard_there() -> None:
    """Early stopping: the model no longer changes, so the third evaluation is the last."""

    def work(world: ProcessWorld) -> list[Any]:
        net = small()
        optimizer = SGD(net.parameters(), lr=0.0)
        callback = pt.callbacks.early_stop("error", patience=2, better="less")
        handle = pt.attach(net, optimizer, callbacks=[callback])
        shard = pt.shard(samples(), batch_size=4, seed=1)
        evaluations = 0
        while not handle.stopped:
            for inputs, targets in shard:
                optimizer.zero_grad()
                squared(net(inputs), targets).backward()
                optimizer.step()
            handle.evaluate(lambda batch: {"error": (net(batch[0]) - batch[1]) ** 2}, samples())
            evaluations += 1
        state = handle.state_dict()["callbacks"]
        handle.detach()
        return [evaluations, handle.step, state]

    first, second = together(2, work)
    assert first[:2] == [3, 12]
    assert first == second  # all ranks have the states


def test_a_resumed_loop_gives_callbacks_their_states() -> None:
    def work(world: ProcessWorld) -> list[list[str]]:
        net = small()
        optimizer = SGD(net.parameters(), lr=0.01)
        seen: list[list[str]] = []
        state: dict[str, Any] | None = None
        for _ in range(2):
            asks = Asks(0)
            handle = pt.attach(net, optimizer, callbacks=[asks])
            if state is not None:
                handle.load_state_dict(state)
            inputs, targets = batches(1)[0]
            squared(net(inputs), targets).backward()
            optimizer.step()
            state = handle.state_dict()
            handle.detach()
            seen.append(asks.seen)
        return seen

    assert together(1, work)[0] == [["start", "step", "finished"], ["start", "step", "step", "finished"]]


def test_ranks_that_join_follow_as_well() -> None:
    """A rank that has left takes part in the looks with its shadow steps."""

    def work(world: ProcessWorld) -> int:
        net = small()
        optimizer = SGD(net.parameters(), lr=0.01)
        handle = pt.attach(net, optimizer, callbacks=[Asks(30, stop=True)])
        inputs, targets = next(mine(batches(1), world))
        with handle.join():
            for _ in range(10 if world.rank == 0 else ENOUGH):
                optimizer.zero_grad()
                squared(net(inputs), targets).backward()
                optimizer.step()
                if handle.stopped:
                    break
        handle.detach()
        return handle.step

    first, second = together(2, work)
    assert first == second < ENOUGH


def test_impossible_combinations_are_refused() -> None:
    def work(world: ProcessWorld) -> list[str]:
        codes, net = [], small()
        given: list[tuple[str, Any]] = [("hogwild", Asks(1)), ("sync_sgd", "keep(best=1)")]
        for strategy, callback in given:
            with pytest.raises(pt.errors.Incompatible) as caught:
                pt.attach(net, SGD(net.parameters(), lr=0.1), strategy, callbacks=[callback])
            codes.append(caught.value.code)
        with pytest.raises(pt.errors.Incompatible) as caught:
            piped(s.gpipe(1, 2), world, callbacks="keep(best=1)")
        return [*codes, caught.value.code]

    assert together(1, work) == [["PT2307", "PT2308", "PT2308"]]


SERVED = [s.downpour(shards=2), s.ssp(bound=1), s.backup_workers(backups=0), s.backup_workers(backups=1)]


@pytest.mark.parametrize("strategy", SERVED, ids=str)
def test_a_request_ends_a_loop_with_a_server_once_all_dealt_batches_are_done(strategy: Strategy) -> None:
    def work(world: ProcessWorld) -> list[Any]:
        net, asks = small(), Asks(3, stop=True, save=True)
        optimizer = SGD(net.parameters(), lr=0.01)
        handle = pt.attach(net, optimizer, strategy, callbacks=[asks])
        shard, steps, saves = pt.shard(samples(), batch_size=2, seed=1), 0, 0
        while not handle.stopped:
            for inputs, targets in shard:
                optimizer.zero_grad()
                squared(net(inputs), targets).backward()
                optimizer.step()
                steps, saves = steps + 1, saves + handle.asked().save
            found = handle.evaluate(lambda batch: {"error": (net(batch[0]) - batch[1]) ** 2}, samples())
        with handle.consensus():
            lent = flat(net)
        assert list(shard) == []
        handle.detach()
        assert lent == flat(net)
        return [steps, saves, found, lent, asks.seen, asks.epoch > 0]

    first, second = together(2, work)
    assert first[0] >= 3
    assert [first[1], second[1]] == [1, 0]
    assert first[2:4] == second[2:4]
    assert first[4:] == [["start", *["step"] * first[0], "finished"], True]
    assert second[4:] == [[], False]


def piped(schedule: Strategy, world: ProcessWorld, **options: Any) -> tuple[Any, Any]:
    """A pipeline of this rank, and its shard, which deals the same batches to all stages."""
    if schedule.server is None and world.port.mesh is None:
        pt.init(mesh={"data": 1, "stage": world.size})
    shard = pt.shard(samples(), batch_size=4, seed=1)
    sgd = functools.partial(SGD, lr=0.01)
    sample = samples().tensors[0][:4]
    return pt.pipeline(small(), sgd, nn.functional.mse_loss, schedule, sample=sample, **options), shard


@pytest.mark.parametrize("schedule", [s.gpipe(2, 2), s.pipedream(2), s.gpipe(2, 2, inner=s.ssp(bound=1))], ids=str)
def test_stages_stop_after_the_same_step_and_idle_callbacks_change_nothing(schedule: Strategy) -> None:
    """A callback asks at a step, and one asks at the third evaluation of a model that no longer gets better."""

    def work(world: ProcessWorld) -> list[Any]:
        asks, found = Asks(3, stop=True, save=True), list[Any]()
        for callbacks in ([asks], [pt.callbacks.early_stop("error", patience=2)], [Asks(0)], []):
            pipe, shard = piped(schedule, world, callbacks=callbacks)
            steps, evaluations, saves = 0, 0, 0
            while not pipe.stopped and steps < (ENOUGH if len(found) < 2 else 8):
                for inputs, targets in shard:
                    pipe.step(inputs, targets)
                    steps += 1
                    saves += pipe.asked().save
                evaluations += 1
                pipe.evaluated({"error": 1.0})
            state = pipe.state_dict()
            pipe.detach()
            found.append([steps, evaluations, saves, {name: tensor.tolist() for name, tensor in state.items()}])
        return [found, asks.seen]

    (first, seen), (second, nothing) = together(2, work)
    served = schedule.server is not None
    assert 3 <= first[0][0] == second[0][0] < ENOUGH
    assert (first[0][2], second[0][2]) == (1, 0 if served else 1)
    assert seen == ["start", *["step"] * first[0][0], "finished"]
    assert (nothing == []) == served  # other ranks get the states with the requests of an evaluation
    assert 3 <= first[1][1] == second[1][1] <= (4 if served else 3)
    assert first[2] == first[3]
    assert [each[3] for each in first] == [each[3] for each in second]


def test_a_pipeline_that_goes_on_gives_callbacks_their_states() -> None:
    def work(world: ProcessWorld) -> list[Any]:
        seen, state = list[Any](), None
        for _ in range(2):
            asks = Asks(0)
            pipe, shard = piped(s.gpipe(2, 2), world, callbacks=[asks])
            if state is not None:
                pipe.load_training_state(state)
            pipe.step(*next(iter(shard)))
            state = pipe.training_state()
            pipe.detach()
            seen.append(asks.seen)
        return seen

    first, second = together(2, work)
    assert first == [["start", "step", "finished"], ["start", "step", "step", "finished"]]
    assert second[0] == []


@pytest.mark.parametrize("layout", ["split", "hybrid"])
def test_parts_of_layers_stop_after_the_same_step(layout: str) -> None:
    def work(world: ProcessWorld) -> list[Any]:
        if layout == "split":
            pt.init(mesh={"data": 1, "model": 2})
        net: Any = small()
        net = pt.split(net, {"0": "column", "2": "row"}) if layout == "split" else pt.hybrid(net, ["0"])
        optimizer = SGD(net.parameters(), lr=0.01)
        handle = pt.attach(net, optimizer, callbacks=[Asks(3, stop=True)])
        shard = pt.shard(samples(), batch_size=4, seed=1)
        while not handle.stopped:
            for inputs, targets in shard:
                optimizer.zero_grad()
                squared(net(inputs), targets).backward()
                optimizer.step()
        found = handle.evaluate(lambda batch: {"error": (net(batch[0]) - batch[1]) ** 2}, samples())
        handle.detach()
        return [handle.step, found]

    first, second = together(2, work)
    assert first == second
    assert 3 <= first[0] < ENOUGH


def test_ranks_with_other_callbacks_are_named() -> None:
    def work(world: ProcessWorld) -> str:
        net = small()
        try:
            pt.attach(net, SGD(net.parameters(), lr=0.1), callbacks=["time_budget(9)"] if world.rank else [])
        except pt.errors.Mismatch as error:
            return str(error)
        return "attached"

    assert all("time_budget(9.0)" in text for text in together(2, work))


FAILS = """
import torch, polytempo as pt
class Tells(pt.callbacks.Callback):
    def on_fault(self, facts): print("fault:", facts.fault)
    def on_finish(self, facts): print("status:", facts.status)
pt.init(quiet=True)
net = torch.nn.Linear(2, 1)
pt.attach(net, torch.optim.SGD(net.parameters(), lr=0.1), callbacks=[Tells()])
raise KeyError("lost")
"""


def test_a_loop_that_fails_tells_its_callbacks() -> None:
    done = subprocess.run([sys.executable, "-c", FAILS], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 1
    assert done.stdout.splitlines() == ["fault: KeyError: 'lost'", "status: failed"]
