"""The clock model and the decay model: weights so simple that they show the optimizer's actions.

    clock    loss = w, so each step of plain SGD moves w by the learning rate: it ends at minus the sum of all rates
    decay    loss = 0 · w, so only weight decay moves w
    slope    loss = x̄ · w, so the gradient is the mean x̄ of the batch, wherever w is and however stale it was read

A strategy's server is watched through its rule, which hears of every push. `repeated` does the docstring's step again
with torch's own optimizer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adagrad, AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler
from torch.utils.data import TensorDataset

from laws.definitions import OuterStep
from plain_rules import plain_halos
from polytempo.cluster import Cluster, Crash, Link, slow_host
from polytempo.core import Strategy
from polytempo.core.rule import Add, Arrival, Drop, RuleState, Situation, Update
from polytempo.data.batches import Batches
from polytempo.runs.simulated.simulate import simulate
from polytempo.spec.job import Data, Job

SAMPLES, BATCH, EPOCHS, LR = 37, 4, 3, 0.1
"""An epoch's last batch has one sample."""
WIDTH = 4
"""Equal weights, so that there is something in each of two shards."""
DECAY = 0.5

MakeOptimizer = Callable[[Iterable[nn.Parameter], float, float], Optimizer]
"""(parameters, learning rate, weight decay)"""

OPTIMIZERS: dict[str, MakeOptimizer] = {
    "sgd": lambda parameters, lr, decay: SGD(parameters, lr=lr, weight_decay=decay),
    "momentum": lambda parameters, lr, decay: SGD(parameters, lr=lr, momentum=0.8, weight_decay=decay),
    "nesterov": lambda parameters, lr, decay: SGD(parameters, lr=lr, momentum=0.8, nesterov=True, weight_decay=decay),
    "adamw": lambda parameters, lr, decay: AdamW(parameters, lr=lr, weight_decay=decay, foreach=False),
    "adagrad": lambda parameters, lr, decay: Adagrad(parameters, lr=lr, weight_decay=decay, foreach=False),
}


class Weights(nn.Module):
    """`WIDTH` weights that begin at 1 and get the same gradient, the mean of the batch's inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH, dtype=torch.float64))

    def forward(self, inputs: Tensor) -> Tensor:
        """(batch, 1) -> (batch,)"""
        return inputs[:, 0] * self.weight.sum()


def mean(output: Tensor, target: Tensor) -> Tensor:
    """The loss."""
    return output.mean()


MODELS: dict[str, Tensor] = {
    "clock": torch.ones(SAMPLES, dtype=torch.float64),
    "decay": torch.zeros(SAMPLES, dtype=torch.float64),
    "slope": torch.linspace(0.5, 1.5, SAMPLES, dtype=torch.float64),
}
"""Each sample's x."""


class Setting(NamedTuple):
    """The trained model, apart from the strategy."""

    model: str = "clock"
    optimizer: str = "sgd"
    decay: float = 0.0
    scheduled: bool = False

    def job(self, models: list[nn.Module] | None = None) -> Job:
        """Every model that it makes is put into `models`."""
        made = [] if models is None else models

        def make() -> nn.Module:
            made.append(Weights())
            return made[-1]

        samples = TensorDataset(MODELS[self.model][:, None], torch.zeros(SAMPLES))
        return Job(
            model=make,
            data=lambda folder: Data(samples),
            loss=mean,
            optimizer=lambda parameters, lr: OPTIMIZERS[self.optimizer](parameters, lr, self.decay),
            lr=LR,
            batch_size=BATCH,
            epochs=EPOCHS,
            schedule=falling if self.scheduled else None,
        )


def falling(optimizer: Optimizer, steps_per_epoch: int) -> LRScheduler:
    """The rate falls to 0 in three quarters of the run."""
    return LambdaLR(optimizer, lambda step: max(0.0, 1 - step / (0.75 * EPOCHS * steps_per_epoch)))


class Dealt(NamedTuple):
    """The batches of a run as a strategy deals them to so many workers."""

    batches: Batches
    scheduled: bool

    @property
    def tickets(self) -> range:
        """The number of tickets in the whole run."""
        return range(EPOCHS * len(self.batches))

    def gradient(self, ticket: int) -> float:
        """The mean of the batch."""
        return float(self.batches.at(*divmod(ticket, len(self.batches)))[0].mean())

    def samples(self, ticket: int) -> int:
        """The number of samples in the batch."""
        return len(self.batches.at(*divmod(ticket, len(self.batches)))[1])

    def rate(self, ticket: int) -> float:
        """The job's learning rate at the ticket's place in the run."""
        if not self.scheduled:
            return LR
        steps = max(1, len(self.batches) // self.batches.size)
        epoch, batch = divmod(ticket, len(self.batches))
        return falling_rate(epoch * steps + batch * steps // len(self.batches), steps)


@cache
def falling_rate(step: int, steps_per_epoch: int) -> float:
    """The rate under `falling`, as torch sets it."""
    optimizer = SGD([nn.Parameter(torch.zeros(1))], lr=LR)
    schedule = falling(optimizer, steps_per_epoch)
    for _ in range(step):
        optimizer.step()
        schedule.step()
    return float(optimizer.param_groups[0]["lr"])


def dealt(strategy: Strategy, setting: Setting, workers: int) -> Dealt:
    """The engine's deals."""
    assert strategy.server is not None
    source = setting.job().data(None).train
    return Dealt(
        Batches(source, size=workers, batch_size=BATCH, deals=strategy.server.deals),
        setting.scheduled,
    )


# ------------------------------------------------------------------------------------------------- a server's arrivals


class Gradient(NamedTuple):
    """A push that counts: which batches it is of, the version that it was computed on, and by how much that was old."""

    tickets: tuple[int, ...]
    basis: int
    staleness: int
    samples: int


def watched(strategy: Strategy) -> tuple[Strategy, list[list[Any]]]:
    """The strategy, with a record of its rule's arrivals and actions in each shard; a state of the rule names the
    shard."""
    assert strategy.server is not None
    rule, logs = strategy.server.rule, list[list[Any]]()

    def init() -> RuleState:
        logs.append([])
        return {"shard": len(logs) - 1, "own": rule.init()}

    def receive(state: RuleState, arrival: Arrival, situation: Situation) -> tuple[RuleState, list[Any]]:
        own, actions = rule.receive(state["own"], arrival, situation)
        logs[state["shard"]].append((arrival, situation, actions))
        return {**state, "own": own}, actions

    changed = rule._replace(init=init, receive=receive)
    return replace(strategy, meeting=replace(strategy.server, rule=changed)), logs


def updates_of(log: Sequence[Any]) -> Iterator[list[Gradient]]:
    """The gradients of each update, up to when the last worker has left with the final weights."""
    waiting: dict[int, list[Arrival]] = {}
    added: list[Gradient] = []
    for arrival, situation, actions in log:
        if arrival.kind == "left":
            waiting.pop(arrival.worker, None)
        if arrival.kind == "push":
            waiting.setdefault(arrival.worker, []).append(arrival)
        if not situation.members:
            continue
        for action in actions:
            if isinstance(action, Add | Drop):
                push = waiting[action.worker].pop(0)
                if isinstance(action, Add):
                    tau = situation.version - push.basis
                    added.append(Gradient(push.tickets, push.basis, tau, push.samples))
            elif isinstance(action, Update):
                yield added
                added = []


class Run(NamedTuple):
    """The results of a simulation."""

    updates: list[list[list[Gradient]]]
    """Each shard's updates."""
    weights: Tensor
    """(WIDTH,), which every worker that lived to the end has."""
    samples: int


def simulated(strategy: Strategy, setting: Setting, workers: int, *crashes: Crash, **options: Any) -> Run:
    """One host has a third of the others' speed, and workers crash."""
    models: list[nn.Module] = []
    heard, logs = watched(strategy)
    cluster = Cluster(Link(1e-5, 1e9), flops_per_s=1e5, stragglers=slow_host(workers - 1, 3.0), faults=crashes)
    result = simulate(setting.job(models), heard, workers, cluster, **options)
    dead = {crash.rank for crash in crashes}
    final = [next(model.parameters()).detach() for rank, model in enumerate(models[1:]) if rank not in dead]
    assert all(torch.equal(each, final[0]) for each in final)
    return Run([list(updates_of(log)) for log in logs], final[0], result.samples)


# ---------------------------------------------------------------------------------- the docstrings' steps, done again


def constant(tau: int) -> float:
    """However stale."""
    return 1.0


def inverse(tau: int) -> float:
    """1/τ, and 1 where τ is 0."""
    return 1 / max(1, tau)


class Promise(NamedTuple):
    """The server's step in a strategy's docstring, as numbers."""

    factor: Callable[[int], float] = lambda workers: 1.0
    """The number of workers -> the factor of the job's rate."""
    scale: Callable[[int], float] = constant
    """s(τ)"""
    by_samples: bool = False
    """Gradients count by their samples, else alike."""
    compensation: float = 0.0
    """DC-ASGD's s."""
    mean_square: float | None = None
    """DC-ASGD-a's m."""
    decays_at_worker: bool = False
    """The weight decay that belongs to the gradient is of the weights that the worker had."""
    adagrad: bool = False
    """The server's optimizer is Adagrad, with any job's."""


def repeated(updates: Sequence[Sequence[Gradient]], promise: Promise, setting: Setting, dealt: Dealt) -> float:
    """One weight after all updates: η̄ = Σ mᵢ rᵢ / Σ mᵢ and ḡ = Σ mᵢ rᵢ gᵢ / Σ mᵢ rᵢ with rᵢ = ρ s(τᵢ) ηᵢ, by torch."""
    weight = nn.Parameter(torch.ones(1, dtype=torch.float64))
    squares = 0.0
    local = promise.decays_at_worker and setting.optimizer != "adamw"
    decay = 0.0 if local else setting.decay
    make = OPTIMIZERS[setting.optimizer]
    optimizer = Adagrad([weight], eps=0.0) if promise.adagrad else make([weight], LR, decay)
    history = [weight.item()]
    for gradients in updates:
        rates, parts, counts = list[float](), list[float](), list[float]()
        for gradient in gradients:
            batch_rates = [dealt.rate(ticket) for ticket in gradient.tickets]
            own = sum(batch_rates) / len(batch_rates)
            rates.append(promise.factor(dealt.batches.size) * promise.scale(gradient.staleness) * own)
            part = sum(dealt.gradient(ticket) for ticket in gradient.tickets)
            if local:
                part += setting.decay * history[gradient.basis]
            strength = promise.compensation
            if promise.mean_square is not None:
                squares = promise.mean_square * squares + (1 - promise.mean_square) * part**2
                strength /= (squares + 1e-7) ** 0.5
            parts.append(part + strength * part**2 * (history[-1] - history[gradient.basis]))
            counts.append(float(gradient.samples) if promise.by_samples else 1.0)
        moved = sum(m * r for m, r in zip(counts, rates, strict=True))
        shares = [m * r / moved if moved else m / sum(counts) for m, r in zip(counts, rates, strict=True)]
        optimizer.param_groups[0]["lr"] = moved / sum(counts)
        weight.grad = torch.tensor([sum(s * g for s, g in zip(shares, parts, strict=True))], dtype=torch.float64)
        optimizer.step()
        history.append(weight.item())
    return history[-1]


def downpour_alone(every: int, setting: Setting, dealt: Dealt) -> float:
    """One worker: its own steps, and Adagrad on each sum of g + λ w; fetched weights are used a step later."""
    weight, server = (nn.Parameter(torch.ones(1, dtype=torch.float64)) for _ in range(2))
    optimizer = OPTIMIZERS[setting.optimizer]([weight], LR, setting.decay)
    adagrad = Adagrad([server], eps=0.0, foreach=False)
    accrued, rates, arrived = 0.0, list[float](), None
    for ticket in dealt.tickets:
        rates.append(dealt.rate(ticket))
        optimizer.param_groups[0]["lr"] = rates[-1]
        gradient = dealt.gradient(ticket)
        accrued += gradient + setting.decay * weight.item()
        weight.grad = torch.tensor([gradient], dtype=torch.float64)
        optimizer.step()
        if arrived is not None:
            weight.data.fill_(arrived)
            arrived = None
        if len(rates) == every or ticket == dealt.tickets[-1]:
            adagrad.param_groups[0]["lr"] = sum(rates) / len(rates)
            server.grad = torch.tensor([accrued], dtype=torch.float64)
            adagrad.step()
            accrued, rates, arrived = 0.0, [], server.item()
    return server.item()


def async_diloco_alone(
    period: int,
    lr: float,
    momentum: float,
    setting: Setting,
    dealt: Dealt,
    momentum_every: int = 1,
    delay: int = 0,
    outer: OuterStep | None = None,
) -> float:
    """One worker with the job's optimizer; Nesterov's step, or `outer`, by its movement in `period` steps.

    The worker takes in the center after `delay` steps.
    """
    center, velocity = 1.0, 0.0
    movements: list[float] = []

    def push(moved: float) -> float:
        nonlocal center, velocity
        movements.append(moved)
        if outer is not None:
            center -= float(outer(torch.tensor(moved, dtype=torch.float64), len(movements)))
            return center
        center -= lr * moved
        if len(movements) % momentum_every == 0:
            velocity = momentum * velocity + sum(movements[-momentum_every:])
            center -= lr * momentum * velocity
        return center

    moved_alone(period, setting, dealt, push, delay)
    return center


def halos_alone(period: int, name: str, setting: Setting, dealt: Dealt, delay: int = 0) -> float:
    """One worker with the job's optimizer, alone in the only region."""
    server = plain_halos(name, 1.0, lambda x, y, factor: x + factor * y, lambda x, y, share: x + share * (y - x))
    server.set_members([0])
    moved_alone(period, setting, dealt, lambda moved: float(server.push(0, moved, [0])), delay)
    return float(server.theta)


def moved_alone(period: int, setting: Setting, dealt: Dealt, push: Callable[[float], float], delay: int) -> None:
    """One worker that pushes its movement in `period` steps, and the rest, and takes in the answer `delay` later."""
    weight = nn.Parameter(torch.ones(1, dtype=torch.float64))
    optimizer = OPTIMIZERS[setting.optimizer]([weight], LR, setting.decay)
    anchor = asked = answer = 1.0
    steps, pushes = len(dealt.tickets), 0
    for step in range(1, -(-steps // period) * period + 1):
        if step <= steps:
            ticket = dealt.tickets[step - 1]
            optimizer.param_groups[0]["lr"] = dealt.rate(ticket)
            weight.grad = torch.tensor([dealt.gradient(ticket)], dtype=torch.float64)
            optimizer.step()
        if step % period == 0:
            asked = weight.item()
            answer, pushes = push(anchor - asked), pushes + 1
        if pushes and step % period == delay:
            anchor = answer
            weight.data.fill_(anchor + (weight.item() - asked))


def easgd_alone(period: int, alpha: float, setting: Setting, dealt: Dealt) -> float:
    """One worker with the job's optimizer, drawn together with the center after every `period` steps and at the end."""
    weight, center = nn.Parameter(torch.ones(1, dtype=torch.float64)), 1.0
    optimizer = OPTIMIZERS[setting.optimizer]([weight], LR, setting.decay)
    for step, ticket in enumerate(dealt.tickets, start=1):
        optimizer.param_groups[0]["lr"] = dealt.rate(ticket)
        weight.grad = torch.tensor([dealt.gradient(ticket)], dtype=torch.float64)
        optimizer.step()
        if step % period == 0 or ticket == dealt.tickets[-1]:
            difference = alpha * (weight.item() - center)
            weight.data.sub_(difference)
            center += difference
    return center
