"""`TorchState` with every kind of optimizer and scheduler: lost steps are undone, newcomers go on with the others.

Two ranks make three steps and commit, make two more on other data, and go back to the commit. One of them is replaced:
another model, optimizer and scheduler, which have made no step. After two more steps both equal plain torch in float64
after five steps on the whole batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn, optim
from torch.optim import lr_scheduler

import polytempo.horovod.torch as hvd
from horovod_checks import Checks
from polytempo.horovod.plain_values import encoded

pytestmark = [pytest.mark.process, pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler")]

BEFORE, AFTER, ROWS = 3, 2, 8
Parameters = Iterable[Any]


class Lazy(optim.Optimizer):
    """Has state of a parameter from its second gradient on: numbers, a text, and lists of tensors in one another."""

    def __init__(self, parameters: Parameters, lr: float = 0.1) -> None:
        super().__init__(parameters, {"lr": lr, "seen": {}})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """Along the mean of the last two gradients."""
        for group in self.param_groups:
            for place, parameter in enumerate(group["params"]):
                count = group["seen"][place] = group["seen"].get(place, 0) + 1
                if count > 1:
                    own = self.state[parameter]
                    own["before"] = [*own.get("before", [])[-1:], {"gradient": parameter.grad.clone()}]
                    assert own.get("name", "after").startswith("after")
                    own["rate"], own["name"] = group["lr"] / (1 + own.get("rate", 0.0)), f"after {count}"
                    for each in own["before"]:
                        parameter.sub_(each["gradient"], alpha=own["rate"] / len(own["before"]))


class Precise(optim.Optimizer):
    """Sums gradients in float64 for parameters of float32, which `load_state_dict` would round."""

    def __init__(self, parameters: Parameters, lr: float = 0.1) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """Momentum without a loss of bits."""
        for group in self.param_groups:
            for parameter in group["params"]:
                own = self.state[parameter]
                own["sum"] = own.get("sum", torch.zeros_like(parameter, dtype=torch.float64)) / 3 + parameter.grad
                assert own["sum"].dtype == torch.float64
                parameter.copy_(parameter.double() - group["lr"] * own["sum"])


def dense(dtype: torch.dtype = torch.float64) -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).to(dtype)


def wide() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 900), nn.Tanh(), nn.Linear(900, 2))


def table() -> nn.Module:
    return nn.Sequential(nn.Embedding(5, 2, sparse=True)).double()


def by_group(net: nn.Module) -> list[dict[str, Any]]:
    """A group of the first layer, with options of its own, and a group of the rest."""
    return [{"params": list(net[0].parameters()), "lr": 0.02, "weight_decay": 0.1}, {"params": [*net[2].parameters()]}]


class Row(NamedTuple):
    """A training: model, optimizer and schedule."""

    optimizer: Callable[[Any], optim.Optimizer]
    scheduler: Callable[[Any], Any] | None = None
    net: Callable[[], nn.Module] = dense
    grouped: bool = False
    compression: Any = hvd.Compression.none
    schedule_first: bool = False
    """True if the schedule was made before the optimizer was distributed."""


MOMENTUM = partial(optim.SGD, lr=0.05, momentum=0.9)
OPTIMIZERS = {
    "SGD": Row(partial(optim.SGD, lr=0.05)),
    "SGD, Nesterov": Row(partial(optim.SGD, lr=0.05, momentum=0.9, nesterov=True)),
    "SGD, two groups": Row(partial(optim.SGD, lr=0.05, momentum=0.9, dampening=0.1), grouped=True),
    "Adam, amsgrad": Row(partial(optim.Adam, lr=0.05, amsgrad=True)),
    "AdamW, two groups": Row(partial(optim.AdamW, lr=0.05, amsgrad=True), grouped=True),
    "AdamW, a tensor as its rate": Row(lambda p: optim.AdamW(p, lr=torch.tensor(0.05))),
    "NAdam": Row(partial(optim.NAdam, lr=0.05)),
    "RAdam": Row(partial(optim.RAdam, lr=0.05)),
    "Adamax": Row(partial(optim.Adamax, lr=0.05)),
    "Adadelta": Row(partial(optim.Adadelta, lr=0.5)),
    "Adagrad": Row(partial(optim.Adagrad, lr=0.05, initial_accumulator_value=0.1)),
    "RMSprop": Row(partial(optim.RMSprop, lr=0.05, momentum=0.9, centered=True)),
    "Rprop": Row(partial(optim.Rprop, lr=0.05)),
    "ASGD": Row(partial(optim.ASGD, lr=0.05, t0=2)),
    "Adafactor": Row(partial(optim.Adafactor, lr=0.05)),
    "SparseAdam": Row(lambda p: optim.SparseAdam(list(p), lr=0.05), net=table),
    "LBFGS": Row(lambda p: optim.LBFGS(p, lr=0.5, max_iter=4, line_search_fn="strong_wolfe")),
    "LBFGS without a search": Row(lambda p: optim.LBFGS(p, lr=0.1, max_iter=3, history_size=2)),
    "state that comes late and is not a tensor": Row(Lazy),
    "state of another dtype": Row(Precise, net=partial(dense, torch.float32)),
}
SCHEDULERS = {
    "StepLR": partial(lr_scheduler.StepLR, step_size=2),
    "MultiStepLR": partial(lr_scheduler.MultiStepLR, milestones=[1, 4, 4]),
    "LambdaLR": partial(lr_scheduler.LambdaLR, lr_lambda=lambda epoch: 1 / (1 + epoch)),
    "OneCycleLR": partial(lr_scheduler.OneCycleLR, max_lr=0.1, total_steps=9),
    "CyclicLR": partial(lr_scheduler.CyclicLR, base_lr=0.01, max_lr=0.1, step_size_up=2),
    "CosineAnnealingWarmRestarts": partial(lr_scheduler.CosineAnnealingWarmRestarts, T_0=2, T_mult=2),
    "ReduceLROnPlateau": partial(lr_scheduler.ReduceLROnPlateau, patience=0, threshold=0.5),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o, 0.1, total_iters=2), lr_scheduler.ExponentialLR(o, 0.5)], [2]
    ),
    "ChainedScheduler": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(o, 0.5, total_iters=4), lr_scheduler.ExponentialLR(o, 0.5)], o
    ),
}
TABLE = OPTIMIZERS | {name: Row(MOMENTUM, scheduler, grouped=True) for name, scheduler in SCHEDULERS.items()}
TABLE["a schedule of the optimizer that was given"] = Row(MOMENTUM, SCHEDULERS["StepLR"], schedule_first=True)
CODECS = {
    "top_k": hvd.Compression.top_k(0.3),
    "random_k": hvd.Compression.random_k(0.3),
    "qsgd": hvd.Compression.qsgd,
    "one_bit": hvd.Compression.one_bit,
    "dgc": hvd.Compression.dgc(0.3, momentum=0.0),
    "pca": hvd.Compression.pca(1),
}
CHECKS = Checks()


class Training:
    """A model, its optimizer and its schedule, distributed where `distributes`."""

    def __init__(self, row: Row, seed: int, distributes: bool) -> None:
        torch.manual_seed(seed)
        self.net = row.net()
        self.optimizer: Any = row.optimizer(by_group(self.net) if row.grouped else self.net.parameters())
        given = self.optimizer
        if distributes:
            names = self.net.named_parameters()
            self.optimizer = hvd.DistributedOptimizer(given, names, compression=row.compression)
        scheduled = given if row.schedule_first else self.optimizer
        self.scheduler = None if row.scheduler is None else row.scheduler(scheduled)

    def step(self, number: int, part: slice) -> None:
        """One step on this part of batch `number`."""
        inputs, targets = batch(self.net, number)

        def closure() -> Tensor:
            self.optimizer.zero_grad()
            loss = (self.net(inputs[part]) - targets[part]).pow(2).mean()
            loss.backward()
            return loss

        if isinstance(self.optimizer, optim.LBFGS):
            self.optimizer.step(closure)
        else:
            closure()
            self.optimizer.step()
        if isinstance(self.scheduler, lr_scheduler.ReduceLROnPlateau):
            self.scheduler.step(float(number))
        elif self.scheduler is not None:
            self.scheduler.step()


def batch(net: nn.Module, number: int) -> tuple[Tensor, Tensor]:
    """Inputs and targets, ROWS of each."""
    chance = torch.Generator().manual_seed(100 + number)
    if isinstance(net[0], nn.Embedding):  # type: ignore[index]
        return torch.randint(0, 5, (ROWS,), generator=chance), torch.randn(ROWS, 2, generator=chance).double()
    dtype = next(net.parameters()).dtype
    return torch.randn(ROWS, 3, generator=chance).to(dtype), torch.randn(ROWS, 2, generator=chance).to(dtype)


def undone_and_joined(row: Row, rank: int, size: int) -> None:
    """See above."""
    share, everything = ROWS // size, slice(0, ROWS)
    part = slice(rank * share, (rank + 1) * share)
    plain = Training(row, 1, distributes=False)
    for number in range(BEFORE + AFTER):
        plain.step(number, everything)
    mine = Training(row, 1, distributes=True)
    state: Any = hvd.elastic.TorchState(mine.net, mine.optimizer, scheduler=mine.scheduler, epoch=0)
    state.sync()
    for number in range(BEFORE):
        mine.step(number, part)
    state.epoch = 1
    state.commit()
    for number in (50, 51):
        mine.step(number, part)
    state.restore()
    if rank == size - 1:
        mine = Training(row, 2, distributes=True)
        state = hvd.elastic.TorchState(mine.net, mine.optimizer, scheduler=mine.scheduler, epoch=0)
    state.sync()
    assert state.epoch == 1
    assert state.scheduler is mine.scheduler
    for number in range(BEFORE, BEFORE + AFTER):
        mine.step(number, part)
    for ours, expected in zip(mine.net.parameters(), plain.net.parameters(), strict=True):
        tolerance = 1e-12 if ours.dtype == torch.float64 else 1e-6
        torch.testing.assert_close(ours, expected, rtol=tolerance, atol=tolerance)
        assert torch.equal(hvd.broadcast(ours.detach(), 0), ours), "all ranks have the same bits"
    told = encoded(mine.optimizer.state_dict())
    assert hvd.broadcast_object(told) == told, "and the same state of the optimizer"
    for ours, expected in zip(mine.optimizer.param_groups, plain.optimizer.param_groups, strict=True):
        assert ours["lr"] == expected["lr"]


def compressed(codec: Any, rank: int, size: int) -> None:
    """The residual of a codec is undone, too; with a newcomer, which has none of it, ranks stay alike."""
    row = Row(partial(optim.SGD, lr=0.05), net=wide, compression=codec)
    part = slice(rank * ROWS // size, (rank + 1) * ROWS // size)
    calm, mine = Training(row, 1, distributes=True), Training(row, 1, distributes=True)
    for number in range(BEFORE + AFTER):
        calm.step(number, part)
    state: Any = hvd.elastic.TorchState(mine.net, mine.optimizer)
    for number in range(BEFORE):
        mine.step(number, part)
    state.commit()
    mine.step(50, part)
    state.restore()
    state.sync()
    for number in range(BEFORE, BEFORE + AFTER):
        mine.step(number, part)
    assert equal_bits(mine.net.parameters(), calm.net.parameters())
    if rank == size - 1:
        mine = Training(row, 2, distributes=True)
        state = hvd.elastic.TorchState(mine.net, mine.optimizer)
    state.sync()
    for number in range(AFTER):
        mine.step(number, part)
        assert equal_bits((hvd.broadcast(p.detach(), 0) for p in mine.net.parameters()), mine.net.parameters())


def equal_bits(found: Iterable[Tensor], expected: Iterable[Tensor]) -> bool:
    return all(torch.equal(mine, other) for mine, other in zip(found, expected, strict=True))


for _name, _row in TABLE.items():
    CHECKS.check(partial(undone_and_joined, _row), _name)
for _name, _codec in CODECS.items():
    CHECKS.check(partial(compressed, _codec), _name)


@pytest.mark.parametrize("name", CHECKS)
def test_of(name: str) -> None:
    CHECKS.passed(name, 2)
