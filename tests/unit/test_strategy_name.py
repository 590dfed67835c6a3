"""The names of strategies and codecs: calls, which the parser reads again and ranks compare."""

from __future__ import annotations

from functools import partial

import pytest

from polytempo import strategies
from polytempo.aggregation import exponential_graph, krum, random_pairs, trimmed_mean
from polytempo.collectives import halving_doubling, hierarchical, native, ring, star, tree
from polytempo.compression import dgc, int8, prune, random_k, threshold, top_k
from polytempo.core import Codec, Strategy, call_name, identity
from polytempo.core.calls.call_name import written_call
from polytempo.spec.text.call import parse_call
from polytempo.spec.text.catalogue import CODECS
from polytempo.spec.text.resolution import resolve


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        (written_call("adasum", {}), "adasum()"),
        (written_call("local_sgd", {"period": 8}), "local_sgd(period=8)"),
        (written_call("f", {"a": 0.5, "b": True, "c": None, "d": "text"}), "f(a=0.5, b=True, c=None, d='text')"),
        (written_call("sync_sgd", {"route": ring}), "sync_sgd(route=ring)"),
        (written_call("outer", {"route": hierarchical(tree)}), "outer(route=hierarchical(between=tree))"),
        (
            written_call("outer", {"route": hierarchical(hierarchical(star))}),
            "outer(route=hierarchical(between=hierarchical(between=star)))",
        ),
        (written_call("gossip", {"graph": random_pairs(seed=3)}), "gossip(graph=random_pairs(seed=3))"),
        (written_call("robust_sgd", {"merge": trimmed_mean(cut=2)}), "robust_sgd(merge=trimmed_mean(cut=2))"),
        (written_call("robust_sgd", {"merge": krum(wrong=1)}), "robust_sgd(merge=krum(wrong=1))"),
    ],
)
def test_a_call_as_a_person_writes_it(written: str, expected: str) -> None:
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
            "diloco(period=20, outer_lr=0.7, outer_momentum=0.5, route=tree)",
        ),
        (strategies.gossip(exponential_graph), "gossip(graph=exponential_graph, period=1)"),
        (strategies.robust_sgd(krum(2)), "robust_sgd(merge=krum(wrong=2))"),
    ],
)
def test_strategies_write_out_every_argument(strategy: Strategy, expected: str) -> None:
    assert str(strategy) == strategy.name == expected


def test_a_function_without_a_name_is_written_without_its_address_which_ranks_cannot_compare() -> None:
    assert written_call("f", {"route": partial(int, base=2)}) == "f(route=functools.partial(<class 'int'>, base=2))"


def test_a_strategy_does_nothing_unless_told() -> None:
    strategy = Strategy("plain")
    assert (strategy.gradients, strategy.parameters) == (identity(), identity())
    assert strategy.synchronized
    assert not strategy.carries_optimizer


def test_a_call_lists_the_arguments_of_the_signature_and_nothing_else() -> None:
    """The signature's order; missing codecs and `brief` names are left out."""

    def recipe(period: int = 8, codec: object = None, seed: int = 0) -> str:
        twice = 2 * period
        assert twice
        return call_name(recipe, locals())

    def short(period: int = 8, seed: int = 0) -> str:
        return call_name(short, locals(), brief=("seed",))

    assert recipe() == "recipe(period=8, seed=0)"
    assert recipe(3, codec=int8()) == "recipe(period=3, codec=int8(block=256), seed=0)"
    assert (short(), short(seed=1)) == ("short(period=8)", "short(period=8, seed=1)")


@pytest.mark.parametrize(
    ("codec", "name"),
    [
        (prune(1.0), "prune(below=1)"),
        (top_k(0.1, entropy=True), "top_k(ratio=0.1, entropy=True)"),
        (random_k(0.012345678, unbiased=True, seed=3), "random_k(ratio=0.012345678, unbiased=True, seed=3)"),
        (threshold(0.5, density=0.25), "threshold(tau=0.5, density=0.25)"),
        (dgc(clip=1, sample=0.5, dense_below=1), "dgc(ratio=0.001, momentum=0.9, clip=1, sample=0.5, dense_below=1)"),
    ],
)
def test_a_codec_is_named_by_its_call_which_makes_it_again(codec: Codec, name: str) -> None:
    assert codec.facts.name == name
    assert resolve(parse_call(name), CODECS, {}) == codec
