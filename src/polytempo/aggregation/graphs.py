"""Partners of gossip. A graph gives each step's mixing matrix: doubly stochastic, or for pushes by columns alone."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import lru_cache
from random import Random
from typing import Any, NamedTuple

from polytempo.core import call_name

Weights = Sequence[list[float]]
"""A matrix by its rows."""

Graph = Callable[[int, int], Weights]
"""`(step, num_ranks) -> W`: rank i's new value is Σⱼ W[i][j] · xⱼ."""


class Neighbours(NamedTuple):
    """The weights of one step that are not zero."""

    sources: Sequence[Mapping[int, float]]
    """Weights Wᵢⱼ of each rank i, by rank j in the order of ranks; j = i is among them."""
    listeners: Sequence[Sequence[int]]
    """The other ranks that receive from each rank j."""


class SparseWeights(Sequence[list[float]]):
    """A matrix by the entries of each row that are not zero. A row is made on request."""

    def __init__(self, rows: Sequence[Mapping[int, float]]) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, rank: Any) -> Any:
        if isinstance(rank, slice):
            return [self[i] for i in range(*rank.indices(len(self)))]
        near = self.rows[rank]
        return [near.get(j, 0.0) for j in range(len(self))]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]


def equal_shares(peers: Iterable[Collection[int]]) -> SparseWeights:
    """The matrix with equal parts of each rank's `peers`."""
    return SparseWeights([dict.fromkeys(sorted(near), 1 / len(near)) for near in peers])


def neighbours(weights: Weights) -> Neighbours:
    """The weights that are not zero."""
    listeners: list[list[int]] = [[] for _ in range(len(weights))]
    if isinstance(weights, SparseWeights):
        sources = weights.rows
    else:
        sources = [{j: weight for j, weight in enumerate(row) if weight} for row in weights]
    for rank, found in enumerate(sources):
        for source in found:
            if source != rank:
                listeners[source].append(rank)
    return Neighbours(sources, listeners)


def ring_graph(step: int, num_ranks: int) -> Weights:
    """Each rank and its two neighbours, a third each (a half each for two ranks)."""
    return equal_shares({rank, (rank - 1) % num_ranks, (rank + 1) % num_ranks} for rank in range(num_ranks))


def complete(step: int, num_ranks: int) -> Weights:
    """Every rank with every rank: the exact mean."""
    return SparseWeights([dict.fromkeys(range(num_ranks), 1 / num_ranks)] * num_ranks)


def exponential_graph(step: int, num_ranks: int) -> Weights:
    """One peer a step: at step t rank i halves with rank i + 2^(t mod ⌈log₂N⌉).

    Reaches the exact mean in log₂N steps where N is a power of two.
    Source: M. Assran et al., "Stochastic gradient push", 2019; B. Ying et al., "Exponential graph is
    provably efficient for decentralized deep training", 2021.
    """
    rounds = max(1, (num_ranks - 1).bit_length())
    hop = 1 << (step % rounds)
    return equal_shares({rank, (rank + hop) % num_ranks} for rank in range(num_ranks))


def random_pairs(seed: int = 0) -> Graph:
    """A fresh random pairing each step; one rank sits out where their number is odd.

    Source: S. Boyd et al., "Randomized gossip algorithms", 2006.
    """

    def graph(step: int, num_ranks: int) -> Weights:
        order = list(range(num_ranks))
        Random(f"{seed}/{step}").shuffle(order)
        peers = [{rank} for rank in range(num_ranks)]
        for a, b in zip(order[::2], order[1::2], strict=False):
            peers[a].add(b)
            peers[b].add(a)
        return equal_shares(peers)

    graph.__name__ = call_name(random_pairs, locals())
    return graph


def random_targets(seed: int = 0) -> Graph:
    """Each rank keeps a half and sends a half to another rank, drawn in each step: a graph for pushes.

    Columns sum to 1, rows do not: several may send to one rank, and none to another.
    Source: D. Kempe, A. Dobra and J. Gehrke, "Gossip-based computation of aggregate information", 2003 (push-sum).
    """

    def graph(step: int, num_ranks: int) -> Weights:
        random = Random(f"{seed}/{step}")
        rows: list[dict[int, float]] = [{} for _ in range(num_ranks)]
        for rank in range(num_ranks):
            target = (rank + random.randrange(1, num_ranks)) % num_ranks if num_ranks > 1 else 0
            for to in (rank, target):
                rows[to][rank] = rows[to].get(rank, 0.0) + 0.5
        return SparseWeights(rows)

    graph.__name__ = call_name(random_targets, locals())
    return graph


def check_graph(given: object) -> None:
    """Raise TypeError for anything but a graph: a name, `random_pairs` without ()."""
    try:
        inspect.signature(given).bind(0, 1)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        name = getattr(given, "__name__", repr(given))
        raise TypeError(
            f"a graph takes a step and a number of ranks, and {name} does not; use one of pt.aggregation, such as "
            "exponential_graph or random_pairs()"
        ) from None


@lru_cache(maxsize=16)
def mixing_neighbours(graph: Graph, step: int, num_ranks: int) -> Neighbours:
    """The checked weights of one step. Kept for a while: the ranks of a virtual world all ask for the same."""
    weights = graph(step, num_ranks)
    if not isinstance(weights, SparseWeights):
        return neighbours(checked(weights, num_ranks))
    found = neighbours(_square(weights, num_ranks))
    sums = [sum(row.values()) for row in found.sources] + _column_sums(found)
    least = min((weight for row in found.sources for weight in row.values()), default=0.0)
    right = least >= 0 and all(abs(each - 1) <= 1e-9 for each in sums)
    return found if right else neighbours(checked(weights, num_ranks))


@lru_cache(maxsize=16)
def pushing_neighbours(graph: Graph, step: int, num_ranks: int) -> Neighbours:
    """The checked weights of a directed graph: columns sum to 1, and each rank keeps a part of its own."""
    found = neighbours(_square(graph(step, num_ranks), num_ranks))
    negative = {source for row in found.sources for source, weight in row.items() if weight < 0}
    for i, total in enumerate(_column_sums(found)):
        if abs(total - 1) > 1e-9 or i in negative:
            raise ValueError(f"the columns of a graph for pushes must sum to 1, but column {i} is {_column(found, i)}")
        if i not in found.sources[i]:
            raise ValueError(f"each rank must keep a part of its own, but column {i} is {_column(found, i)}")
    return found


def _column_sums(found: Neighbours) -> list[float]:
    sums = [0.0] * len(found.sources)
    for row in found.sources:
        for source, weight in row.items():
            sums[source] += weight
    return sums


def _column(found: Neighbours, i: int) -> list[float]:
    return [row.get(i, 0) for row in found.sources]


def checked(weights: Weights, num_ranks: int) -> Weights:
    """`weights`, or a ValueError where a row or column does not sum to 1 or an entry is negative.

    Rows that sum to 1 keep an agreement; columns that sum to 1 keep the mean over ranks.
    """
    columns = [list(column) for column in zip(*_square(weights, num_ranks), strict=True)]
    hint = "; stochastic_gradient_push() takes such a graph" if all(map(_sums_to_one, columns)) else ""
    for kind, lines in (("row", weights), ("column", columns)):
        for i, line in enumerate(lines):
            if not _sums_to_one(line):
                raise ValueError(f"gossip weights must be doubly stochastic, but {kind} {i} is {line}{hint}")
    return weights


def _square(weights: Weights, num_ranks: int) -> Weights:
    if len(weights) != num_ranks or (
        not isinstance(weights, SparseWeights) and any(len(row) != num_ranks for row in weights)
    ):
        raise ValueError(f"a graph for {num_ranks} ranks must give a {num_ranks}x{num_ranks} matrix")
    return weights


def _sums_to_one(line: Sequence[float]) -> bool:
    return abs(sum(line) - 1) <= 1e-9 and min(line) >= 0
