"""Names that a call may use, by argument.

Where the functions come from is the caller's matter: `spec.text.catalogue` imports them, and with them torch;
`spec.text.declaration` reads their signatures from the source, which is enough to refuse a wrong name immediately.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping
from typing import NamedTuple

from polytempo.spec.text.call import Call, parse_call
from polytempo.spec.text.resolution import Factory, Function, resolve

BUSY = "busy"
"""The stragglers that were measured while other programs computed: no name of a distribution."""
COMPARED = "sync_sgd, sync_sgd(route=ring), local_sgd(period=8), diloco(period=16), gossip, delayed_sgd, adasum"
"""The strategies of a `compare` that names none."""
NO_CODECS = frozenset(
    {"all_gather", "delta", "differences", "masked", "moved_through", "recv", "reduce_scatter", "send", "through"}
)
"""Names in `compression` that are not codecs."""

_ROUTES = ("native", "ring", "tree", "halving_doubling", "star")
_OUTER_OPTIMIZERS = ("nesterov", "heavy_ball", "adam", "schedule_free", "delayed_nesterov")
_MERGES = ("trimmed_mean", "krum", "multi_krum", "nearest_to_median", "bulyan", "centered_clip")
_PERIOD_RULES = ("growing", "by_rate", "by_time", "by_loss", "by_variance")
_WIRE_ROUTES = ("all_gather", "reduce_scatter")
SCHEDULED = {
    "lasso": ("correlated", "table"),
    "logistic": ("correlated_classes", "classes"),
    "factorization": ("drawn_ratings", "word_counts"),
    "lda": ("drawn_documents", "scenes"),
}
"""Scheduled programs, and the data that each can learn from; the first is the default."""

_CLUSTERS = ("bucket", "ethernet", "infiniband", "internet", "one_host")
_STRAGGLERS = (
    *("constant", "uniform", "exponential", "lognormal", "occasional", "slow_host"),
    *("correlated", "slow_spells"),
)

Load = Callable[[str], Mapping[str, Function]]
"""The public functions of a folder, by name: `load("compression")["top_k"]`."""


class Names(NamedTuple):
    """Functions by the names that a call may use."""

    strategies: Mapping[str, Function]
    codecs: Mapping[str, Function]
    wire_routes: Mapping[str, Function]
    """Routes for wires that cannot be summed."""
    clusters: Mapping[str, Function]
    stragglers: Mapping[str, Function]
    low_rank: Function
    invariant: Function
    """The route that `sync_sgd` alone can take: it says how gradients are computed, too."""
    scheduled: Mapping[str, Function]
    """Programs of scheduled model parallelism."""
    then: Function
    """A strategy after another one."""
    federated: Mapping[str, Function]
    """Strategies of rounds of clients."""
    private: Mapping[str, Function]
    """The functions that make strategies private."""
    partitions: Mapping[str, Function]
    """Partitions of data over clients."""
    samplings: Mapping[str, Function]
    """Rules that draw a round's clients."""
    scheduled_data: Mapping[str, Function]
    """Data that programs learn from."""
    arguments: Mapping[str, Mapping[str, object]]
    """The meaning of names, by argument, such as `codec`."""

    def strategy(self, text: str) -> object:
        """The answer of the strategy's function to the call `text`. `ValueError` for wrong names and arguments."""
        call = parse_call(text)
        if call.name == "then":
            return self._then(call)
        if call.name not in self.strategies and call.name in {"low_rank", *self.codecs}:
            raise ValueError(self._no_strategy(call.name))
        arguments = self.arguments
        if call.name in self.strategies:
            arguments = {**arguments, "route": self.routes_of(self.strategies[call.name])}
            if "inner" in inspect.signature(self.strategies[call.name]).parameters:
                inner = {name: Factory(function) for name, function in self.strategies.items()}
                arguments |= {"inner": inner, "route": {**self.arguments["route"], **self.wire_routes}}
        of_clients = {**self.federated, **self.private}
        if call.name in of_clients:
            arguments = {**arguments, "inner": {name: Factory(function) for name, function in of_clients.items()}}
        return resolve(call, {**self.strategies, **of_clients}, arguments, what="strategy")

    def _then(self, call: Call) -> object:
        """A strategy after another one: two of the three arguments are calls of strategies."""
        try:
            given = inspect.signature(self.then).bind(*call.positional, **call.keywords).arguments
        except TypeError as error:
            raise ValueError(f"{call!r}: {error}; it is written then(downpour(), 2000, sync_sgd())") from None
        return self.then(**given | {name: self.strategy(str(given[name])) for name in ("first", "second")})

    def codec(self, text: str) -> object:
        """The answer of a codec's function, or of `low_rank`, to the call `text`."""
        inner = {name: Factory(function) for name, function in self.codecs.items() if name != "feedback"}
        return resolve(parse_call(text), {**self.codecs, "low_rank": self.low_rank}, {"codec": inner}, what="codec")

    def cluster(self, text: str) -> object:
        """The answer of the cluster's function to the call `text`."""
        return resolve(parse_call(text), self.clusters, self.arguments, what="cluster")

    def distribution(self, text: str) -> object:
        """The answer of the straggler distribution's function to the call `text`."""
        return resolve(parse_call(text), self.stragglers, self.arguments, what="straggler distribution")

    def partition(self, text: str) -> object:
        """The answer of a partition's function to the call `text`."""
        return resolve(parse_call(text), self.partitions, {}, what="partition of clients")

    def sampling(self, text: str) -> object:
        """The answer of the function of a rule of sampling to the call `text`; `both` takes two rules."""
        rules = {name: Factory(function) for name, function in self.samplings.items()}
        return resolve(parse_call(text), self.samplings, {"first": rules, "second": rules}, what="sampling of clients")

    def program(self, text: str) -> object:
        """The answer of a scheduled program's function to the call `text`."""
        return resolve(parse_call(text), self.scheduled, {}, what="program")

    def data_of_program(self, program: str, text: str | None) -> object:
        """The data of a scheduled program: the answer to the call `text`."""
        ours = SCHEDULED[parse_call(program).name]
        functions = {name: self.scheduled_data[name] for name in ours}
        return resolve(parse_call(text or ours[0]), functions, {}, what=f"data of {parse_call(program).name}")

    def routes_of(self, function: Function) -> Mapping[str, object]:
        """Routes that a strategy's `route` can name, by its type: a `WireRoute` carries any wires.

        Where there are paths, all routes are named: `through` refuses impossible ones, and says why.
        """
        if function is self.strategies.get("sync_sgd"):
            return {**self.arguments["route"], "invariant": Factory(self.invariant)}
        parameter = inspect.signature(function).parameters.get("route")
        takes_wires = parameter is not None and "WireRoute" in re.findall(r"\w+", str(parameter.annotation))
        return {**self.arguments["route"], **self.wire_routes} if takes_wires else self.arguments["route"]

    def _no_strategy(self, name: str) -> str:
        """A remedy for a codec, or low_rank, in the place of a strategy."""
        if name == "low_rank":
            return "low_rank is the codec of power_sgd; write power_sgd(rank=2)"
        recipe = f"{name}_sgd, or " if f"{name}_sgd" in self.strategies else ""
        written = "feedback(top_k)" if name == "feedback" else name
        return f"{name} is a codec, not a strategy; write {recipe}local_sgd(codec={written})"


def names(load: Load) -> Names:
    """All names, with the functions that `load` has for them."""
    compression, clusters = load("compression"), load("cluster")
    codecs = {name: compression[name] for name in sorted(compression) if name not in NO_CODECS}
    made_codecs = {name: Factory(function) for name, function in codecs.items()}
    stragglers = {name: clusters[name] for name in _STRAGGLERS}
    strategies = load("strategies")
    aggregation, schedules = load("aggregation"), load("partition.schedules")
    rules = load("synchronization")
    scales = load("server.rules.staleness")
    scheduled, partitions = load("partition.scheduled"), load("federated.partitions")
    return Names(
        strategies={name: strategies[name] for name in sorted(strategies)},
        codecs=codecs,
        wire_routes={name: compression[name] for name in _WIRE_ROUTES},
        clusters={name: clusters[name] for name in _CLUSTERS},
        stragglers=stragglers,
        low_rank=aggregation["low_rank"],
        invariant=load("collectives")["invariant"],
        scheduled={name: scheduled[name] for name in SCHEDULED},
        then=load("spec.then")["then"],
        federated=load("federated.strategies"),
        private={**load("federated.privacy"), **load("federated.sample_privacy")},
        partitions={name: partitions[name] for name in partitions if name != "by"},
        samplings=load("federated.sampling"),
        scheduled_data=load("data.scheduled"),
        arguments={
            **_arguments(load("collectives"), aggregation, made_codecs, stragglers),
            "period": {name: Factory(rules[name]) for name in _PERIOD_RULES},
            "pull_codec": {**made_codecs, "delta": Factory(compression["delta"])},
            "correction": {name: Factory(schedules[name]) for name in ("pipemare", "spectrain")},
            "scale": {
                **{name: name for name in ("constant", "inverse")},
                **{name: Factory(scales[name]) for name in ("power", "gate")},
            },
        },
    )


def _arguments(
    collectives: Mapping[str, Function],
    aggregation: Mapping[str, Function],
    codecs: Mapping[str, Factory],
    stragglers: Mapping[str, Function],
) -> Mapping[str, Mapping[str, object]]:
    distributions = {name: Factory(function) for name, function in stragglers.items()}
    routes: Mapping[str, object] = {
        **{name: collectives[name] for name in _ROUTES},
        "hierarchical": Factory(collectives["hierarchical"]),
    }
    graphs: Mapping[str, object] = {
        "ring": aggregation["ring_graph"],
        "exponential": aggregation["exponential_graph"],
        **{name: aggregation[name] for name in ("ring_graph", "exponential_graph", "complete")},
        **{name: Factory(aggregation[name]) for name in ("random_pairs", "random_targets")},
    }
    merges: Mapping[str, object] = {
        **{name: aggregation[name] for name in ("median", "vote")},
        **{name: Factory(aggregation[name]) for name in _MERGES},
    }
    return {
        "codec": codecs,
        "activations": codecs,
        "gradients": codecs,
        "route": routes,
        "between": routes,
        "graph": graphs,
        "merge": merges,
        "stragglers": distributions,
        "others": distributions,
        "outer_optimizer": {name: Factory(aggregation[name]) for name in _OUTER_OPTIMIZERS},
    }
