"""Layers that only some batches use: a parameter server leaves them alone in the other steps, as plain torch does."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer

import polytempo as pt
from laws.catalogue import ONE_WORKER, SERVED, Row, label
from laws.harness import Setting, flat
from laws.served import BATCH, batches_of, data_of, loss, serviced
from polytempo.core import Strategy
from polytempo.spec.job import Data, Job
from polytempo.worlds import ProcessWorld, set_current
from served_loop import in_process

s = pt.strategies
STEPS = 12
SETTING = Setting(dtype=torch.float64)
OPTIMIZERS: dict[str, Callable[..., Optimizer]] = {
    "sgd": partial(SGD, lr=0.05, weight_decay=0.1),
    "momentum": partial(SGD, lr=0.05, momentum=0.9, weight_decay=0.1),
    "adam": partial(Adam, lr=0.01, weight_decay=0.1),
    "adamw": partial(AdamW, lr=0.01, weight_decay=0.1),
    "adagrad": partial(Adagrad, lr=0.01, lr_decay=0.1, weight_decay=0.1),
}


class Net(nn.Module):
    """The layer `some` acts on batches with a first number above 0, the layer `never` on none."""

    def __init__(self) -> None:
        super().__init__()
        torch.default_generator.manual_seed(0)
        self.some, self.never, self.last = nn.Linear(5, 5), nn.Linear(2, 2), nn.Linear(5, 3)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        answer: Tensor = self.last(self.some(x).tanh() if x[0, 0] > 0 else x)
        return answer


def plain(optimizer: str, learners: int = 1) -> Tensor:
    """Steps by the mean gradient of `learners` batches each."""
    net, batches = Net(), list(batches_of(STEPS, SETTING))
    made = OPTIMIZERS[optimizer](net.parameters())
    for begin in range(0, STEPS, learners):
        made.zero_grad()
        for x, y in batches[begin : begin + learners]:
            (loss(net(x), y) / learners).backward()
        made.step()
    return flat(net)


def simulated(strategy: Strategy, optimizer: str, workers: int = 1) -> Tensor:
    models: list[nn.Module] = []

    def make() -> nn.Module:
        models.append(Net())
        return models[-1]

    job = Job(
        model=make,
        data=lambda folder: Data(data_of(SETTING.dtype)),
        loss=loss,
        optimizer=lambda parameters, lr: OPTIMIZERS[optimizer](parameters),
        batch_size=BATCH,
    )
    pt.simulate(job, strategy, workers, steps=STEPS // workers)
    return flat(models[-1])


def check(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("row", [row for row in ONE_WORKER if row.alone == "torch"], ids=label)
def test_one_worker(row: Row, optimizer: str) -> None:
    check(simulated(serviced(row.make(), shards=2), optimizer), plain(optimizer))


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("row", [row for row in SERVED if row.joined], ids=label)
def test_a_synchronous_step_of_two_workers(row: Row, optimizer: str) -> None:
    check(simulated(row.make(), optimizer, workers=2), plain(optimizer, learners=2))


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_softsync_of_two_workers_moves_nothing_that_no_batch_uses(optimizer: str) -> None:
    never = nn.utils.parameters_to_vector(Net().never.parameters()).detach()
    for strategy in (s.softsync(n=1), s.async_sgd(hierarchical=True), s.downpour(2, 2), s.easgd(period=2)):
        if "downpour" in str(strategy) and optimizer == "adamw":
            continue  # refused: its decay is not a gradient
        assert torch.equal(simulated(strategy, optimizer, workers=2)[30:36], never), str(strategy)


@pytest.fixture
def _alone() -> Iterator[None]:
    set_current(ProcessWorld(0, (0,)))
    with in_process():
        yield
    set_current(None)


@pytest.mark.usefixtures("_alone")
@pytest.mark.parametrize("optimizer", [name for name in OPTIMIZERS if name != "adagrad"])  # its state is refused
@pytest.mark.parametrize("strategy", [s.async_sgd(shards=2), s.softsync(), s.backup_workers(backups=0)], ids=str)
def test_a_loop_of_a_user(strategy: Strategy, optimizer: str) -> None:
    net = Net()
    made = OPTIMIZERS[optimizer](net.parameters())
    handle = pt.attach(net, made, strategy)
    x, y = (torch.cat(parts) for parts in zip(*batches_of(STEPS, SETTING), strict=True))
    for batch, target in pt.shard(torch.utils.data.TensorDataset(x, y), batch_size=BATCH, shuffle=False):
        made.zero_grad()
        loss(net(batch), target).backward()
        made.step()
    handle.detach()
    check(flat(net), plain(optimizer))
