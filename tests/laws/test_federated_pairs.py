"""Rounds of clients: every pair of a strategy, a merge, codes and a local optimizer, in both worlds and resumed.

A row is refused by a code, or has the same bits for each number of workers and after an interruption. Seeds are
literals.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import combinations, product
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer, RMSprop
from torch.optim.lr_scheduler import CosineAnnealingLR, OneCycleLR

import polytempo as pt
from laws.test_federated import SEED, close, data, first, job, trained, wide
from polytempo import federated as fed
from polytempo.aggregation import bulyan, krum, median, trimmed_mean
from polytempo.compression import int8, qsgd, top_k
from polytempo.core import Strategy
from polytempo.core.calls.refusals import Incompatible
from polytempo.federated import strategies
from polytempo.federated.clients import Cohorts
from polytempo.spec.text.catalogue import parse_strategy

ROUNDS, CUT, CLIENTS = 4, 2, 8
COHORT = 7
"""The fewest clients of `bulyan(1)`."""

AROUND = {"fed_coded", "fed_robust", "secure"}
INNER = {name: f"{name}({COHORT}, batch_size=4)" for name in strategies.__all__ if name not in AROUND} | {
    "fed_buff": f"fed_buff({COHORT}, concurrency=1, batch_size=4)",
    "fed_bn": f"fed_bn({COHORT}, batch_size=None)",  # a batch of one sample has no statistics
    "private": f"private(fed_avg_m({COHORT}, batch_size=4), clip=0.05, noise=0.0)",
    "dp_sgd": f"dp_sgd(fed_avg({COHORT}, batch_size=4), clip=0.5, noise=0.0)",
}
MERGES: dict[str, Callable[[Strategy], Strategy]] = {
    "mean": lambda inner: inner,
    "median": lambda inner: fed.fed_robust(inner, median),
    "trimmed_mean": lambda inner: fed.fed_robust(inner, trimmed_mean(2)),
    "krum": lambda inner: fed.fed_robust(inner, krum(1)),
    "bulyan": lambda inner: fed.fed_robust(inner, bulyan(1)),
    "secure": fed.secure,
}
CODES = {"plain": (None, None), "up": (qsgd(levels=127), None), "down": (None, int8()), "both": (top_k(0.1), int8())}
OPTIMIZERS: dict[str, dict[str, Callable[..., Any]]] = {
    "sgd": {"optimizer": SGD},
    "momentum": {
        "optimizer": lambda parameters, lr: SGD(parameters, lr, momentum=0.9, weight_decay=0.1, nesterov=True)
    },
    "adam": {"optimizer": lambda parameters, lr: Adam(parameters, lr / 10, amsgrad=True)},
    "adamw": {"optimizer": lambda parameters, lr: AdamW(parameters, lr / 10)},
    "rmsprop": {"optimizer": lambda parameters, lr: RMSprop(parameters, lr / 10, momentum=0.5)},
    "scheduled_adagrad": {
        "optimizer": Adagrad,
        "schedule": lambda optimizer, steps: CosineAnnealingLR(optimizer, ROUNDS * steps),
    },
    "one_cycle_momentum": {
        "optimizer": lambda parameters, lr: SGD(parameters, lr, momentum=0.9),
        "schedule": lambda optimizer, steps: OneCycleLR(optimizer, 0.1, total_steps=ROUNDS * steps),
    },
    "one_cycle_betas": {
        "optimizer": lambda parameters, lr: AdamW(parameters, lr / 10),
        "schedule": lambda optimizer, steps: OneCycleLR(optimizer, 0.01, total_steps=ROUNDS * steps),
    },
}


class Row(NamedTuple):
    """One of each."""

    inner: str
    merge: str
    codes: str
    optimizer: str

    def __str__(self) -> str:
        return "-".join(self)

    @property
    def code(self) -> str | None:
        """The refusal of this row."""
        if self.codes in ("up", "both") and self.merge == "secure":
            return "PT2520"
        if self.merge == "secure" and self.inner in ("q_fed_avg", "scaffold"):
            return "PT2520"
        if self.merge not in ("mean", "secure") and self.inner in WEIGHED:
            return "PT2511"
        return "PT2510" if self.inner == "scaffold" and self.optimizer != "sgd" else None

    def strategy(self) -> Strategy:
        inner, (up, down) = parse_strategy(INNER[self.inner]), CODES[self.codes]
        coded = inner if self.codes == "plain" else fed.fed_coded(inner, up, down)
        return MERGES[self.merge](coded)

    def job(self) -> pt.Job:
        return job(model=normed if self.inner == "fed_bn" else wide, **OPTIMIZERS[self.optimizer])


WEIGHED = ("fed_nova", "q_fed_avg", "scaffold", "fed_buff", "private")
"""Strategies that no merge counts alike."""


def normed() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 300), nn.BatchNorm1d(300), nn.Tanh(), nn.Linear(300, 3)).double()


def pairs(row: Row) -> set[tuple[Any, ...]]:
    return set(combinations(row._asdict().items(), 2))


def covering(rows: Iterable[Row], given: Iterable[Row] = (), seed: int = 7) -> list[Row]:
    """Some of the rows, which have each pair of values that is in one of them, and in none of `given`."""
    every = list(rows)
    Random(seed).shuffle(every)
    met, found = {pair for row in given for pair in pairs(row)}, list[Row]()
    for fewest in range(6, 0, -1):
        for row in every:
            if len(new := pairs(row) - met) >= fewest:
                found.append(row)
                met |= new
    return found


EVERY = [Row(*each) for each in product(INNER, MERGES, CODES, OPTIMIZERS)]
ROWS = covering(row for row in EVERY if row.code is None)
REFUSED = covering((row for row in EVERY if row.code is not None), ROWS)


def test_every_pair_is_in_a_row() -> None:
    met = set().union(*map(pairs, ROWS + REFUSED))
    assert met == set().union(*map(pairs, EVERY))


def given(rounds: int = ROUNDS) -> dict[str, Any]:
    return {"clients": f"by_size({CLIENTS}, sigma=0.5)", "seed": SEED, "steps": rounds}


@pytest.mark.parametrize("row", ROWS, ids=str)
def test_a_row_has_the_same_bits_for_any_workers_and_after_an_interruption(row: Row, tmp_path: Path) -> None:
    """The first part is simulated with two workers, the rest is a run of one process."""
    strategy, of = row.strategy(), row.job()
    straight = pt.simulate(of, strategy, 3, **given())
    begun = pt.simulate(of, strategy, 2, out=tmp_path, checkpoint_every=CUT, **given(CUT))
    found = pt.Trainer(of, strategy, out=tmp_path, resume=True, **given()).fit()
    assert (found.parameters_sha256, found.steps) == (straight.parameters_sha256, ROUNDS)
    assert found.parameters_sha256 != begun.parameters_sha256


@pytest.mark.parametrize("row", REFUSED, ids=str)
def test_a_row_that_cannot_be_is_refused(row: Row) -> None:
    with pytest.raises(Incompatible, match=str(row.code)):
        pt.simulate(row.job(), row.strategy(), 1, **given())


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_any_local_optimizer_is_its_plain_loop(name: str) -> None:
    """A new optimizer for each client, with the rates, and the momentum or betas, of the round's schedule."""
    make, schedule = OPTIMIZERS[name]["optimizer"], OPTIMIZERS[name].get("schedule")
    inputs, labels = data().tensors
    clients, net = fed.clients(data(), fed.by_size(CLIENTS, sigma=0.7), SEED), first()
    outer: Optimizer = make(net.parameters(), 0.1)
    rates = None if schedule is None else schedule(outer, 1)
    theta = [parameter.detach().clone() for parameter in net.parameters()]
    for number in range(ROUNDS):
        chosen = Cohorts(clients, 3, SEED).order(number).tolist()
        samples, after = sum(clients.sizes[k] for k in chosen), [torch.zeros_like(value) for value in theta]
        for k in chosen:
            restored(net, theta)
            optimizer = make(net.parameters(), 0.1)
            for group, round_group in zip(optimizer.param_groups, outer.param_groups, strict=True):
                group.update({key: value for key, value in round_group.items() if key != "params"})
            for epoch in range(2):
                order = np.random.default_rng((SEED, number, k, epoch)).permutation(clients.sizes[k])
                for batch in clients.parts[k][torch.from_numpy(order)].split(4):
                    optimizer.zero_grad()
                    nn.functional.cross_entropy(net(inputs[batch]), labels[batch]).backward()
                    optimizer.step()
            for each, parameter in zip(after, net.parameters(), strict=True):
                each += clients.sizes[k] / samples * parameter.detach()
        theta = after
        net.zero_grad()
        outer.step()
        if rates is not None:
            rates.step()
    of = job(**OPTIMIZERS[name])
    close(trained(fed.fed_avg(3, 2, 4), ROUNDS, job=of, clients=f"by_size({CLIENTS}, sigma=0.7)"), theta)


def restored(net: nn.Module, theta: list[Tensor]) -> None:
    for parameter, value in zip(net.parameters(), theta, strict=True):
        parameter.data.copy_(value)
