"""What a text can name: strategies, codecs, routes, graphs, merges, clusters, straggler distributions."""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import cast

from polytempo import aggregation, collectives, compression, strategies
from polytempo.cluster import (
    Cluster,
    Stragglers,
    constant,
    ethernet,
    exponential,
    infiniband,
    internet,
    lognormal,
    occasional,
    one_host,
    slow_host,
    uniform,
)
from polytempo.core import Strategy
from polytempo.spec.call import parse_call, split_calls
from polytempo.spec.resolution import Factory, Function, resolve

COMPARED = "sync_sgd, sync_sgd(route=ring), local_sgd(period=8), diloco(period=16), gossip, delayed_sgd, adasum"
"""The strategies of a `compare` that is not told which."""

STRATEGIES: Mapping[str, Function] = {name: getattr(strategies, name) for name in sorted(strategies.__all__)}

NO_CODECS = frozenset({"all_gather", "moved_through", "recv", "reduce_scatter", "send", "through"})
"""What `compression` has besides codecs."""

CODECS: Mapping[str, Function] = {
    name: getattr(compression, name) for name in sorted(compression.__all__) if name not in NO_CODECS
}
WAYS: Mapping[str, Function] = {"all_gather": compression.all_gather, "reduce_scatter": compression.reduce_scatter}
"""On which wires meet that cannot be summed."""

_CODECS = {name: Factory(function) for name, function in CODECS.items()}
_ROUTES: Mapping[str, object] = {
    "native": collectives.native,
    "ring": collectives.ring,
    "tree": collectives.tree,
    "halving_doubling": collectives.halving_doubling,
    "star": collectives.star,
    "hierarchical": Factory(collectives.hierarchical),
}
_GRAPHS: Mapping[str, object] = {
    "ring": aggregation.ring_graph,
    "ring_graph": aggregation.ring_graph,
    "exponential": aggregation.exponential,
    "complete": aggregation.complete,
    "random_pairs": Factory(aggregation.random_pairs),
}
_MERGES: Mapping[str, object] = {
    "median": aggregation.median,
    "trimmed_mean": Factory(aggregation.trimmed_mean),
    "krum": Factory(aggregation.krum),
    "vote": aggregation.vote,
}
_CLUSTERS: Mapping[str, Function] = {
    "ethernet": ethernet,
    "infiniband": infiniband,
    "internet": internet,
    "one_host": one_host,
}
_STRAGGLERS: Mapping[str, Function] = {
    "constant": constant,
    "uniform": uniform,
    "exponential": exponential,
    "lognormal": lognormal,
    "occasional": occasional,
    "slow_host": slow_host,
}
_DISTRIBUTIONS = {name: Factory(function) for name, function in _STRAGGLERS.items()}
_NAMES: Mapping[str, Mapping[str, object]] = {
    "codec": _CODECS,
    "pull_codec": _CODECS,
    "route": _ROUTES,
    "between": _ROUTES,
    "graph": _GRAPHS,
    "merge": _MERGES,
    "stragglers": _DISTRIBUTIONS,
    "others": _DISTRIBUTIONS,
}


def parse_strategy(text: str) -> Strategy:
    """The strategy that a text describes, as the command line and files of options write it.

        pt.parse_strategy("local_sgd(period=8, route=ring)")

    `str(strategy)` is such a text: `parse_strategy(str(strategy))` makes the same strategy again, in any process.
    Nothing in the text is evaluated as Python.

    Errors: ValueError where there is no such strategy, codec, route, … or argument; it lists those that there are.
    """
    call = parse_call(text)
    if call.name not in STRATEGIES and call.name in {"low_rank", *CODECS}:
        raise ValueError(_no_strategy(call.name))
    names = {**_NAMES, "route": routes_of(STRATEGIES[call.name])} if call.name in STRATEGIES else _NAMES
    strategy = resolve(call, STRATEGIES, names, what="strategy")
    assert isinstance(strategy, Strategy)
    return strategy


def _no_strategy(name: str) -> str:
    """What to write for those who name a codec, or low_rank, where a strategy is needed."""
    if name == "low_rank":
        return "low_rank is what power_sgd does to gradients; write power_sgd(rank=2)"
    recipe = f"{name}_sgd, or " if f"{name}_sgd" in STRATEGIES else ""
    written = "feedback(top_k)" if name == "feedback" else name
    return f"{name} is a codec, not a strategy; write {recipe}local_sgd(codec={written})"


def routes_of(function: Function) -> Mapping[str, object]:
    """What a strategy's `route` can name, by its type: a `Path` carries any wires.

    Where there are paths, all routes are named: those that cannot be are refused by `through`, which says why.
    """
    parameter = inspect.signature(function).parameters.get("route")
    takes_paths = parameter is not None and "Path" in re.findall(r"\w+", str(parameter.annotation))
    return {**_ROUTES, **WAYS} if takes_paths else _ROUTES


def parse_strategies(text: str | None) -> list[Strategy]:
    """The strategies of a list with commas, or the usual ones to compare."""
    return [parse_strategy(each) for each in split_calls(text or COMPARED)]


def parse_cluster(text: str, stragglers: str | None = None) -> Cluster:
    """The cluster that `text` spells, such as `ethernet(gbit_per_s=10)`, with the straggler distribution given."""
    cluster = resolve(parse_call(text), _CLUSTERS, _NAMES, what="cluster")
    assert isinstance(cluster, Cluster)
    if stragglers is None:
        return cluster
    distribution = resolve(parse_call(stragglers), _STRAGGLERS, _NAMES, what="straggler distribution")
    return replace(cluster, stragglers=cast(Stragglers, distribution), name=f"{cluster.name}, stragglers {stragglers}")
