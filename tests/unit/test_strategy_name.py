"""How strategies are spelled: as the command line reads them, so that ranks can compare names."""

from __future__ import annotations

from functools import partial

import pytest

from polytempo import strategies
from polytempo.aggregation import exponential, krum, random_pairs, trimmed_mean
from polytempo.collectives import halving_doubling, hierarchical, native, ring, star, tree
from polytempo.core import Strategy, identity, spelled


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        (spelled("adasum"), "adasum()"),
        (spelled("local_sgd", period=8), "local_sgd(period=8)"),
        (spelled("f", a=0.5, b=True, c=None, d="text"), "f(a=0.5, b=True, c=None, d='text')"),
        (spelled("sync_sgd", route=ring), "sync_sgd(route=ring)"),
        (spelled("outer", route=hierarchical(tree)), "outer(route=hierarchical(between=tree))"),
        (
            spelled("outer", route=hierarchical(hierarchical(star))),
            "outer(route=hierarchical(between=hierarchical(between=star)))",
        ),
        (spelled("gossip", graph=random_pairs(seed=3)), "gossip(graph=random_pairs(seed=3))"),
        (spelled("robust_sgd", merge=trimmed_mean(cut=2)), "robust_sgd(merge=trimmed_mean(cut=2))"),
        (spelled("robust_sgd", merge=krum(wrong=1)), "robust_sgd(merge=krum(wrong=1))"),
    ],
)
def test_spelled(written: str, expected: str) -> None:
    assert written == expected


def test_the_routes_go_by_the_names_of_the_command_line() -> None:
    assert [route.__name__ for route in (native, ring, tree, halving_doubling, star)] == [
        "native",
        "ring",
        "tree",
        "halving_doubling",
        "star",
    ]
    assert hierarchical().__name__ == "hierarchical(between=ring)"


@pytest.mark.parametrize(
    ("strategy", "expected"),
    [
        (strategies.sync_sgd(ring), "sync_sgd(route=ring)"),
        (strategies.local_sgd(4), "local_sgd(period=4, route=native)"),
        (
            strategies.diloco(period=20, route=tree),
            "diloco(period=20, outer_lr=0.7, outer_momentum=0.9, route=tree)",
        ),
        (strategies.gossip(exponential), "gossip(graph=exponential, period=1)"),
        (strategies.robust_sgd(krum(2)), "robust_sgd(merge=krum(wrong=2))"),
    ],
)
def test_strategies_write_out_every_argument(strategy: Strategy, expected: str) -> None:
    assert str(strategy) == strategy.name == expected


def test_a_function_without_a_name_is_written_without_its_address_which_ranks_cannot_compare() -> None:
    assert spelled("f", route=partial(int, base=2)) == "f(route=functools.partial(<class 'int'>, base=2))"


def test_a_strategy_does_nothing_unless_told() -> None:
    strategy = Strategy("plain")
    assert (strategy.gradients, strategy.parameters) == (identity(), identity())
    assert strategy.synchronized
    assert not strategy.carries_optimizer
