"""`async_diloco` with a gate on the age of movements, and with an outer Adam at the server."""

from __future__ import annotations

from dataclasses import replace

import pytest

import polytempo as pt
from polytempo import strategies as s
from polytempo.aggregation import adam, heavy_ball, nesterov
from polytempo.cluster import ethernet, slow_host
from polytempo.core import Strategy, Transform
from polytempo.spec.result import Result

DIGITS = pt.jobs.find("digits")


def trained(strategy: Strategy, workers: int = 4, *, epochs: int = 2) -> Result:
    """Worker 0 is four times slower than the others."""
    cluster = replace(ethernet(), stragglers=slow_host(0, 4.0))
    return pt.simulate(DIGITS, strategy, workers, cluster, epochs=epochs, batch_size=16)


def test_a_gate_that_no_movement_reaches_is_a_constant_rate_to_the_bit() -> None:
    gated, plain = trained(s.async_diloco(5, scale=pt.gate(0.9, 1)), 1), trained(s.async_diloco(5), 1)
    assert gated.parameters_sha256 == plain.parameters_sha256


@pytest.mark.parametrize("delay", [0, 3])
@pytest.mark.parametrize("shards", [1, 2])
def test_dropped_movements_are_counted_with_their_samples(shards: int, delay: int) -> None:
    """A batch counts as used where any shard has used it: with one shard all others are dropped."""
    result = trained(s.async_diloco(5, shards=shards, scale=pt.gate(0.1, 3), delay=delay))
    assert result.server is not None
    assert result.ledger is not None
    assert result.samples == 2 * 1437
    assert result.server["dropped"] > 0
    assert all(tau < 3 for tau, _ in result.server["staleness"]["histogram"])
    dropped = sum(part["dropped"] for part in result.ledger)
    if shards == 1:
        assert 16 < dropped <= 5 * 16 * result.server["dropped"]
        assert sum(part["never"] for part in result.ledger) == dropped
    assert all(part["twice"] == 0 for part in result.ledger)


@pytest.mark.parametrize(
    ("optimizer", "own"),
    [
        (nesterov(0.6, 0.3), s.async_diloco(5, 0.6, 0.3)),
        (nesterov(0.6, 0.0), s.async_diloco(5, 0.6, 0.0)),
        (heavy_ball(0.6, 0.0), s.async_diloco(5, 0.6, 0.0)),
    ],
)
def test_a_given_outer_optimizer_is_the_usual_one(optimizer: Transform, own: Strategy) -> None:
    given = trained(s.async_diloco(5, outer_optimizer=optimizer), epochs=1)
    assert given.parameters_sha256 == trained(own, epochs=1).parameters_sha256


@pytest.mark.parametrize("optimizer", [adam(0.02, eps=1e-3), heavy_ball(0.7, 0.3)], ids=lambda made: made.name)
def test_one_worker_steps_as_diloco_does(optimizer: Transform) -> None:
    found = pt.simulate(DIGITS, s.async_diloco(5, outer_optimizer=optimizer), 1, steps=20)
    expected = pt.simulate(DIGITS, s.diloco(5, outer_optimizer=optimizer), 1, steps=20)
    assert found.loss == pytest.approx(expected.loss, rel=1e-5)
    other = pt.simulate(DIGITS, s.diloco(5), 1, steps=20)
    assert found.loss != pytest.approx(other.loss, rel=1e-3)


def test_a_quorum_of_all_with_an_outer_adam_is_diloco() -> None:
    strategy = s.decoupled_diloco(5, 4, outer_optimizer=adam(0.02))
    assert strategy.server is not None
    even = replace(strategy, meeting=replace(strategy.server, deals="evenly"))
    found = pt.simulate(DIGITS, even, 4, steps=10)
    expected = pt.simulate(DIGITS, s.diloco(5, outer_optimizer=adam(0.02)), 4, steps=10)
    assert found.loss == pytest.approx(expected.loss, rel=1e-4)
