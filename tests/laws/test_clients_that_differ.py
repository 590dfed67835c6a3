"""Clients with parabolas that differ: the points where strategies of rounds stand still."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.utils.data import TensorDataset

import polytempo as pt
from laws.test_federated import Point, job, trained
from polytempo import federated as fed
from polytempo.core import Strategy


def stands(strategy: Strategy, parabolas: Sequence[tuple[float, float]], lr: float, sizes: Sequence[int]) -> float:
    """x after 400 rounds of clients with the losses h (x - a)²: equal samples, as many as `sizes` says."""
    rows = [parabola for parabola, size in zip(parabolas, sizes, strict=True) for _ in range(size)]
    steepness, minimum = torch.tensor(rows, dtype=torch.float64).T.unsqueeze(-1)
    owners = [owner for owner, size in enumerate(sizes) for _ in range(size)]
    dealt = fed.clients(TensorDataset(steepness, minimum), fed.by(owners))
    own = job(
        model=Point,
        data=lambda path: pt.Data(dealt, None),
        loss=lambda output, target: (output[:, 1:] * (output[:, :1] - target) ** 2).mean(),
    )
    return trained(strategy, 400, job=own, clients=None, lr=lr)[0].item()


def test_fed_nova_stands_at_the_minimum_where_fed_avg_leans_to_clients_with_more_steps() -> None:
    """A client with four samples makes four steps of one: `fed_avg` counts it four times as much as its samples."""
    parabolas, sizes = [(1.0, 1.0), (1.0, -1.0)], [1, 4]
    best = (1 - 4) / 5
    leans = stands(fed.fed_avg(2, batch_size=1), parabolas, 0.01, sizes)
    found = stands(fed.fed_nova(2, batch_size=1), parabolas, 0.01, sizes)
    assert abs(leans - (1 - 16) / 17) < 0.01
    assert abs(found - best) < 0.015


def test_fed_prox_drifts_less_and_does_not_take_the_drift_away() -> None:
    parabolas = [(1.0, 2.0), (3.0, -1.0)]
    best = (2.0 - 3.0) / 4
    drift = [stands(fed.fed_prox(2, mu, epochs=5), parabolas, 0.1, [1, 1]) - best for mu in (0.0, 1.0, 2.0, 3.0)]
    assert drift == sorted(drift, reverse=True)
    assert drift[0] > 0.45
    assert 0.3 < drift[-1] < 0.36


def test_q_fed_avg_makes_the_clients_losses_alike() -> None:
    """The larger q, the nearer to the minimum of the largest loss, where both are equal."""
    parabolas = [(1.0, 2.0), (3.0, -1.0)]

    def difference(q: float) -> float:
        x = stands(fed.q_fed_avg(2, q, batch_size=None), parabolas, 0.1, [1, 1])
        one, other = (h * (x - a) ** 2 for h, a in parabolas)
        return abs(one - other)

    found = [difference(q) for q in (0.0, 1.0, 5.0)]
    assert found == sorted(found, reverse=True)
    assert found[0] > 3.3
    assert found[-1] < 0.7
