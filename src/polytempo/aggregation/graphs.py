"""Who gossips with whom. A graph gives each step's mixing matrix, which must be doubly stochastic."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from random import Random

from polytempo.core import call_name

Graph = Callable[[int, int], list[list[float]]]
"""`(step, num_ranks) -> W`: rank i's new value is Σⱼ W[i][j] · xⱼ."""


def ring_graph(step: int, num_ranks: int) -> list[list[float]]:
    """Each rank and its two neighbours, a third each (a half each for two ranks)."""
    return _uniform([{rank, (rank - 1) % num_ranks, (rank + 1) % num_ranks} for rank in range(num_ranks)])


def complete(step: int, num_ranks: int) -> list[list[float]]:
    """Every rank with every rank: the exact mean."""
    return _uniform([set(range(num_ranks))] * num_ranks)


def exponential_graph(step: int, num_ranks: int) -> list[list[float]]:
    """One peer a step: at step t rank i halves with rank i + 2^(t mod ⌈log₂N⌉).

    Reaches the exact mean in log₂N steps where N is a power of two.
    Source: M. Assran et al., "Stochastic gradient push", 2019; B. Ying et al., "Exponential graph is
    provably efficient for decentralized deep training", 2021.
    """
    rounds = max(1, (num_ranks - 1).bit_length())
    hop = 1 << (step % rounds)
    return _uniform([{rank, (rank + hop) % num_ranks} for rank in range(num_ranks)])


def random_pairs(seed: int = 0) -> Graph:
    """A fresh random pairing each step; one rank sits out where their number is odd.

    Source: S. Boyd et al., "Randomized gossip algorithms", 2006.
    """

    def graph(step: int, num_ranks: int) -> list[list[float]]:
        order = list(range(num_ranks))
        Random(f"{seed}/{step}").shuffle(order)
        peers = [{rank} for rank in range(num_ranks)]
        for a, b in zip(order[::2], order[1::2], strict=False):
            peers[a].add(b)
            peers[b].add(a)
        return _uniform(peers)

    graph.__name__ = call_name(random_pairs, locals())
    return graph


@lru_cache(maxsize=16)
def mixing_matrix(graph: Graph, step: int, num_ranks: int) -> list[list[float]]:
    """The checked weights of one step. Kept for a while: the ranks of a virtual world all ask for the same."""
    return checked(graph(step, num_ranks), num_ranks)


def checked(weights: list[list[float]], num_ranks: int) -> list[list[float]]:
    """`weights`, or a ValueError where a row or column does not sum to 1 or an entry is negative.

    Rows that sum to 1 keep an agreement; columns that sum to 1 keep the mean over ranks.
    """
    if len(weights) != num_ranks or any(len(row) != num_ranks for row in weights):
        raise ValueError(f"a graph for {num_ranks} ranks must give a {num_ranks}x{num_ranks} matrix")
    columns = [list(column) for column in zip(*weights, strict=True)]
    for kind, lines in (("row", weights), ("column", columns)):
        for i, line in enumerate(lines):
            if abs(sum(line) - 1) > 1e-9 or min(line) < 0:
                raise ValueError(f"gossip weights must be doubly stochastic, but {kind} {i} is {line}")
    return weights


def _uniform(peers: list[set[int]]) -> list[list[float]]:
    return [[1 / len(near) if j in near else 0.0 for j in range(len(peers))] for near in peers]
