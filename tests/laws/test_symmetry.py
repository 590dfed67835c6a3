"""Laws of ranks that are alike: a few of them show the results of all."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import polytempo as pt
from polytempo.cluster import Cluster
from polytempo.core import Port, Strategy
from polytempo.jobs import find
from polytempo.runs.simulated import simulate as simulation
from polytempo.worlds import Outcome, VirtualWorld
from polytempo.worlds.virtual.symmetry import run_alike

RANKS = 9


def priced(
    strategy: Strategy, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> tuple[Outcome[None] | None, Outcome[None]]:
    """Two steps without values by four ranks, where they are alike, and by all of them."""
    found: list[Any] = []

    def both(
        cluster: Cluster, num_ranks: int, program: Callable[[Port], Any], *, seed: int = 0, alike: bool = True
    ) -> Outcome[None]:
        found.append(run_alike(cluster, num_ranks, program, seed=seed) if alike else None)
        found.append(VirtualWorld(cluster, num_ranks, seed=seed).run(program))
        return found[1]

    monkeypatch.setattr(simulation, "run_priced", both)
    pt.simulate(find("digits"), strategy, RANKS, cluster, meta=True, steps=2)
    return found[0], found[1]


@pytest.mark.parametrize("name", ["sign_sgd", "qsgd", "gossip", "sync_sgd(route=invariant(slices=16))"])
def test_four_ranks_tell_what_all_do_or_nothing(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """`benchmarks/virtual/agreement.py` has all strategies."""
    alike, full = priced(pt.parse_strategy(name), pt.cluster.ethernet(), monkeypatch)
    if alike is None:
        return
    assert alike.seconds == pytest.approx(full.seconds, rel=1e-9)
    assert alike.trace.bytes_sent == full.trace.bytes_sent
    assert {k: n for k, n in alike.trace.messages.items() if n} == {k: n for k, n in full.trace.messages.items() if n}


@pytest.mark.parametrize("name", ["sync_sgd", "local_sgd(period=2)", "top_k_sgd", "power_sgd", "robust_sgd"])
def test_these_are_alike_to_the_last_event(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    alike, full = priced(pt.parse_strategy(name), pt.cluster.ethernet(), monkeypatch)
    assert alike is not None
    assert alike.trace.hash == full.trace.hash


@pytest.mark.parametrize(
    "cluster",
    [
        pt.cluster.ethernet(stragglers=pt.cluster.lognormal()),
        pt.cluster.ethernet(stragglers=pt.cluster.slow_host(4)),
        Cluster(pt.cluster.ethernet().network, faults=(pt.cluster.Pause(3, 1, 0.5),)),
    ],
    ids=["lognormal", "slow_host", "pause"],
)
def test_ranks_that_are_not_alike_all_act(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    alike, full = priced(pt.strategies.sync_sgd(), cluster, monkeypatch)
    assert alike is None
    assert full.seconds > 0
