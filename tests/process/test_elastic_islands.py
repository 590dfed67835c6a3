"""Islands outlive members, and other islands: each sample counts, and the members of an island stay equal."""

from __future__ import annotations

import hashlib
import os
import signal
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import polytempo as pt
from polytempo.engines.ssh_engine import Ssh
from polytempo.runs.elastic.run_elastic import ElasticLauncher, run_elastic
from polytempo.runs.run_collective import run_collective
from polytempo.spec.precision import precision_of
from polytempo.spec.run_options import RunOptions
from polytempo.spec.run_spec import RunSpec
from process.elastic_stories import harmed, trains_with, watching
from process.test_elastic_hosts import host_of, members_of, named
from process.test_elastic_rounds import digits, told
from process.test_remote_engine import agent_pids, children_of

pytestmark = [pytest.mark.process, pytest.mark.usefixtures("none_left")]

EPOCHS, SAMPLES = 6, 1437
BY_DILOCO = "islands(outer=diloco(period=6, outer_momentum=0.5))"
BY_LOSS = "islands(outer=local_sgd(period=by_loss(first=6)))"


class Watched(nn.Module):
    """The model of digits. Its process writes a hash of the parameters before each training pass."""

    def __init__(self, inner: nn.Module, folder: Path) -> None:
        super().__init__()
        self.inner, self._folder = inner, folder

    def forward(self, x: Tensor) -> Tensor:
        """See the class."""
        if self.training:
            words = (parameter.detach().view(torch.uint8) for parameter in self.parameters())
            bits = b"".join(each.numpy().tobytes() for each in words)
            with (self._folder / str(os.getpid())).open("a") as file:
                file.write(hashlib.sha256(bits).hexdigest() + "\n")
        return self.inner(x)


def normed() -> nn.Module:
    """The model of digits with batch norm."""
    return nn.Sequential(nn.Linear(64, 128), nn.BatchNorm1d(128), nn.ReLU(), nn.Linear(128, 10))


def watched(folder: Path, norms: bool = False) -> pt.Job:
    """The job of `digits` with `Watched`."""
    found = digits(folder / "hurry")
    model = normed if norms else found.model
    return replace(found, model=lambda: Watched(model(), folder))


def spec_of(folder: Path, strategy: str, workers: int = 4, norms: bool = False, **options: Any) -> RunSpec:
    options = {"epochs": EPOCHS, "global_batch_size": 48, "seed": 2, "threads": 1} | options
    return RunSpec.of(watched(folder, norms), pt.parse_strategy(strategy), workers, RunOptions(**options))


class Told:
    """An elastic run with a story, and the hashes of the last members by life."""

    def __init__(self, story: Any, spec: RunSpec, folder: Path) -> None:
        self.files: dict[int, Path] = {}

        def observed(launcher: ElasticLauncher, room: list[int]) -> Iterator[None]:
            yield from story(launcher, room)
            room.append(len(launcher.view.members))  # no more changes
            pids = {life: launcher.processes[life].pid for life in launcher.view.members}
            self.files = {life: folder / str(pid) for life, pid in pids.items()}

        self.result = told(observed, spec, folder / "hurry", spec.workers)
        self.hashes = {life: file.read_text().split() for life, file in self.files.items()}

    def together(self, *lives: int) -> int:
        """The number of last steps that these members made with equal parameters."""
        steps = zip(*(reversed(self.hashes[life]) for life in lives), strict=False)
        shortest = min(len(self.hashes[life]) for life in lives)
        return next((i for i, step in enumerate(steps) if len(set(step)) > 1), shortest)

    def meetings(self, life: int, other: int) -> int:
        """The number of steps that both began with equal parameters."""
        return len(set(self.hashes[life]) & set(self.hashes[other]))


@pytest.mark.parametrize(
    ("strategy", "norms", "precision"),
    [
        (BY_DILOCO, False, None),
        (BY_LOSS, True, None),
        (BY_DILOCO, True, "bf16"),
        ("islands(outer=local_sgd(period=by_variance(first=4)))", False, "bf16"),
        ("islands(outer=local_sgd(period=by_time(1e6, 3, 3)))", False, None),
        ("islands(inner=top_k_sgd(0.3), outer=diloco(period=growing(first=2, longest=8, repeats=2)))", False, None),
    ],
)
def test_without_losses_elastic_islands_are_the_others_bit_by_bit(
    strategy: str, norms: bool, precision: str | None, tmp_path: Path
) -> None:
    spec = spec_of(tmp_path, strategy, 3, norms, epochs=2, precision=precision_of(precision))
    (tmp_path / "hurry").touch()
    calm = run_collective(spec, pt.engines.local())
    elastic = run_elastic(replace(spec, options=replace(spec.options, min_workers=1)), pt.engines.local())
    assert elastic.parameters_sha256 == calm.parameters_sha256
    assert (elastic.loss, elastic.accuracy) == (calm.loss, calm.accuracy), "with the same running statistics"
    assert elastic.ledger == calm.ledger


@pytest.mark.parametrize(
    ("strategy", "norms", "precision"),
    [
        (BY_DILOCO, False, None),
        ("islands(inner=top_k_sgd(0.3), outer=local_sgd(period=4, codec=feedback(top_k(0.3))))", False, None),
        ("islands(outer=gossip(period=3))", False, None),
        (BY_LOSS, True, "bf16"),
    ],
)
def test_a_member_dies_another_leaves_and_newcomers_join_the_smallest_islands(
    strategy: str, norms: bool, precision: str | None, tmp_path: Path
) -> None:
    """0 1 | 2 3, then 1 4 | 2 3, then 1 4 | 3 5: the first members of both islands have gone."""

    def story(launcher: ElasticLauncher, room: list[int]) -> Iterator[None]:
        for life, number in ((0, signal.SIGKILL), (2, signal.SIGTERM)):
            yield from trains_with(launcher, 4)
            assert launcher.view is not None
            yield from harmed(launcher, launcher.view.members.index(life), number)
        yield from trains_with(launcher, 4)

    options = {"min_workers": 1, "max_workers": 4, "precision": precision_of(precision)}
    run = Told(story, spec_of(tmp_path, strategy, norms=norms, **options), tmp_path)
    assert [(row["once"], row["last_epoch"]) for row in run.result.ledger] == [(SAMPLES, EPOCHS - 1)]
    assert sorted(run.files) == [1, 3, 4, 5]
    for members in ((1, 4), (3, 5)):
        assert run.together(*members) == min(len(run.hashes[life]) for life in members)
    assert run.together(1, 3) < len(run.hashes[1])
    assert ("gossip" in strategy) or run.meetings(1, 3) > 2
    assert run.result.accuracy > 0.9


def test_an_island_that_dies_takes_down_no_other(tmp_path: Path) -> None:
    def story(launcher: ElasticLauncher, room: list[int]) -> Iterator[None]:
        yield from trains_with(launcher, 4)
        for life in (2, 3):
            process: Any = launcher.processes[life]
            os.kill(process.pid, signal.SIGKILL)
        yield from trains_with(launcher, 2)

    run = Told(story, spec_of(tmp_path, BY_DILOCO, min_workers=1, max_workers=4, restarts=0), tmp_path)
    assert [(row["once"], row["last_epoch"]) for row in run.result.ledger] == [(SAMPLES, EPOCHS - 1)]
    assert sorted(run.files) == [0, 1]
    assert len(set(run.hashes[0]) ^ set(run.hashes[1])) <= 2, "steps that one has begun and both have undone"
    assert run.together(0, 1) > 20
    assert run.result.accuracy > 0.9


def test_an_island_on_a_silent_host_is_left_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Members of the other island wait for it between islands; theirs goes on, within itself by gloo."""
    monkeypatch.setenv("TMPDIR", tempfile.gettempdir())  # of agents
    hurry, islands = tmp_path / "hurry", list[set[int]]()

    def story(launcher: ElasticLauncher) -> Iterator[None]:
        agents = agent_pids(os.getpid())
        yield from trains_with(launcher, 4)
        silent = (agents[1], *children_of(agents[1]))
        for pid in silent:
            os.kill(pid, signal.SIGSTOP)
        while any(host_of(launcher, life) == 1 for life in members_of(launcher)) or not launcher.is_training:
            yield
        islands.append(set(members_of(launcher)))
        for pid in silent:
            os.kill(pid, signal.SIGCONT)  # it comes back, and ends its old processes

    options = RunOptions(epochs=15, seed=2, timeout_s=60.0, min_workers=1, max_workers=4)
    engine = Ssh(
        ("a", "b"),
        python=sys.executable,
        command=("env", "HOST={host}"),
        address="127.0.0.1",
        environment={"POLYTEMPO_NATIVE": "0"},
    )
    spec = RunSpec.of(named(tmp_path, "own.py", hurry), pt.parse_strategy(BY_DILOCO), 4, options)
    result = run_elastic(spec, engine, None, None, watching(story, hurry))
    assert islands[0] >= {0, 2}, "the first ones of both hosts' workers"
    assert result.ledger is not None
    assert [(row["twice"], row["never"]) for row in result.ledger] == [(0, 0)]
