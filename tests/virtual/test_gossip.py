"""Gossip: every graph is doubly stochastic, keeps the mean, and brings the ranks together."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from helpers import after_steps, applied, bundle, bundles, normal
from polytempo.aggregation import (
    Graph,
    complete,
    exponential_graph,
    mix,
    push_sum,
    random_pairs,
    random_targets,
    ring_graph,
)
from polytempo.cluster import Cluster, Link
from polytempo.core import Bundle, Port, Transform, chain
from polytempo.jobs.digits import job as digits
from polytempo.runs.simulated.simulate import simulate
from polytempo.strategies import gossip
from polytempo.synchronization import overlapped
from some_cases import examples

GRAPHS: list[Graph] = [ring_graph, complete, exponential_graph, random_pairs(), random_pairs(seed=7)]
every_graph = pytest.mark.parametrize("graph", GRAPHS, ids=lambda graph: graph.__name__)

T = 1 / 3
SLOW = Cluster(Link(1e-4, 5e6), flops_per_s=2e7)


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
        assert (weights.diagonal() > 0).all(), "every rank keeps a part of its own"
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


@settings(max_examples=examples(40))
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


# ---------------------------------------------------------------------- directed graphs


@settings(max_examples=examples(30))
@given(st.sampled_from([random_targets(), random_targets(seed=4), exponential_graph]), st.integers(2, 9))
def test_pushes_over_a_directed_graph_bring_all_to_the_mean(graph: Graph, num_ranks: int) -> None:
    start = normal(num_ranks)
    end = at_step(after_steps(push_sum(graph), 80, bundles(start)), -1)
    mean = torch.stack(start).mean(0)
    assert spread(end) < 1e-3 * spread(start)
    torch.testing.assert_close(end[0], mean, rtol=0, atol=1e-3 * spread(start))


def test_pushes_are_the_matrix_of_numerators_over_that_of_weights() -> None:
    """Three steps among four, by hand; a mix that forgot the weights would end elsewhere."""
    graph = random_targets(seed=1)
    x, w = torch.stack(normal(4)), torch.ones(4, 1, dtype=torch.float64)
    histories = after_steps(push_sum(graph), 3, bundles(list(x)))
    total = x.sum(0)
    for step in range(3):
        matrix = torch.tensor(graph(step, 4), dtype=torch.float64)
        x, w = matrix @ x, matrix @ w
        torch.testing.assert_close(torch.stack(at_step(histories, step)), x / w, rtol=1e-13, atol=1e-14)
    torch.testing.assert_close(x.sum(0), total)
    assert float(w.max() - w.min()) > 0.1


def test_what_moves_parameters_between_pushes_moves_their_sum() -> None:
    """Each rank adds 1 to z, so the mean of x = w z must be 1 more, with any weights."""
    graph, moved = random_targets(seed=2), 3

    async def move(port: Port, given: Bundle, state: None) -> tuple[Bundle, None]:
        return given.map(lambda flat: flat + 1), None

    start = normal(5)
    steps = chain(Transform(lambda parameters: None, move), push_sum(graph))
    histories = after_steps(steps, moved, bundles(start))
    w = torch.ones(5, 1, dtype=torch.float64)
    for step in range(moved):
        w = torch.tensor(graph(step, 5), dtype=torch.float64) @ w
    x = w * torch.stack(at_step(histories, -1))
    torch.testing.assert_close(x.mean(0), torch.stack(start).mean(0) + moved, rtol=1e-12, atol=1e-12)


def test_a_graph_whose_pushes_would_lose_something_is_refused() -> None:
    pair = [bundle(1.0), bundle(2.0)]
    with pytest.raises(ValueError, match=r"must sum to 1, but column 1 is \[0, 0.5\]"):
        applied(push_sum(lambda step, num_ranks: [[1, 0], [0, 0.5]]), pair)
    with pytest.raises(ValueError, match=r"must keep a part of its own, but column 0 is \[0, 1\]"):
        applied(push_sum(lambda step, num_ranks: [[0, 1], [1, 0]]), pair)
    with pytest.raises(ValueError, match=r"row 1 is .*; stochastic_gradient_push\(\) takes such a graph"):
        applied(mix(random_targets(seed=1)), bundles(normal(5)))


# ---------------------------------------------------------------------- behind the computation


def test_overlapped_gossip_is_the_paper_s() -> None:
    """x(k+1) = W x(k) - update(k): each rank's update is -(k + 1) · (rank + 1), all begin at one point."""
    ranks, start = 5, normal(1)[0]
    seen: list[int] = [0] * ranks

    async def move(port: Port, given: Bundle, state: None) -> tuple[Bundle, None]:
        seen[port.rank] += 1
        return given.map(lambda flat: flat + seen[port.rank] * (port.rank + 1.0)), None

    steps = chain(Transform(lambda parameters: None, move), overlapped(mix(exponential_graph)))
    histories = after_steps(steps, 6, bundles([start] * ranks))
    x = torch.stack([start] * ranks)
    own = torch.arange(1, ranks + 1, dtype=torch.float64).unsqueeze(1)
    for step in range(6):  # the mix of the common start is the start
        matrix = torch.eye(ranks) if step == 0 else torch.tensor(exponential_graph(step - 1, ranks))
        x = matrix.double() @ x + (step + 1) * own
        torch.testing.assert_close(torch.stack(at_step(histories, step)), x, rtol=1e-12, atol=1e-12)


def test_overlapped_gossip_hides_behind_the_computation() -> None:
    """Mixing takes about as long as computing on this network."""
    seconds = []
    for overlap in (False, True):
        result = simulate(digits, gossip(overlap=overlap), 4, SLOW, steps=12, batch_size=8)
        seconds.append(result.seconds)
    assert seconds[1] < 0.75 * seconds[0]
