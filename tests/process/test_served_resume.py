"""A run with a parameter server and only killed processes goes on from its snapshot: no ticket is lost or doubled.

The job's gradients count: ticket t is one sample, with a gradient of 1 at place t. With plain SGD the final weight t
says how often the ticket was used.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import polytempo as pt
from benchmark_module import benchmark
from polytempo.core import Strategy
from polytempo.jobs.digits import job as digits
from polytempo.replay.replay import replay
from polytempo.report.status.rows import read_metrics
from polytempo.runs.served.run_snapshot import read_run_snapshot, run_snapshot_path
from polytempo.server.snapshots.snapshot import complete, newest_whole
from polytempo.spec.result import parameters_sha256
from waiting import soon

pytestmark = pytest.mark.process

TICKETS, EPOCHS, SHARDS, WORKERS = 120, 3, 2, 2
EVERY, ENOUGH = 10, 20
"""Steps between snapshots, and batches until a worker may wait for one: both together then made as many steps."""
harm = benchmark("parameter_server/harm.py")
Loss = Callable[[Tensor, Tensor], Tensor]


def counting(loss: Loss | None = None, tickets: int = TICKETS) -> pt.Job:
    return harm.counting(tickets, loss, tested=True)


def strategy(**more: Any) -> Strategy:
    return pt.strategies.async_sgd(**{"shards": SHARDS, "rate": 1.0, **more})


def counted(epochs: int) -> str:
    """The hash of the final weights after each ticket was used once in each epoch."""
    return parameters_sha256(torch.full((TICKETS,), -float(epochs)) for _ in range(2))


def killed(out: Path, number: int, how: Strategy, *, resume: bool = False) -> None:
    """Kill the launcher of a run, and with it all processes, once snapshot `number` is whole.

    Workers that have seen enough batches for it wait, so that the run stays far from its end.
    """
    launcher, calls = 0, 0

    def loss(output: Tensor, target: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        if calls > ENOUGH:
            soon(lambda: complete(out / "checkpoint", number, SHARDS))
        if calls > ENOUGH:
            os.kill(launcher, signal.SIGKILL)
        return output.mean()

    child = os.fork()
    if not child:
        launcher = os.getpid()
        options: dict[str, Any] = {
            "epochs": EPOCHS,
            "checkpoint_every": EVERY,
            "resume": resume,
            "threads": 1,
            "out": out,
        }
        pt.run(counting(loss), how, WORKERS, **options)
        os._exit(0)
    assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGKILL


@pytest.mark.parametrize("how", [strategy(), strategy(replicas=1)], ids=str)
def test_every_ticket_counts_once_over_both_runs(how: Strategy, tmp_path: Path) -> None:
    killed(tmp_path, 1, how)
    number = newest_whole(tmp_path / "checkpoint", SHARDS)
    assert number is not None
    step = read_run_snapshot(tmp_path / "checkpoint", number).step
    result = pt.run(
        *(counting(), how, WORKERS), epochs=EPOCHS, resume=True, checkpoint_every=50, threads=1, out=tmp_path
    )
    assert result.parameters_sha256 == counted(EPOCHS)
    assert result.samples == TICKETS * EPOCHS
    assert result.loss == -2.0 * EPOCHS, "the weights that are tested count the first run's tickets, too"
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert {row["step"] <= step for row in rows} == {True, False}, "metrics of both runs"
    assert [row["samples"] for row in rows if row["kind"] == "test"][-1] == TICKETS * EPOCHS  # rows come as they come
    replayed = replay(tmp_path, counting(), how)
    assert (replayed.difference, replayed.generation) == (None, 1)
    assert replayed.parameters_sha256 == result.parameters_sha256


def test_a_run_may_be_killed_again_and_again(tmp_path: Path) -> None:
    killed(tmp_path, 1, strategy())
    for _ in range(2):
        killed(tmp_path, 1 + (newest_whole(tmp_path / "checkpoint", SHARDS) or 0), strategy(), resume=True)
    result = pt.run(counting(), strategy(), WORKERS + 1, epochs=EPOCHS, resume=True, threads=1, out=tmp_path)
    assert result.parameters_sha256 == counted(EPOCHS), "and with another number of workers"


def test_a_run_that_has_ended_goes_on_with_more_epochs(tmp_path: Path) -> None:
    first = pt.run(counting(), strategy(), WORKERS, epochs=1, threads=1, out=tmp_path)
    assert first.parameters_sha256 == counted(1)
    with pytest.raises(ValueError, match=f"has done its {TICKETS} batches already; resume it with more"):
        pt.run(counting(), strategy(), WORKERS, epochs=1, resume=True, out=tmp_path)
    second = pt.run(counting(), strategy(), WORKERS, epochs=2, resume=True, threads=1, out=tmp_path)
    assert second.parameters_sha256 == counted(2)
    assert (second.samples, second.loss) == (2 * TICKETS, -4.0)


def test_a_score_is_written_once_and_time_goes_on(tmp_path: Path) -> None:
    """The snapshot that a run goes on from is scored again, should its score be lost; both runs share one clock."""
    first = pt.run(counting(), strategy(), WORKERS, epochs=1, threads=1, out=tmp_path)
    before = read_metrics(tmp_path)
    second = pt.run(counting(), strategy(), WORKERS, epochs=2, resume=True, threads=1, out=tmp_path)
    rows = read_metrics(tmp_path)
    assert [row["samples"] for row in rows if row["kind"] == "test"] == [TICKETS, 2 * TICKETS]
    news = [row for row in rows if row["samples"] > TICKETS]
    assert min(row["seconds"] for row in news) > max(row["seconds"] for row in before)
    assert second.seconds > first.seconds
    assert second.samples_per_s == 2 * TICKETS / second.seconds, "of the whole run, as its seconds are"
    assert first.resumed_at is None
    assert second.resumed_at is not None
    assert 0 < second.resumed_at <= first.steps


def test_a_run_killed_while_its_last_score_is_awaited_has_it_after_a_resume(tmp_path: Path) -> None:
    launcher = 0

    def loss(output: Tensor, target: Tensor) -> Tensor:
        if os.environ.get("POLYTEMPO_SIZE") == "1":  # a rehearsal, before there is a run
            return output.mean()
        if not output.requires_grad:
            soon(lambda: complete(tmp_path / "checkpoint", 1, SHARDS))
            os.kill(launcher, signal.SIGKILL)
        return output.mean()

    options: dict[str, Any] = {"epochs": 1, "checkpoint_every": 1000, "threads": 1, "out": tmp_path}
    child = os.fork()
    if not child:
        launcher = os.getpid()
        pt.run(counting(loss), strategy(), WORKERS, **options)
        os._exit(0)
    assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGKILL
    result = pt.run(counting(), strategy(), WORKERS, resume=True, **options)
    assert (result.parameters_sha256, result.loss, result.samples) == (counted(1), -2.0, TICKETS)
    assert replay(tmp_path, counting(), strategy()).difference is None
    with pytest.raises(ValueError, match="batches already"):
        pt.run(counting(), strategy(), WORKERS, resume=True, **options)


def test_a_score_that_ends_a_resumed_run_before_its_first_batch(tmp_path: Path) -> None:
    pt.run(counting(), strategy(), WORKERS, epochs=1, threads=1, out=tmp_path)
    result = pt.run(
        *(counting(), strategy(), WORKERS), epochs=EPOCHS, until={"loss": 0.0}, resume=True, threads=1, out=tmp_path
    )
    assert result.reached
    assert result.samples >= TICKETS


def test_damage_falls_back_to_the_snapshot_before(tmp_path: Path) -> None:
    checkpoint = tmp_path / "checkpoint"
    killed(tmp_path, 1, strategy())
    killed(tmp_path, 1 + (newest_whole(checkpoint, SHARDS) or 0), strategy(), resume=True)
    newest = newest_whole(checkpoint, SHARDS)
    assert newest is not None
    run_snapshot_path(checkpoint, newest).write_bytes(b"{}")
    result = pt.run(counting(), strategy(), WORKERS, epochs=EPOCHS, resume=True, threads=1, out=tmp_path)
    assert result.parameters_sha256 == counted(EPOCHS)
    record = json.loads((tmp_path / "record" / "0001" / "run.json").read_bytes())
    assert record["snapshot"] == newest - 1
    assert (checkpoint / f"snapshot-{newest:08d}-run.json.damaged").read_bytes() == b"{}"


def test_checkpoints_without_a_server_are_no_snapshots_but_are_named(tmp_path: Path) -> None:
    (tmp_path / "checkpoint" / "step-00000004").mkdir(parents=True)
    with pytest.raises(ValueError, match=r"checkpoints of workers without a parameter server; .*the --strategy that"):
        pt.run(counting(), strategy(), WORKERS, resume=True, out=tmp_path)


def test_what_cannot_be_resumed_says_why(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"there is no whole snapshot in .*, or check --out"):
        pt.run(counting(), strategy(), WORKERS, resume=True, out=tmp_path)
    pt.run(counting(), strategy(), WORKERS, epochs=1, threads=1, out=tmp_path)
    wrong: list[tuple[pt.Job, Strategy, dict[str, Any], str]] = [
        (counting(), strategy(shards=3), {}, "had strategy 'async_sgd.shards=2.*and this one has 'async_sgd.shards=3"),
        (counting(), strategy(), {"seed": 4}, "had seed 0, and this one has 4"),
        (counting(), strategy(), {"batch_size": 2}, "had batch size 1, and this one has 2"),
        (counting(tickets=60), strategy(), {}, "had samples 120, and this one has 60"),
    ]
    for job, how, options, words in wrong:
        with pytest.raises(ValueError, match=words):
            pt.run(job, how, WORKERS, epochs=2, resume=True, out=tmp_path, **options)


def test_a_new_run_forgets_what_was_in_its_folder(tmp_path: Path) -> None:
    """A run that is not resumed must not leave parts that a later resume could take for its own."""
    for epochs in (2, 1):
        pt.run(counting(), strategy(), WORKERS, epochs=epochs, threads=1, out=tmp_path)
    result = pt.run(counting(), strategy(), WORKERS, epochs=EPOCHS, resume=True, threads=1, out=tmp_path)
    assert result.parameters_sha256 == counted(EPOCHS)


def normed(launcher: int = 0, kill_at: int = -1) -> pt.Job:
    """A job with gradients, dropout and running statistics that depend on the order of everything. `kill_at`: in
    this call of the loss a worker kills the process `launcher`, and with it all processes."""
    draws = torch.Generator().manual_seed(5)
    inputs = 3 + 2 * torch.randn(96, 6, generator=draws)
    samples = TensorDataset(inputs, inputs.sum(1, keepdim=True))
    calls = 0

    def loss(output: Tensor, target: Tensor) -> Tensor:
        nonlocal calls
        calls += output.requires_grad
        if calls == kill_at:
            os.kill(launcher, signal.SIGKILL)
        return ((output - target) ** 2).mean()

    return pt.Job(
        model=lambda: nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 1)),
        data=lambda folder: pt.Data(samples, samples),
        loss=loss,
        # Late gradients at a rate of 0.01 can leave all ReLUs at zero.
        optimizer=lambda parameters, lr: torch.optim.SGD(parameters, lr=0.002, momentum=0.9),
        batch_size=8,
        name="normed",
    )


SYNCHRONOUS = pt.strategies.backup_workers(backups=0, shards=2)


def test_a_synchronous_run_resumed_at_any_step_is_the_undisturbed_one(tmp_path: Path) -> None:
    """Equal to the bit, with running statistics: the score uses them."""
    whole = pt.run(normed(), SYNCHRONOUS, WORKERS, steps=20, threads=1)
    for step in (1, 7, 13):
        out = tmp_path / str(step)
        first = pt.run(normed(), SYNCHRONOUS, WORKERS, steps=step, threads=1, out=out)
        assert first.loss != whole.loss
        second = pt.run(normed(), SYNCHRONOUS, WORKERS, steps=20, threads=1, resume=True, out=out)
        assert (second.parameters_sha256, second.loss) == (whole.parameters_sha256, whole.loss), f"step {step}"


def test_a_synchronous_run_killed_at_any_moment_is_the_undisturbed_one_in_the_end(tmp_path: Path) -> None:
    whole = pt.run(normed(), SYNCHRONOUS, WORKERS, steps=60, threads=1)
    for calls in (9, 24, 41):
        out = tmp_path / str(calls)
        child = os.fork()
        if not child:
            pt.run(normed(os.getpid(), calls), SYNCHRONOUS, WORKERS, steps=60, threads=1, checkpoint_every=2, out=out)
            os._exit(0)
        assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGKILL
        resume = newest_whole(out / "checkpoint", 2) is not None
        result = pt.run(normed(), SYNCHRONOUS, WORKERS, steps=60, threads=1, resume=resume, out=out)
        assert (result.parameters_sha256, result.loss) == (whole.parameters_sha256, whole.loss), f"call {calls}"


@pytest.mark.parametrize("strategy", [SYNCHRONOUS, pt.strategies.ssp(bound=1, shards=2)], ids=str)
def test_a_run_that_its_score_ends_in_the_middle_of_a_step_ends(tmp_path: Path, strategy: Strategy) -> None:
    """No worker waits for the gradient of a finished worker, and the saved model is the result's."""
    result = pt.run(normed(), strategy, WORKERS, epochs=60, threads=1, out=tmp_path, until={"loss": 8.0})
    assert result.loss is not None
    assert result.loss <= 8.0
    assert 96 * 5 <= result.samples < 96 * 60
    if strategy is SYNCHRONOUS:
        whole = pt.run(normed(), strategy, WORKERS, steps=result.samples // 16, threads=1)
        assert whole.parameters_sha256 == result.parameters_sha256


@pytest.mark.parametrize(
    "movements",
    [
        "async_diloco(4, outer_momentum=0.5)",
        "async_diloco(4, outer_optimizer=adam(0.02), scale=gate(0.1, 4))",
        "halos(4, region=1, every=2, share=0.5)",
    ],
)
def test_movements_of_one_worker_go_on_to_the_bit(movements: str, tmp_path: Path) -> None:
    """A snapshot has the outer moments, and each region's parameters. Plain SGD: a worker's own state is not in it."""
    job = replace(digits, optimizer=lambda parameters, lr: torch.optim.SGD(parameters, lr))

    def ran(steps: int, out: Path, *, resume: bool = False) -> str | None:
        return pt.run(job, movements, 1, steps=steps, threads=1, resume=resume, out=out).parameters_sha256

    ran(12, tmp_path / "two")
    assert ran(24, tmp_path / "two", resume=True) == ran(24, tmp_path / "one")
