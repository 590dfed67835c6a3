"""Clients' time to an accuracy, with stragglers and drop-outs: rounds that wait, rounds that ask more, a buffer.

    python benchmarks/federated/virtual_time.py [--goal 0.93] [--most 150] [--seeds 0 1]

The digits, 100 clients by Dirichlet(0.5), ten movements an update, E = 1, B = 10. A client trains for its samples times
exp(z) exp(z'), with z drawn once and z' each time; a tenth drops out. Times are in units of a sample's training on the
median client, of a clock that is drawn from the seed. Each run is made twice, and its hashes are compared.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional

import polytempo as pt
from polytempo import federated as fed

CLIENTS, COHORT, LOST, EXTRA = 100, 10, 0.1, 0.3
SYNCHRONOUS = {
    "fed_avg": fed.drop_outs(LOST),
    "fed_avg, over-selected by 30 %": fed.both(fed.drop_outs(LOST), fed.over_selected(EXTRA)),
}


def job(sampling: fed.Sampling | None, seed: int) -> pt.Job:
    """Logistic regression on the digits of clients."""
    train, test = pt.data.digits()
    dealt = fed.clients(train, fed.dirichlet(CLIENTS, alpha=0.5), seed, sampling)
    return pt.Job(
        model=lambda: nn.Linear(64, 10),
        data=lambda path: pt.Data(dealt, test),
        loss=functional.cross_entropy,
        optimizer=lambda parameters, lr: torch.optim.SGD(parameters, lr=lr),
        correct=lambda output, target: output.argmax(1) == target,
        lr=0.1,
    )


def updates_to(goal: float, strategy: pt.Strategy, made: pt.Job, seed: int, most: int) -> tuple[int | None, str]:
    """The first update with a score of `goal`, None if `most` are too few; and the run's hash."""
    with tempfile.TemporaryDirectory() as folder:
        options = {"seed": seed, "steps": most, "eval_every": 1, "until": {"accuracy": goal}, "out": Path(folder)}
        result = pt.simulate(made, strategy, workers=2, **options)
    return result.steps if result.reached else None, result.parameters_sha256


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--goal", type=float, default=0.93)
    parser.add_argument("--most", type=int, default=150)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    given = parser.parse_args()
    print("| server | seed | updates | time | time an update | the same hash twice |\n|---|---|---|---|---|---|")
    for seed in given.seeds:
        for name in (*SYNCHRONOUS, "fed_buff, 20 in training"):
            rule = SYNCHRONOUS.get(name)
            buffered = fed.fed_buff(COHORT, 20, lost=LOST)
            strategy = buffered if rule is None else fed.fed_avg(COHORT, batch_size=10)
            (updates, digest), (_, again) = (
                updates_to(given.goal, strategy, job(rule, seed), seed, given.most) for _ in range(2)
            )
            sizes, number = job(rule, seed).data(None).train.sizes, updates or given.most
            if rule is None:
                spent = fed.Arrivals(sizes, COHORT, 20, 8, 1.0, seed, LOST).buffer(number - 1)[-1].at
            else:
                spent = sum(rule.duration(sizes, COHORT, seed, each) for each in range(number))
            reached = f"{updates}" if updates else f"more than {given.most}"
            same = "yes" if digest == again else "NO"
            print(f"| `{name}` | {seed} | {reached} | {spent:,.0f} | {spent / number:.0f} | {same} |", flush=True)


if __name__ == "__main__":
    main()
