"""Gossip: every graph is doubly stochastic, keeps the mean, and brings the ranks together."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from helpers import after_steps, applied, bundle, bundles, normal
from polytempo.aggregation import Graph, complete, exponential_graph, mix, random_pairs, ring_graph

GRAPHS: list[Graph] = [ring_graph, complete, exponential_graph, random_pairs(), random_pairs(seed=7)]
every_graph = pytest.mark.parametrize("graph", GRAPHS, ids=lambda graph: graph.__name__)

T = 1 / 3


@pytest.mark.parametrize(
    ("graph", "step", "num_ranks", "weights"),
    [
        (ring_graph, 0, 1, [[1]]),
        (ring_graph, 5, 2, [[0.5, 0.5], [0.5, 0.5]]),
        (ring_graph, 0, 3, [[T, T, T]] * 3),
        (ring_graph, 0, 4, [[T, T, 0, T], [T, T, T, 0], [0, T, T, T], [T, 0, T, T]]),
        (complete, 0, 4, [[0.25] * 4] * 4),
        (exponential_graph, 0, 4, [[0.5, 0.5, 0, 0], [0, 0.5, 0.5, 0], [0, 0, 0.5, 0.5], [0.5, 0, 0, 0.5]]),
        (exponential_graph, 1, 4, [[0.5, 0, 0.5, 0], [0, 0.5, 0, 0.5], [0.5, 0, 0.5, 0], [0, 0.5, 0, 0.5]]),
        (exponential_graph, 2, 4, [[0.5, 0.5, 0, 0], [0, 0.5, 0.5, 0], [0, 0, 0.5, 0.5], [0.5, 0, 0, 0.5]]),
        (exponential_graph, 9, 1, [[1]]),
    ],
)  # fmt: skip
def test_weights(graph: Graph, step: int, num_ranks: int, weights: list[list[float]]) -> None:
    assert graph(step, num_ranks) == weights


@every_graph
@pytest.mark.parametrize("num_ranks", range(1, 18))
def test_weights_are_doubly_stochastic_for_50_steps(graph: Graph, num_ranks: int) -> None:
    for step in range(50):
        weights = torch.tensor(graph(step, num_ranks), dtype=torch.float64)
        assert weights.shape == (num_ranks, num_ranks)
        assert (weights >= 0).all()
        assert (weights.diagonal() > 0).all(), "everybody keeps a part of its own"
        torch.testing.assert_close(weights.sum(0), torch.ones(num_ranks, dtype=torch.float64), rtol=0, atol=1e-15)
        torch.testing.assert_close(weights.sum(1), torch.ones(num_ranks, dtype=torch.float64), rtol=0, atol=1e-15)


@pytest.mark.parametrize("num_ranks", [2, 5, 8])
def test_random_pairs_are_pairs_and_change_from_step_to_step(num_ranks: int) -> None:
    partners = []
    for step in range(20):
        weights = random_pairs(3)(step, num_ranks)
        peers = [[j for j, weight in enumerate(row) if weight and j != i] for i, row in enumerate(weights)]
        assert all(len(p) <= 1 for p in peers)
        assert sum(not p for p in peers) == num_ranks % 2, "one sits out where the number is odd"
        assert all(peers[p[0]] == [i] for i, p in enumerate(peers) if p)
        partners.append(peers)
    assert random_pairs(3)(0, num_ranks) == random_pairs(3)(0, num_ranks)
    assert num_ranks == 2 or any(p != partners[0] for p in partners)
    assert num_ranks == 2 or any(random_pairs(4)(s, num_ranks) != random_pairs(3)(s, num_ranks) for s in range(20))


def spread(rows: list[Tensor]) -> float:
    """The largest distance from the mean."""
    stacked = torch.stack(rows)
    return float((stacked - stacked.mean(0)).abs().max())


def at_step(histories: list[list[Tensor]], step: int) -> list[Tensor]:
    return [history[step] for history in histories]


@settings(max_examples=40)
@given(st.sampled_from(GRAPHS), st.integers(1, 12), st.integers(1, 20))
def test_the_mean_over_ranks_is_conserved(graph: Graph, num_ranks: int, num_steps: int) -> None:
    start = normal(num_ranks)
    end = at_step(after_steps(mix(graph), num_steps, bundles(start)), -1)
    torch.testing.assert_close(torch.stack(end).mean(0), torch.stack(start).mean(0), rtol=0, atol=1e-12)


@every_graph
@pytest.mark.parametrize("num_ranks", [2, 3, 5, 8])
def test_ranks_come_together(graph: Graph, num_ranks: int) -> None:
    start = normal(num_ranks)
    histories = after_steps(mix(graph), 60, bundles(start))
    assert spread(at_step(histories, -1)) < 1e-3 * spread(start)


@pytest.mark.parametrize("num_ranks", [2, 4, 8, 16, 32])
def test_the_exponential_graph_reaches_the_exact_mean_in_log_n_steps(num_ranks: int) -> None:
    steps = num_ranks.bit_length() - 1
    start = [torch.tensor([float(rank)]) for rank in range(num_ranks)]
    histories = after_steps(mix(exponential_graph), steps, bundles(start))
    assert [row.tolist() for row in at_step(histories, steps - 1)] == [[(num_ranks - 1) / 2]] * num_ranks
    assert steps == 1 or spread(at_step(histories, steps - 2)) > 0


@pytest.mark.parametrize("num_ranks", range(1, 8))
def test_the_complete_graph_reaches_the_mean_in_one_step(num_ranks: int) -> None:
    start = normal(num_ranks)
    for row in at_step(after_steps(mix(complete), 1, bundles(start)), 0):
        torch.testing.assert_close(row, torch.stack(start).mean(0), rtol=1e-14, atol=1e-15)


def test_a_mix_is_the_matrix_of_its_step() -> None:
    """Two steps of the exponential graph among 5: by hand."""
    start = torch.stack(normal(5))
    expected = start
    for step in range(2):
        expected = torch.tensor(exponential_graph(step, 5), dtype=torch.float64) @ expected
    histories = after_steps(mix(exponential_graph), 2, bundles(list(start)))
    torch.testing.assert_close(torch.stack(at_step(histories, 1)), expected, rtol=1e-14, atol=1e-15)


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ([[1, 0], [0.5, 0.5]], r"gossip weights must be doubly stochastic, but column 0 is \[1, 0.5\]"),
        ([[0.5, 0.6], [0.5, 0.4]], r"gossip weights must be doubly stochastic, but row 0 is \[0.5, 0.6\]"),
        ([[2, -1], [-1, 2]], r"gossip weights must be doubly stochastic, but row 0 is \[2, -1\]"),
        ([[1]], "a graph for 2 ranks must give a 2x2 matrix"),
        ([[1, 0], [0, 1, 0]], "a graph for 2 ranks must give a 2x2 matrix"),
    ],
)
def test_weights_that_would_lose_the_mean_are_refused(weights: list[list[float]], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        applied(mix(lambda step, num_ranks: weights), [bundle(1.0), bundle(2.0)])
