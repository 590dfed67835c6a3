"""Objects from text: strategies, codecs, routes, graphs, merges, clusters, straggler distributions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import cast

from polytempo import aggregation, cluster, collectives, compression, strategies, synchronization
from polytempo.cluster import Cluster, Stragglers
from polytempo.cluster.cluster_file import read_cluster
from polytempo.core import Codec, Strategy
from polytempo.data import scheduled as scheduled_data
from polytempo.federated import partitions, privacy, sample_privacy, sampling
from polytempo.federated import strategies as federated_strategies
from polytempo.federated.partitions import Partition
from polytempo.federated.sampling import Sampling
from polytempo.partition import scheduled, schedules
from polytempo.server.rules import staleness
from polytempo.spec import then as then_module
from polytempo.spec.text.call import split_calls
from polytempo.spec.text.names import BUSY, COMPARED, names
from polytempo.spec.text.resolution import Function

_FOLDERS = {module.__name__.rpartition(".")[2]: module for module in (aggregation, cluster, collectives, compression)}
_FOLDERS |= {
    "synchronization": synchronization,
    "strategies": strategies,
    "partition.schedules": schedules,
    "server.rules.staleness": staleness,
}
_FOLDERS |= {"federated.partitions": partitions, "federated.strategies": federated_strategies}
_FOLDERS |= {"federated.privacy": privacy, "federated.sample_privacy": sample_privacy, "federated.sampling": sampling}
_FOLDERS |= {"partition.scheduled": scheduled, "data.scheduled": scheduled_data, "spec.then": then_module}


def _imported(folder: str) -> Mapping[str, Function]:
    module = _FOLDERS[folder]
    return {name: getattr(module, name) for name in module.__all__}


NAMES = names(_imported)
STRATEGIES, CODECS, WIRE_ROUTES = NAMES.strategies, NAMES.codecs, NAMES.wire_routes


def parse_strategy(text: str) -> Strategy:
    """The strategy that a text describes, as the command line and files of options write it.

        pt.parse_strategy("local_sgd(period=8, route=ring)")

    `str(strategy)` is such a text: `parse_strategy(str(strategy))` makes the same strategy again, in any process.
    Nothing in the text is evaluated as Python.

    Errors: ValueError where there is no such strategy, codec, route, … or argument; it lists the existing names.
    """
    strategy = NAMES.strategy(text)
    assert isinstance(strategy, Strategy)
    return strategy


def strategy_from(given: Strategy | str) -> Strategy:
    """A strategy that is given as it is or as text: ssp(), "ssp", "ssp(bound=2)".

    Errors: ValueError for wrong text; TypeError for anything else, such as the function that makes a strategy.
    """
    if isinstance(given, str):
        return parse_strategy(given)
    if not isinstance(given, Strategy):
        name = getattr(given, "__name__", "sync_sgd")
        raise TypeError(f"a strategy is the answer of one of pt.strategies, or its text, got {given!r}; write {name}()")
    return given


def cluster_from(given: Cluster | str) -> Cluster:
    """A cluster that is given as it is or as text, such as "ethernet(gbit_per_s=1)"."""
    if isinstance(given, str):
        return parse_cluster(given)
    if not isinstance(given, Cluster):
        name = getattr(given, "__name__", "ethernet")
        raise TypeError(f"a cluster is the answer of one of pt.cluster, or its text, got {given!r}; write {name}()")
    return given


def codec_of(given: Codec | str | None) -> Codec | None:
    """A codec that is given as it is or as text: int8(), "int8", "qsgd(levels=127)". ValueError for wrong text."""
    return cast("Codec", NAMES.codec(given)) if isinstance(given, str) else given


def parse_partition(text: str) -> Partition:
    """The partition of data over clients that `text` describes, such as `dirichlet(100, alpha=0.5)`."""
    return cast("Partition", NAMES.partition(text))


def parse_sampling(text: str) -> Sampling:
    """The rule that draws a round's clients, such as `both(drop_outs(0.1), over_selected(extra=0.3))`."""
    return cast("Sampling", NAMES.sampling(text))


def parse_strategies(text: str | None) -> list[Strategy]:
    """The strategies of a list with commas, or the usual ones to compare."""
    return [parse_strategy(each) for each in split_calls(text or COMPARED)]


def parse_cluster(text: str, stragglers: str | None = None) -> Cluster:
    """The cluster that `text` describes, such as `ethernet(gbit_per_s=10)`, with the straggler distribution given.

    A text that ends in `.toml` names a file that `polytempo calibrate` has written. Errors: ValueError for wrong
    names and arguments, and for a file that is not there or none of these. Stragglers may be `busy` where it was
    calibrated while other programs computed.
    """
    if text.endswith(".toml"):
        found = read_cluster(Path(text))
    else:
        named = NAMES.cluster(text)
        assert isinstance(named, Cluster)
        found = named
    if stragglers is None:
        return found
    if stragglers == BUSY:
        if found.busy_stragglers is None:
            raise ValueError(
                f"--stragglers {BUSY}: {text} says nothing of hosts that are busy with other programs; "
                "`polytempo calibrate` measures them, or give a distribution such as 'lognormal(sigma=0.3)'"
            )
        return replace(found, stragglers=found.busy_stragglers, name=f"{found.name}, {BUSY}")
    distribution = cast(Stragglers, NAMES.distribution(stragglers))
    return replace(found, stragglers=distribution, name=f"{found.name}, stragglers {stragglers}")
