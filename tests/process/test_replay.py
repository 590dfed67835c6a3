"""A real run with a parameter server, repeated in the virtual world: the same weights and losses, to the bit."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset
from typer.testing import CliRunner

import polytempo as pt
from polytempo.cli.main import app
from polytempo.compression import bf16, feedback, fp16
from polytempo.core import Strategy
from polytempo.replay.message_order import Stop
from polytempo.replay.replay import Replayed, replay
from polytempo.report.status.rows import read_metrics
from polytempo.runs.served import run_served
from polytempo.runs.served.process_account import ProcessSupervisor
from polytempo.runs.served.run_served import Launcher
from polytempo.runs.served.served_run import ServedRun
from polytempo.server.message import Outbox

pytestmark = pytest.mark.process

s = pt.strategies


def data(num_samples: int) -> TensorDataset:
    """Inputs (num_samples, 6); the class is the largest of three sums."""
    inputs = torch.randn(num_samples, 6, generator=torch.Generator().manual_seed(0))
    return TensorDataset(inputs, inputs.view(num_samples, 3, 2).sum(-1).argmax(-1))


def job(**more: Any) -> pt.Job:
    """Dropout, so that each worker's noise has to come out the same, too."""
    return pt.Job(
        **{
            "model": lambda: nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 3)),
            "data": lambda folder: pt.Data(data(96), data(32)),
            "loss": nn.functional.cross_entropy,
            "optimizer": lambda parameters, lr: torch.optim.SGD(parameters, lr=lr, momentum=0.5),
            "batch_size": 4,
            "name": "sums",
            **more,
        }
    )


def killing(victims: Mapping[int, int]) -> type[Launcher]:
    """A launcher that kills node `victims[n]` when n tickets are done."""

    class Killing(Launcher):
        def __init__(self, run: ServedRun, supervisor: ProcessSupervisor) -> None:
            super().__init__(run, supervisor)
            self._left, self._killed_in = dict(victims), supervisor

        def tick(self, now_s: float) -> Outbox:
            done = sum(last - first + 1 for first, last in self._coordinator.scheduler.done)
            for number in [number for number in self._left if done >= number]:
                self._killed_in.kill(self._left.pop(number))
            return super().tick(now_s)

    return Killing


RUNS: dict[str, tuple[Strategy, int, dict[int, int]]] = {
    "two shards, a worker is killed": (s.async_sgd(shards=2), 3, {30: 1}),
    "pushes that overlap with pulls": (s.downpour(push_every=2, pull_every=3, shards=2), 2, {}),
    "gradients that wait for others": (s.softsync(), 4, {}),
    "a window after the quorum, its shard's head is killed": (
        s.decoupled_diloco(2, 1, grace_s=0.002, replicas=1),
        3,
        {30: 3},
    ),
    "regions, a worker is killed": (s.halos(2, 2, 2, shards=2, pull_codec=fp16()), 3, {30: 1}),
    "regions, one with a worker that is killed, and a shard's head is, too": (
        s.halos(2, 2, 3, replicas=1),
        3,
        {20: 2, 30: 3},
    ),
    "a shard's head is killed": (s.staleness_aware(replicas=1), 2, {30: 2}),
    "encoded both ways, a worker is killed": (
        s.downpour(2, 3, shards=2, codec=feedback(bf16()), pull_codec=fp16()),
        3,
        {30: 1},
    ),
}


@pytest.mark.parametrize("name", RUNS)
def test_a_replay_reaches_the_bits_of_the_run(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    strategy, workers, victims = RUNS[name]
    monkeypatch.setattr(run_served, "Launcher", killing(victims))
    result = pt.run(job(), strategy, workers, steps=36, threads=1, out=tmp_path)
    replayed = replay(tmp_path, job(), strategy)
    assert (replayed.difference, replayed.ends, replayed.notes) == (None, [], [])
    assert replayed.parameters_sha256 == replayed.recorded_sha256 == result.parameters_sha256
    assert all(taken == recorded > 0 for taken, recorded in replayed.entries.values())
    assert replayed.rows == len(read_metrics(tmp_path)) > 0
    check_pushes(replayed, result)


def test_a_replay_knows_options_that_change_gradients_and_scores(tmp_path: Path) -> None:
    options: dict[str, Any] = {"clip_norm": 0.1, "accumulate": 2, "eval_every": 3}
    result = pt.run(job(), s.async_sgd(shards=2), 2, steps=12, threads=1, out=tmp_path, **options)
    replayed = replay(tmp_path, job(), s.async_sgd(shards=2))
    assert (replayed.difference, replayed.ends, replayed.notes) == (None, [], [])
    assert replayed.parameters_sha256 == replayed.recorded_sha256 == result.parameters_sha256
    assert replayed.rows == len(read_metrics(tmp_path)) > 0


def test_an_epoch_that_ends_in_the_last_step_of_a_run_that_measures_noise(tmp_path: Path) -> None:
    """24 batches are an epoch, and the run makes 25: both are scored in step 5."""
    pt.run(job(), s.async_sgd(), 5, steps=5, threads=1, noise_scale=1, out=tmp_path)
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows if row["kind"] == "test"][-1] == 5
    assert any("noise_trace" in row for row in rows)
    replayed = replay(tmp_path, job(), s.async_sgd())
    assert (replayed.difference, replayed.same) == (None, True)


def check_pushes(replayed: Replayed, result: pt.Result) -> None:
    """The shown pushes are the run's own."""
    assert result.server is not None
    staleness = [push.staleness for push in replayed.pushes if push.verdict == "applied"]
    histogram = result.server["staleness"]["histogram"]
    assert [[tau, staleness.count(tau)] for tau in sorted(set(staleness))] == histogram
    tickets = sorted(
        t for push in replayed.pushes if push.shard == 0 and push.verdict == "applied" for t in push.tickets
    )
    assert tickets == list(range(36 * result.workers))
    assert all(push.loss is not None and push.norm > 0 for push in replayed.pushes)


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that comes to its end, of a job in a file."""
    folder = tmp_path_factory.mktemp("run")
    (folder / "sums.py").write_text(
        "import torch, polytempo as pt\n"
        "from torch import nn\n"
        "from torch.utils.data import TensorDataset\n"
        "x = torch.randn(40, 3, generator=torch.Generator().manual_seed(0))\n"
        "job = pt.Job(model=lambda: nn.Linear(3, 1), data=lambda folder: pt.Data(TensorDataset(x, x.sum(1, True))),\n"
        "    loss=nn.functional.mse_loss, optimizer=lambda p, lr: torch.optim.SGD(p, lr=lr), batch_size=4)\n"
    )
    options = ["--strategy", "async_sgd", "--steps", "10", "--threads", "1", "--out", str(folder / "run")]
    done = CliRunner().invoke(app, ["train", str(folder / "sums.py:job"), *options])
    assert done.exit_code == 0, done.output
    return folder / "run"


def commanded(run: Path, *arguments: str) -> tuple[int, str]:
    """Exit code and output of `polytempo replay`."""
    done = CliRunner().invoke(app, ["replay", str(run), *arguments])
    return done.exit_code, done.output


def test_the_command_says_that_all_is_the_same(recorded: Path) -> None:
    code, output = commanded(recorded)
    assert code == 0
    assert "the same to the bit" in output.splitlines()[-1]
    sha256 = json.loads((recorded / "result.json").read_bytes())["parameters_sha256"]
    assert sha256 in output


def test_the_command_stops_where_it_is_told_to_and_shows_who_pushed_what(recorded: Path) -> None:
    code, output = commanded(recorded, "--until", "step=4")
    assert code == 0
    lines = output.splitlines()
    assert lines[-1].startswith("stopped at step 4; the same as recorded so far")
    assert " ".join(lines[2].split()) == "entry worker step tickets basis version stale loss norm outcome"
    _, output = commanded(recorded, "--until", "version=5", "--inspect", "--json")
    told = json.loads(output)
    assert [push["version"] for push in told["pushes"]] == [0, 1, 2, 3, 4]
    assert (told["stopped"], told["same"]) == ("version 5", True)
    _, output = commanded(recorded, "--until", "step=11")
    assert "step 11 was not reached" in output


def test_a_record_that_says_something_else_is_told_from_the_replay(recorded: Path) -> None:
    path = next((recorded / "record" / "0000").glob("shard-0-*.jsonl"))
    content = path.read_bytes()
    lines = content.splitlines(keepends=True)
    number = next(n for n, line in enumerate(lines) if line.startswith(b'["push"') and n > 12)
    fields = json.loads(lines[number])
    lines[number] = json.dumps([*fields[:-1], fields[-1] ^ 1]).encode() + b"\n"
    path.write_bytes(b"".join(lines))
    try:
        code, output = commanded(recorded)
    finally:
        path.write_bytes(content)
    assert code == 1
    assert f"The first difference: shard 0, entry {number}: push of worker {fields[1]}" in output
    assert f"check recorded as {fields[-1] ^ 1}, replayed as {fields[-1]}" in output


def test_a_job_that_has_changed_is_noticed(recorded: Path) -> None:
    path = recorded.parent / "sums.py"
    content = path.read_text()
    path.write_text(content.replace("x.sum(1, True)", "x.sum(1, True) * 1.0001"))
    try:
        code, output = commanded(recorded)
    finally:
        path.write_text(content)
    assert code == 1
    assert "sums.py:job has changed since the run" in output
    assert "The first difference: shard 0, entry " in output


def test_wrong_arguments_are_refused(recorded: Path, tmp_path: Path) -> None:
    for arguments, words in [
        ([str(tmp_path / "none")], "there is no such folder"),
        ([str(tmp_path)], "has no record of messages"),
        ([str(recorded), "--until", "epoch=2"], "must be written step=K"),
        ([str(recorded), "--until", "step=0"], "must be written step=K or version=K with K >= 1"),
        ([str(recorded), "--shard", "1"], "the run had 1 shards, numbered from 0"),
        ([str(recorded), "--job", "digits"], "the run was of job 'job', not 'digits'"),
    ]:
        done = CliRunner().invoke(app, ["replay", *arguments])
        assert (done.exit_code, words in done.output) == (2, True), done.output


def test_a_run_that_failed_is_replayed_to_its_end(tmp_path: Path) -> None:
    """The batch of ticket 19 makes the loss NaN; its worker pushes nothing of it, and the run ends."""
    calls = [0]

    def loss(output: Tensor, target: Tensor) -> Tensor:
        calls[0] += 1
        value: Tensor = nn.functional.cross_entropy(output, target)
        return value * float("nan") if calls[0] == 20 else value

    with pytest.raises(pt.errors.NotFinite, match="rank 0, step 19: the loss is nan"):
        pt.run(job(loss=loss), s.async_sgd(), 1, steps=36, threads=1, out=tmp_path)
    calls[0] = 0
    replayed = replay(tmp_path, job(loss=loss), s.async_sgd())
    assert (replayed.same, replayed.recorded_sha256) == (True, None)
    assert [push.verdict for push in replayed.pushes] == ["applied"] * 19
    assert "NotFinite: rank 0, step 19" in replayed.errors["0.1"]


def test_a_run_whose_launcher_is_killed_is_replayed_as_far_as_it_went(tmp_path: Path) -> None:
    def loss(output: Tensor, target: Tensor) -> Tensor:
        if launcher and seen() >= 20:
            os.kill(launcher, signal.SIGKILL)
        value: Tensor = nn.functional.cross_entropy(output, target)
        return value

    def seen() -> int:
        return sum(path.read_bytes().count(b'["push"') for path in (tmp_path / "record" / "0000").glob("shard-*"))

    launcher = 0
    child = os.fork()
    if not child:
        launcher = os.getpid()
        pt.run(job(loss=loss), s.async_sgd(), 2, steps=400, threads=1, out=tmp_path)
        os._exit(0)
    assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGKILL
    replayed = replay(tmp_path, job(), s.async_sgd())
    assert (replayed.difference, replayed.recorded_sha256) == (None, None)
    assert len(replayed.pushes) >= 20
    assert replay(tmp_path, job(), s.async_sgd(), stop=Stop("version", 7)).stopped == "version 7"
