"""A loop of one's own goes on from its last commit when workers are killed, and takes in others."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import TensorDataset

import polytempo as pt
from polytempo.engines.processes.failures import WorkerDied
from polytempo.runs.elastic.run_elastic import ElasticLauncher
from process.elastic_stories import harmed, watching
from waiting import soon

pytestmark = [pytest.mark.process, pytest.mark.usefixtures("none_left")]

SAMPLES, EPOCHS = 61, 4


def fresh() -> pt.training.ElasticState:
    """A model, its optimizer, how often each sample was used, and the position in the data."""
    torch.manual_seed(0)
    model = nn.Linear(1, 1)
    return pt.training.ElasticState(model, torch.optim.Adam(model.parameters()), used=[0] * SAMPLES, position=None)


class Told(pt.callbacks.Callback):
    """Writes its calls into a file; asks for the end after a step."""

    def __init__(self, file: Path, stop_at: int = 0) -> None:
        self.file, self.stop_at = file, stop_at

    def write(self, line: str) -> None:
        with self.file.open("a") as file:
            file.write(line + "\n")

    def on_start(self, facts: pt.callbacks.CallbackFacts) -> None:
        self.write("start")

    def on_step(self, facts: pt.callbacks.CallbackFacts) -> pt.callbacks.Control:
        return pt.callbacks.Control(stop=facts.step == self.stop_at)

    def on_fault(self, facts: pt.callbacks.CallbackFacts) -> None:
        self.write(facts.fault)

    def on_finish(self, facts: pt.callbacks.CallbackFacts) -> None:
        self.write(facts.status)


@pytest.mark.parametrize("precision", [None, "bf16"])
def test_each_sample_counts_once_over_kills_and_joins(precision: str | None, tmp_path: Path) -> None:
    hurry = tmp_path / "hurry"
    numbers = torch.arange(SAMPLES)

    def train(state: Any) -> list[Any]:
        pt.attach(state.model, state.optimizer, precision=precision, callbacks=[Told(tmp_path / "told")])
        batches = pt.shard(TensorDataset(numbers, numbers.float()[:, None]), batch_size=2)
        if state.position is not None:
            batches.load_state_dict(state.position)
        slow_s = 0.02
        while batches.epoch < EPOCHS:
            for which, x in batches:
                if not hurry.exists():
                    soon(hurry.exists, slow_s)
                    slow_s = min(1.0, slow_s * 1.05)
                state.optimizer.zero_grad()
                state.model(x).mean().backward()
                state.optimizer.step()
                used = torch.zeros(SAMPLES, dtype=torch.int64)
                used[which] = int(batches.inner.local_samples > 0)
                dist.all_reduce(used)
                state.used = (torch.tensor(state.used) + used).tolist()
                state.position = batches.state_dict()
                state.commit()
        return [state.used, state.model.state_dict()["weight"].item()]

    def story(launcher: ElasticLauncher) -> Iterator[None]:
        for size, number in ((2, signal.SIGKILL), (2, signal.SIGTERM)):
            while launcher.view is None or len(launcher.view.members) < size or not launcher.is_training:
                yield
            yield from harmed(launcher, 0, number)
        while len(launcher.view.members) < 2 or not launcher.is_training:
            yield

    used, weight = pt.elastic(train, fresh(), workers=2, watch=watching(story, hurry))
    assert used == [EPOCHS] * SAMPLES
    assert weight != fresh().model.weight.item()
    assert hurry.exists()
    told = (tmp_path / "told").read_text().splitlines()
    assert (told[0], told[1], told[-1]) == ("start", "start", "finished")
    assert told.count("finished") == 1
    assert "the group of workers has changed: 1 go on" in told


def test_all_workers_stop_after_the_commit_that_brings_a_request(tmp_path: Path) -> None:
    def train(state: Any) -> list[int]:
        handle = pt.attach(state.model, state.optimizer, callbacks=[Told(tmp_path / "told", stop_at=3)])
        batches = pt.shard(TensorDataset(torch.arange(SAMPLES), torch.ones(SAMPLES, 1)), batch_size=2)
        while not handle.stopped:
            for _, x in batches:
                state.optimizer.zero_grad()
                state.model(x).mean().backward()
                state.optimizer.step()
                state.commit()
        every = [torch.zeros(1, dtype=torch.int64) for _ in range(dist.get_world_size())]
        dist.all_gather(every, torch.tensor([handle.step]))
        return [int(each) for each in every]

    assert pt.elastic(train, fresh(), workers=2) == [3, 3]
    assert (tmp_path / "told").read_text().splitlines() == ["start", "finished"]


def averaged(strategy: str, commits_every: int, hurry: Path) -> Any:
    """A loop of two workers with a strategy that averages; the first is killed within a round of steps."""
    data = TensorDataset(torch.arange(SAMPLES), torch.ones(SAMPLES, 1))

    def train(state: Any) -> int:
        handle = pt.attach(state.model, state.optimizer, pt.parse_strategy(strategy))
        batches = pt.shard(data, batch_size=2)
        if state.position is not None:
            batches.load_state_dict(state.position)
        slow_s = 0.01
        while batches.epoch < EPOCHS:
            for which, x in batches:
                if not hurry.exists():
                    soon(hurry.exists, slow_s)
                    slow_s = min(1.0, slow_s * 1.05)
                state.optimizer.zero_grad()
                (state.model(x) * which[:, None]).mean().backward()  # each worker's own way
                state.optimizer.step()
                if handle.step % commits_every == 0:
                    state.position, state.commits = batches.state_dict(), state.commits + 1
                    state.commit()
        return int(state.commits)

    def watch(launcher: ElasticLauncher) -> None:
        if launcher.view is not None and launcher.is_training and launcher.view.generation == 1 and not killed:
            process: Any = launcher.processes[launcher.view.members[0]]
            os.kill(process.pid, signal.SIGKILL)
            killed.append(process.pid)
        elif launcher.is_training and launcher.view is not None and len(launcher.view.members) == 2 and killed:
            hurry.touch()

    killed: list[int] = []
    model = nn.Linear(1, 1)
    state = pt.training.ElasticState(model, torch.optim.SGD(model.parameters(), lr=1e-3), position=None, commits=0)
    return pt.elastic(train, state, workers=2, watch=watch)


def test_a_loop_that_averages_commits_where_models_are_alike(tmp_path: Path) -> None:
    commits = averaged("diloco(period=3)", 3, tmp_path / "hurry")
    assert commits > EPOCHS * SAMPLES // (2 * 2 * 3) - 3
    with pytest.raises(WorkerDied, match=r"commit\(\) after step 1, where workers' models differ: local_sgd\(period=3"):
        averaged("local_sgd(period=3)", 1, tmp_path / "hurry")


def test_what_the_loop_raises_ends_it() -> None:
    def train(state: Any) -> None:
        raise KeyError("no such thing")

    with pytest.raises(WorkerDied, match="no such thing"):
        pt.elastic(train, fresh(), workers=1)


def test_a_state_goes_back_to_its_last_commit() -> None:
    state: Any = fresh()
    before = state.model.weight.clone()
    state.model(torch.ones(1, 1)).sum().backward()
    state.optimizer.step()
    state.used[3] = 7
    state.restore()
    assert torch.equal(state.model.weight, before)
    assert not state.optimizer.state_dict()["state"]
    assert state.used[3] == 0
    state.used[3] = 8
    state.commit()
    state.used[3] = 9
    state.restore()
    assert state.used[3] == 8


def test_a_value_cannot_have_the_name_of_a_method() -> None:
    model = nn.Linear(1, 1)
    with pytest.raises(ValueError, match="commit: the state has something of that name"):
        pt.training.ElasticState(model, torch.optim.SGD(model.parameters(), 0.1), commit=1)
