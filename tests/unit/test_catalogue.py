"""The names in a text, and the command line's list of them."""

from __future__ import annotations

import json
from inspect import signature
from itertools import pairwise

import pytest

import polytempo as pt
from command_output import asking
from laws.catalogue import ROWS, Row
from laws.codecs import ROWS as CODEC_ROWS
from polytempo import federated, strategies
from polytempo.cli.look.strategies import described, source_in
from polytempo.core import Strategy
from polytempo.spec.text.call import parse_call
from polytempo.spec.text.catalogue import CODECS, NAMES, STRATEGIES, parse_cluster, parse_strategies, parse_strategy
from polytempo.spec.text.declaration import declared
from polytempo.spec.text.names import COMPARED
from polytempo.spec.text.resolution import signature_of


@pytest.mark.parametrize("name", strategies.__all__)
def test_every_strategy_can_be_named_and_has_a_paper(name: str) -> None:
    """Alone, with its defaults, and as it calls itself."""
    strategy = parse_strategy(name)
    assert isinstance(strategy, Strategy)
    assert parse_strategy(str(strategy)).name == strategy.name
    entry = described(name, STRATEGIES[name])
    assert entry.signature.startswith(f"{name}(")
    assert entry.summary.endswith(".")
    assert entry.source, f"write a paragraph 'Source: …' into the docstring of {name}"


LEFT_OUT = {
    **{name: {"scale"} for name in ("async_sgd", "backup_workers", "downpour", "ssp", "staleness_aware")},
    "async_diloco": {"scale", "momentum_every", "delay"},
    "co2": {"clip"},
    "dc_asgd": {"mean_square", "scale"},
    "decoupled_diloco": {"delay", "grace_s", "momentum_every"},
    "gossip": {"overlap"},
    "halos": {"delay"},
    "robust_sgd": {"momentum"},
    "sign_sgd": {"momentum", "scale"},
}
"""Later arguments with defaults that leave the strategy's name unchanged."""


@pytest.mark.parametrize("name", strategies.__all__)
def test_the_name_of_a_strategy_lists_all_its_arguments(name: str) -> None:
    """The signature's order, except for optional parts such as codecs."""
    listed = parse_call(str(STRATEGIES[name]())).keywords
    left_out = {"correction", "inner", "outer", "hierarchical", "activations", "gradients", "codec", "pull_codec"}
    left_out |= {"outer_optimizer"} if name == "robust_sgd" else {"outer_optimizer", "merge"}
    left_out |= LEFT_OUT.get(name, set())
    assert list(listed) == [key for key in signature(STRATEGIES[name]).parameters if key not in left_out]


@pytest.mark.parametrize(
    "text",
    [
        "sync_sgd(route=ring)",
        "sync_sgd(tree)",
        "sync_sgd(route=halving_doubling)",
        "sync_sgd(route=star)",
        "sync_sgd(route=hierarchical)",
        "sync_sgd(route=hierarchical(between=tree))",
        "gossip(graph=ring)",
        "gossip(graph=exponential_graph, period=2)",
        "gossip(graph=random_pairs(seed=3))",
        "gossip(graph=complete)",
        "robust_sgd(merge=median)",
        "robust_sgd(merge=trimmed_mean(cut=2))",
        "robust_sgd(merge=krum)",
        "robust_sgd(merge=nearest_to_median(wrong=2))",
        "robust_sgd(merge=centered_clip(tau=2.0), momentum=0.9)",
        "local_sgd(merge=median)",
        "robust_sgd(merge=vote)",
        "one_bit_sgd(route=all_gather)",
        "top_k_sgd(route=reduce_scatter)",
        "bf16_sgd(route=ring)",
    ],
)
def test_routes_graphs_and_merges_are_named(text: str) -> None:
    assert parse_strategy(text).name.startswith(text.partition("(")[0])


def test_a_list_of_strategies() -> None:
    """And the usual one, of at least six."""
    assert [each.name for each in parse_strategies("adasum, local_sgd(period=3)")] == [
        strategies.adasum().name,
        strategies.local_sgd(period=3).name,
    ]
    assert len(parse_strategies(None)) == len(parse_strategies(COMPARED)) >= 6


def test_clusters() -> None:
    """Links by the number; stragglers inside or beside; the name says both."""
    cluster = parse_cluster("ethernet(gbit_per_s=8)", "lognormal(sigma=0.3)")
    assert cluster.network.bytes_per_s == 1e9
    assert cluster.name == "ethernet(gbit_per_s=8), stragglers lognormal(sigma=0.3)"
    for text in ("one_host", "infiniband(workers_per_host=4)", "internet", "ethernet(stragglers=exponential)"):
        assert parse_cluster(text).name.startswith(text.partition("(")[0])


def test_the_source_is_a_paragraph() -> None:
    """The text from `Source:` to the next empty line, on one line."""
    assert source_in("What.\n\nSource: A. B,\n    2020.\n\nMore.") == "A. B, 2020."
    assert source_in("What.") == ""


def test_the_list_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    """One entry a strategy, a codec and a wire route; some names are both, so each says its kind."""
    entries = json.loads(asking("strategies", "--json")(capsys)[0])
    names = {
        kind: [entry["name"] for entry in entries if entry["kind"] == kind]
        for kind in ("strategy", "strategy of clients", "codec", "wire route")
    }
    assert names == {
        "strategy": [*sorted(strategies.__all__), "then"],
        "strategy of clients": [*sorted(federated.strategies.__all__), "private", "dp_sgd"],
        "codec": sorted(CODECS),
        "wire route": ["all_gather", "reduce_scatter"],
    }
    assert len(entries) == sum(map(len, names.values()))


def test_the_list_for_people(capsys: pytest.CaptureFixture[str]) -> None:
    """Paragraphs that fit, each beginning with how it is written; codecs and routes by their types."""
    lines = asking("strategies")(capsys)[0].splitlines()
    assert max(map(len, lines)) <= 120
    first = [line for before, line in pairwise(lines) if not before and not line.startswith(" ")]
    named = [
        *strategies.__all__,
        "then",
        *federated.strategies.__all__,
        "private",
        "dp_sgd",
        *CODECS,
        "all_gather",
        "reduce_scatter",
    ]
    assert len(first) == len(named) + 3 + 1  # three headings, the last lines
    merging = "codec: Codec = none, merge: Merge = none)"
    assert f"local_sgd(period: int | PeriodRule = 8, route: Route | WireRoute = native, {merging}" in first
    assert "bf16_sgd(route: Route | WireRoute = none)" in first
    assert "top_k(ratio: float = 0.01, entropy: bool = false)" in first
    assert lines[-2].startswith("route=… takes wire routes in acco, bf16_sgd, diloco, ")  # in two lines


@pytest.mark.parametrize("name", sorted(set(CODECS) - {"feedback"}))
def test_every_codec_can_be_named(name: str) -> None:
    takes = "downpour" if name == "dgc" else "local_sgd"
    strategy = parse_strategy(f"{takes}(codec={name})")
    assert f"codec={name}(" in strategy.name
    assert parse_strategy(strategy.name).name == strategy.name
    refused = {row.text[:-2] for row in CODEC_ROWS if row.diverges and row.text.endswith("()")} | {"dgc"}
    if name in refused:
        with pytest.raises(ValueError, match=f"{name}.*use it without feedback"):
            parse_strategy(f"local_sgd(codec=feedback({name}))")
    else:
        fed = parse_strategy(f"local_sgd(codec=feedback({name}))")
        assert parse_strategy(fed.name).name == fed.name


def test_the_package_offers_the_parser() -> None:
    """`pt.parse_strategy` and `str` are inverse to each other."""
    strategy = pt.parse_strategy("downpour(push_every=3, codec=feedback(top_k(0.01)), pull_codec=bf16)")
    assert str(pt.parse_strategy(str(strategy))) == str(strategy)
    with pytest.raises(ValueError, match=r"there is no strategy 'dovnpour' \(did you mean downpour\?\)"):
        pt.parse_strategy("dovnpour")


KINDS = ("strategies", "codecs", "wire_routes", "clusters", "stragglers")


def test_what_the_source_declares_is_what_an_import_gives() -> None:
    """So that a wrong name or argument can be refused before torch is imported, in the same words."""
    read = declared()
    for kind in KINDS:
        functions, declarations = getattr(NAMES, kind), getattr(read, kind)
        assert list(functions) == list(declarations)
        for name, function in functions.items():
            assert signature_of(declarations[name]) == signature_of(function)
    for argument, meanings in NAMES.arguments.items():
        assert list(read.arguments[argument]) == list(meanings)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.make().name)
def test_a_declaration_refuses_no_strategy_that_there_is(row: Row) -> None:
    declared().strategy(row.make().name)


@pytest.mark.parametrize(
    "text",
    [
        "local_sg",
        "local_sgd(perod=8)",
        "local_sgd(period=abc)",
        "local_sgd(period=true)",
        "local_sgd(8, period=8)",
        "sync_sgd(route=rign)",
        "sync_sgd(route=hierarchical(betwen=ring))",
        "gossip(graph=ring(3))",
        "top_k",
        "low_rank(rank=2)",
        "local_sgd(codec=top_k(ratio=much))",
        "local_sgd(codec=feedback)",
        "downpour(codec=feedback(codec=top_kk))",
        "softsync(scale=3)",
        "local_sgd(period=",
        "adasum(of=updates)",
    ],
)
def test_a_declaration_refuses_in_the_words_of_the_function(text: str) -> None:
    with pytest.raises(ValueError, match=r".") as refused:
        parse_strategy(text)
    with pytest.raises(ValueError, match=r".") as early:
        declared().strategy(text)
    assert str(early.value) == str(refused.value)
