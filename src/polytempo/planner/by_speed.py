"""Runs with `balance="speed"`: parts of a global batch where hosts differ, and the cluster for their price.

    host's factor           1    1    1    2      the median of its draws
    parts of 28 x 4        32   32   32   16      `data.speed_shares`, until no look changes them
    factor in the price   1.14 1.14 1.14 1.14     the host's factor x its part / the equal part

Seconds of a step that do not grow with its samples are taken to grow, too. No values are computed. Slices of
`invariant` are not priced by speed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from random import Random
from statistics import median

from polytempo.cluster import Cluster, CorrelatedStragglers
from polytempo.core import Strategy
from polytempo.core.calls.refusals import Refusal, refusal_of
from polytempo.data.plan import Shares, apportioned
from polytempo.data.speed_shares import next_shares
from polytempo.planner.search_space import PlannedRun
from polytempo.spec.run_spec import balance_features
from polytempo.spec.text.catalogue import parse_strategy

_DRAWS = 201
_LOOKS = 64


def refusal_by_speed(strategy: Strategy) -> Refusal | None:
    """The reason why the strategy's batches cannot be dealt by speed; None if they can."""
    return refusal_of(strategy.features | balance_features(strategy, "speed"))


def with_runs_by_speed(runs: Sequence[PlannedRun], cluster: Cluster) -> list[PlannedRun]:
    """The runs, each followed by the same run by speed if the cluster would give it unequal parts."""
    found = []
    for run in runs:
        found.append(run)
        if refusal_by_speed(parse_strategy(run.strategy)) is None and parts_by_speed(run, cluster) is not None:
            found.append(run._replace(balance="speed"))
    return found


def parts_by_speed(run: PlannedRun, cluster: Cluster) -> Shares | None:
    """Samples of each replica in a step, after the last change of parts; None for equal parts.

    A replica on several workers is as fast as its slowest worker. Stragglers with a memory are alike on all hosts.
    """
    if isinstance(cluster.stragglers, CorrelatedStragglers) or run.models == 1:
        return None
    if parse_strategy(run.strategy).slices is not None:
        return None
    hosts = cluster.hosts(run.workers)
    factors = {host: _factor(cluster, host) for host in set(hosts)}
    each = run.workers // run.models
    seconds = [max(factors[host] for host in hosts[first : first + each]) for first in range(0, run.workers, each)]
    equal = parts = apportioned(run.global_batch, (1,) * run.models)
    for _ in range(_LOOKS):
        parts, before = next_shares(parts, seconds), parts
        if parts == before:
            break
    return None if parts == equal else parts


def dealt_by_speed(run: PlannedRun, cluster: Cluster) -> Cluster:
    """The cluster, slowed down so that equal parts take the seconds of the run's parts."""
    parts = parts_by_speed(run, cluster)
    if parts is None:
        return cluster
    vary, each = cluster.stragglers, run.workers // run.models
    assert not isinstance(vary, CorrelatedStragglers)
    scale: dict[int, float] = {}
    for rank, host in enumerate(cluster.hosts(run.workers)):
        scale[host] = max(scale.get(host, 0.0), parts[rank // each] / run.batch_size)
    return replace(cluster, stragglers=lambda random, host: vary(random, host) * scale.get(host, 1.0))


def _factor(cluster: Cluster, host: int) -> float:
    assert not isinstance(cluster.stragglers, CorrelatedStragglers)
    random = Random(host)
    return median(cluster.stragglers(random, host) for _ in range(_DRAWS))
