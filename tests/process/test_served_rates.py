"""Each ticket bears the learning rate of its place in the run, whichever life of whichever worker takes it.

Ticket t is one sample, with a gradient of 1 at place t. With plain SGD the final weight t is minus the sum of t's
rates, one for each epoch.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler
from torch.utils.data import TensorDataset

import polytempo as pt
from polytempo.core import Strategy
from polytempo.data.batches import Batches
from polytempo.server.snapshots.snapshot import complete, newest_whole
from polytempo.spec.result import parameters_sha256
from waiting import soon

pytestmark = pytest.mark.process

TICKETS, EPOCHS, SHARDS, WORKERS, LR = 60, 2, 2, 2, 0.75
EVERY, ENOUGH = 5, 12
"""Steps between snapshots, and batches until a worker may wait for one: both together then made as many steps."""
Loss = Callable[[Tensor, Tensor], Tensor]
SAMPLES = TensorDataset(torch.eye(TICKETS, dtype=torch.float64), torch.zeros(TICKETS))


class Rates(nn.Module):
    """A weight for each ticket of an epoch, twice: each of two shards holds one half."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (nn.Parameter(torch.zeros(TICKETS, dtype=torch.float64)) for _ in range(2))

    def forward(self, inputs: Tensor) -> Tensor:
        """(batch, tickets) -> (batch,)"""
        return inputs @ self.first + inputs @ self.second


def schedule(optimizer: Optimizer, steps_per_epoch: int) -> LRScheduler:
    """The rate falls to 0 at the end of the run."""
    return LambdaLR(optimizer, lambda step: 1 - step / (EPOCHS * steps_per_epoch))


def job(loss: Loss) -> pt.Job:
    return pt.Job(
        model=Rates,
        data=lambda folder: pt.Data(SAMPLES, None),
        loss=loss,
        optimizer=lambda parameters, lr: torch.optim.SGD(parameters, lr=lr),
        batch_size=1,
        lr=LR,
        schedule=schedule,
        name="rates",
    )


def mean(output: Tensor, target: Tensor) -> Tensor:
    return output.mean()


def dies_once(flag: Path, calls_before: int, worker: str) -> Loss:
    """The loss of a job with a worker that is killed after so many batches; the others leave it enough of them."""
    calls = 0

    def loss(output: Tensor, target: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        if os.environ["POLYTEMPO_RANK"] != worker:
            if calls > ENOUGH:
                soon(flag.exists)
        elif calls > calls_before and not flag.exists():
            flag.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return output.mean()

    return loss


def expected(deals: Any) -> str:
    """The hash of the final weights of an undisturbed run."""
    batches = Batches(SAMPLES, size=WORKERS, batch_size=1, deals=deals)
    steps = len(batches) // WORKERS
    used = torch.zeros(TICKETS, dtype=torch.float64)
    for ticket in range(EPOCHS * len(batches)):
        epoch, batch = divmod(ticket, len(batches))
        rate = LR * (1 - (epoch * steps + batch // WORKERS) / (EPOCHS * steps))
        used -= rate * batches.at(epoch, batch)[0][0]
    return parameters_sha256(used for _ in range(2))


STRATEGIES = [
    pt.strategies.async_sgd(shards=SHARDS, rate=1.0),
    pt.strategies.ssp(shards=SHARDS, rate=1.0, replicas=1),
]


@pytest.mark.parametrize(("strategy", "calls_before"), [*zip(STRATEGIES, (7, 0), strict=True)], ids=str)
def test_a_worker_that_is_killed_changes_no_rate(strategy: Strategy, calls_before: int, tmp_path: Path) -> None:
    assert strategy.server is not None
    loss = dies_once(tmp_path / "died", calls_before, "1")
    result = pt.run(job(loss), strategy, WORKERS, epochs=EPOCHS, threads=1, out=tmp_path / "run")
    assert (tmp_path / "died").exists()
    assert result.parameters_sha256 == expected(strategy.server.deals)


@pytest.mark.parametrize("strategy", STRATEGIES, ids=str)
def test_a_run_that_is_killed_and_resumed_changes_no_rate(strategy: Strategy, tmp_path: Path) -> None:
    assert strategy.server is not None
    out = tmp_path / "run"
    killed(out, strategy)
    assert newest_whole(out / "checkpoint", SHARDS) is not None
    loss = dies_once(tmp_path / "died", 3, "0")  # and a worker of the second run, too
    options: dict[str, Any] = {"epochs": EPOCHS, "threads": 1, "out": out, "resume": True}
    result = pt.run(job(loss), strategy, WORKERS, **options)
    assert (tmp_path / "died").exists()
    assert result.parameters_sha256 == expected(strategy.server.deals)


def killed(out: Path, strategy: Strategy) -> None:
    """Kill the launcher of a run, and with it all processes, once a snapshot is whole.

    A snapshot is due at the latest when all batches are in that were dealt before its order: a worker that waits for it
    goes on after a second, for its own batch may be the missing one.
    """
    launcher, calls = 0, 0

    def loss(output: Tensor, target: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        if calls > ENOUGH and soon(lambda: complete(out / "checkpoint", 1, SHARDS), 1.0):
            os.kill(launcher, signal.SIGKILL)
        return output.mean()

    child = os.fork()
    if not child:
        launcher = os.getpid()
        pt.run(job(loss), strategy, WORKERS, epochs=EPOCHS, checkpoint_every=EVERY, threads=1, out=out)
        os._exit(0)
    assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGKILL
