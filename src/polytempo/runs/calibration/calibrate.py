"""`calibrate`: measures an engine's hosts in training, as a cluster for simulations.

1  processes on all hosts time kernels, messages, collectives and steps      speeds, links, stragglers
2  they train a small job without an exchange and with one; it is simulated  further seconds of a step, of an exchange
3  the same with a large model                                               further seconds of a byte of an exchange
4  the same with exchanges that are encoded                                  the slowdown of codecs in training
5  the same with messages, of a small and a large model                      seconds of a message and of each byte
6  on one host, the same with a parameter server                             further seconds of its steps and exchanges
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from statistics import median
from typing import Any, NamedTuple

from polytempo.cluster import Cluster, CollectiveLink, KernelSpeed, Link, Speeds
from polytempo.cluster.computing_time import EXCHANGE, MESSAGE
from polytempo.cluster.fit import Sample, fitted
from polytempo.cluster.measured import Measured, cluster_of
from polytempo.cluster.slow_spells import measured_steps
from polytempo.cluster.stragglers import Stragglers, constant
from polytempo.engines.engine import EngineSetup
from polytempo.jobs import find
from polytempo.runs.calibration.device_samples import assembled_device
from polytempo.runs.calibration.measurement import (
    CALIBRATION,
    CODED,
    SMALL_RUNS,
    WHOLE_RUNS,
    SmallRun,
    calibration,
    correlation_of,
    quantiles_of,
    samples_of,
    spread_of,
)
from polytempo.runs.calibration.probe import answers, hosts_of, measured_of
from polytempo.runs.calibration.server_exchange import with_server_exchange
from polytempo.runs.frame.short_fork import beside_forks
from polytempo.runs.simulated.simulate import simulate
from polytempo.spec.run_options import RunOptions
from polytempo.spec.run_spec import RunSpec
from polytempo.strategies import sync_sgd

_SIMULATED = 20
"""Steps of the small job."""
_LEAST_PACE = 0.2
_TIMEOUT_S, _HOST_S = 180.0, 60.0
_NO_LINK = Link(1e-9, 1e15)
_OPERATORS = ("product", "convolution", "attention", "elementwise", "view")


class Calibration(NamedTuple):
    """The measurements, the cluster for simulations, and the spread of the measurements."""

    cluster: Cluster
    measured: Measured
    spread: dict[str, float]
    """(90th percentile - 10th percentile) / median: of steps, of large messages, of workers' speeds."""


def calibrate(setup: EngineSetup, name: str, workers: int, device: str = "cpu") -> Calibration:
    """Measure with so many processes, placed as a run's are. `name`: the engine's, for the file. `device`: measured
    beside the host; "auto": if torch sees one.

    Cost: some 30 s, and 1 to 6 s for each ordered pair of hosts; minutes on slow links.
    Errors: `WorkerDied`, `RunTimedOut` and the engine's own.
    """
    spec = RunSpec.of(find("digits"), sync_sgd(), workers, RunOptions(threads=1, device=device))
    told = answers(setup, spec, name, CALIBRATION, partial(calibration, device), _TIMEOUT_S + _HOST_S * workers)
    found = _with_steps(assembled(name, told), told)
    cluster = found.cluster
    if workers > 1 and cluster.network == cluster.memory:
        cluster = with_server_exchange(cluster, setup, workers)
    return found._replace(cluster=cluster)


def assembled(name: str, told: Sequence[dict[str, Any]]) -> Calibration:
    """The calibration from the answers of all processes, by rank."""
    of_rank, _ = hosts_of(told)
    measured = measured_of(name, told)
    each = [(int(a), int(b), Link(*figures), spread) for one in told for a, b, *figures, spread in one["links"]]
    kernels = _speeds([sample for one in told for sample in samples_of(one["samples"])])
    base, place = cluster_of(measured), "network" if measured.between else "memory"
    machines = {host: one["machine"] for host, one in zip(of_rank, told, strict=True)}
    cluster = replace(
        base,
        network=replace(base.network, duplex=_duplex([link for a, b, link, _ in each if of_rank[a] != of_rank[b]])),
        memory=replace(base.memory, duplex=_duplex([link for a, b, link, _ in each if of_rank[a] == of_rank[b]])),
        speeds=Speeds(tuple(sorted(kernels.items()))),
        collectives=_collectives(told, place),
        stragglers=_stragglers([one["steps"] for one in told]),
        busy_stragglers=_stragglers([one["busy_steps"] for one in told]),
        cores=min(one["cores"] for one in told),
        hosts_per_machine=max(Counter(machines.values()).values()),
    )
    if not measured.between:
        cluster = replace(cluster, network=cluster.memory)
    if devices := [one["device"] for one in told if one.get("device") is not None]:
        of_device = _speeds([sample for one in devices for sample in samples_of(one["samples"])])
        found = assembled_device(devices, cluster.workers_per_host, of_device)
        cluster = replace(cluster, device=replace(found, collectives=_collectives(devices, place)))
    spread = {"steps": median(spread_of(one["steps"]) for one in told)}
    spread["workers"] = spread_of([one["flops_per_s"] for one in told])
    if each:
        spread["messages"] = median(spread for *_, spread in each)
    return Calibration(cluster, measured, spread)


def _stragglers(factors: Sequence[list[float]]) -> Stragglers:
    """The stragglers with the factors of each rank, step by step."""
    together = quantiles_of([factor for one in factors for factor in one])
    return measured_steps(together, median(correlation_of(one) for one in factors))


def _duplex(links: Sequence[Link]) -> float:
    return median(link.duplex for link in links) if links else 1.0


def _speeds(samples: Sequence[Sample]) -> dict[str, KernelSpeed]:
    """The fitted speeds; torch's overhead of an operator is a part of each of its calls."""
    found = fitted(samples)
    besides = found.pop("operator", KernelSpeed())
    for kernel in _OPERATORS:
        if kernel in found:
            found[kernel] = found[kernel]._replace(call_s=found[kernel].call_s + besides.call_s)
    return found


def _collectives(told: Sequence[dict[str, Any]], place: str) -> tuple[tuple[str, CollectiveLink], ...]:
    """Links that give the measured seconds by the closed forms of `worlds.collective`."""
    taken: dict[str, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    for one in told:
        for kind, figures in one["collectives"]:
            for num_bytes, seconds in figures:
                taken[kind][num_bytes].append(seconds)
    others, links = len(told) - 1, []
    for kind, by_size in taken.items():
        seconds_of = sorted((num_bytes, median(seconds)) for num_bytes, seconds in by_size.items())
        (large, large_s), (largest, largest_s) = seconds_of[-2:]
        byte_s = max((largest_s - large_s) / (largest - large), 1e-13)
        rounds, share = (2 * others, 2 * others / (others + 1)) if kind == "all_reduce" else (others, others)
        latencies_s = tuple(max(0.0, seconds - byte_s * num_bytes) / rounds for num_bytes, seconds in seconds_of)
        sizes = tuple(float(num_bytes) for num_bytes, _ in seconds_of)
        links.append((f"{place} {kind}", CollectiveLink(share / byte_s, sizes, latencies_s)))
    return tuple(links)


# ---------------------------------------------------------------------- a small job


def _with_steps(found: Calibration, told: Sequence[dict[str, Any]]) -> Calibration:
    """The calibration with kernels `step`, `sample`, `exchange`: seconds of a small job beyond its known parts."""
    cluster, workers = found.cluster, len(told)
    for kernel in SMALL_RUNS:
        cluster = cluster.with_kernel(kernel, KernelSpeed())
    for kernel, run in SMALL_RUNS.items():
        if kernel == "exchange" and workers == 1:
            continue
        undisturbed = replace(_on_processors(cluster), stragglers=constant())
        besides_s = median(one["small"][kernel] for one in told) - simulated_s(run, undisturbed, workers)
        calls = run.batch_size if kernel == "sample" else 1
        cluster = cluster.with_kernel(kernel, KernelSpeed(call_s=max(0.0, besides_s) / calls))
    if workers > 1:
        cluster = cluster.with_kernel(EXCHANGE, exchange_speed(cluster, told))
        cluster = with_transforms_pace(cluster, told)
        cluster = cluster.with_kernel(MESSAGE, message_speed(cluster, told))
    return found._replace(cluster=cluster)


def simulated_s(run: SmallRun, cluster: Cluster, workers: int) -> float:
    """Seconds of a step."""
    options = replace(run.options(_SIMULATED), epochs=None)

    def simulated() -> float:
        result = simulate(run.job, run.strategy, workers, cluster, options, meta=True)
        return result.seconds / result.steps

    return beside_forks(simulated)


def exchange_speed(cluster: Cluster, told: Sequence[dict[str, Any]]) -> KernelSpeed:
    """The kernel, and on one host further seconds of each byte, because exchanges displace weights from the caches.

    Between hosts, an error in the measured link would count as these seconds.
    """
    assert cluster.speeds is not None
    if cluster.network != cluster.memory:
        return cluster.speeds.of(EXCHANGE)
    run, alone = WHOLE_RUNS["large native"], WHOLE_RUNS["large alone"]
    besides_s = _taken_s(told, "large native") - _said_s(cluster, run, alone, len(told))
    return cluster.speeds.of(EXCHANGE)._replace(byte_s=max(0.0, besides_s) / run.num_bytes)


def with_transforms_pace(cluster: Cluster, told: Sequence[dict[str, Any]]) -> Cluster:
    """The cluster with the seconds of codecs and low-rank factors in steps of training.

    Between hosts these are seconds on processors, because a late message must not count as a slow codec.
    """
    one_host = cluster.network == cluster.memory
    clock = "whole" if one_host else "on_processor"
    for name, kernels in CODED.items():
        run, alone = WHOLE_RUNS[name], WHOLE_RUNS["large alone"]
        paced = (_slowed(cluster, kernels, pace) for pace in (1.0, 2.0))
        at_1, at_2 = (_said_s(each if one_host else _on_processors(each), run, alone, len(told)) for each in paced)
        if at_2 > at_1:
            pace = 1.0 + (_taken_s(told, name, clock) - at_1) / (at_2 - at_1)
            cluster = _slowed(cluster, kernels, max(pace, _LEAST_PACE))
    return cluster


def message_speed(cluster: Cluster, told: Sequence[dict[str, Any]]) -> KernelSpeed:
    """The charge for each message and byte that gives the measured seconds of the exchanges of two models."""
    workers, message_s, num_bytes = len(told), list[float](), list[float]()
    for size in ("small", "large"):
        alone, by_ring = WHOLE_RUNS[f"{size} alone"], WHOLE_RUNS[f"{size} ring"]
        said_s = _said_s(cluster, by_ring, alone, workers)
        besides_s = max(0.0, _taken_s(told, f"{size} ring") - said_s)
        guess_s = max(besides_s / (2 * (workers - 1)), 1e-6)
        charged = cluster.with_kernel(MESSAGE, KernelSpeed(call_s=guess_s))
        charged_s = _said_s(charged, by_ring, alone, workers) - said_s
        message_s.append(guess_s * besides_s / charged_s if charged_s > 0 else 0.0)
        num_bytes.append(by_ring.num_bytes / workers)
    byte_s = max(0.0, message_s[1] - message_s[0]) / (num_bytes[1] - num_bytes[0])
    return KernelSpeed(call_s=max(0.0, message_s[0] - byte_s * num_bytes[0]), byte_s=byte_s)


def _taken_s(told: Sequence[dict[str, Any]], run: str, clock: str = "whole") -> float:
    """Seconds of a step's exchange: the median, over ranks and turns, of the step with it less the step without."""
    alone = f"{run.split()[0]} alone"
    return median(float(turn[run] - turn[alone]) for one in told for turn in one[clock])


def _said_s(cluster: Cluster, run: SmallRun, alone: SmallRun, workers: int) -> float:
    undisturbed = replace(cluster, stragglers=constant())
    return simulated_s(run, undisturbed, workers) - simulated_s(alone, undisturbed, workers)


def _on_processors(cluster: Cluster) -> Cluster:
    """The cluster with a processor for each rank, and between hosts with messages that take no time."""
    found = replace(cluster, cores=None, hosts_per_machine=1)
    if cluster.network == cluster.memory:
        return found
    return replace(found, network=_NO_LINK, memory=_NO_LINK, collectives=())


def _slowed(cluster: Cluster, kernels: tuple[str, ...], factor: float) -> Cluster:
    """The cluster with slower kernels: names that begin with `kernels` take `factor` times as long."""
    assert cluster.speeds is not None
    found = {
        name: KernelSpeed(factor * speed.call_s, factor * speed.byte_s, factor * speed.flop_s, speed.error)
        if name.startswith(kernels)
        else speed
        for name, speed in cluster.speeds.kernels
    }
    return replace(cluster, speeds=Speeds(tuple(found.items()), cluster.speeds.jobs))
