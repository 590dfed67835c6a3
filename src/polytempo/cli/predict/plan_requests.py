"""What `polytempo plan` is asked to do, checked before anything slow is imported."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from polytempo import jobs
from polytempo.cli.options.completion import PLAN_GOALS, REDUCTIONS
from polytempo.cluster import Link
from polytempo.cluster.measured import read_cluster
from polytempo.cluster.rate import rate_of
from polytempo.spec.text.declaration import declared


class LayerCodecs(NamedTuple):
    """By which layers are to exchange activations, and their gradients, as they are written."""

    activations: str | None = None
    gradients: str | None = None

    @property
    def text(self) -> str:
        """As arguments of a strategy, behind others."""
        return "".join(f", {name}={codec}" for name, codec in self._asdict().items() if codec is not None)


class PlanRequest(NamedTuple):
    """A job whose model's layers are to be planned, for which workers and network."""

    job: str
    workers: int
    bytes_per_s: float
    latency_us: float
    batch_size: int | None
    """Samples of a worker."""
    global_batch_size: int | None
    """Samples of all workers."""
    reduction: str
    shards: int
    by: str
    codecs: LayerCodecs


class SplitRequest(NamedTuple):
    """A job whose model's layers are to be split, over how many workers on which network."""

    job: str
    parts: int
    bytes_per_s: float
    latency_us: float
    gflops: float
    batch_size: int | None
    codecs: LayerCodecs


def plan_request(
    job: str,
    workers: int | None,
    network: Link,
    sizes: Mapping[str, int | None],
    reduction: str | None,
    shards: int | None,
    by: str | None,
    codecs: LayerCodecs,
) -> PlanRequest:
    """What `polytempo plan layers` is asked to do. `ValueError` for what it cannot."""
    numbers = {"workers": workers, "shards": shards, **sizes}
    for name, number in numbers.items():
        if number is not None and number < 1:
            raise ValueError(f"--{name.replace('_', '-')} {number}: must be at least 1")
    if None not in sizes.values():
        raise ValueError("--batch-size and --global-batch-size say the same in two ways; leave one out")
    reduction, by = reduction or REDUCTIONS[0], by or PLAN_GOALS[0]
    for option, value, known in (("reduction", reduction, REDUCTIONS), ("by", by, PLAN_GOALS)):
        if value not in known:
            raise ValueError(f"--{option} {value}: must be one of {', '.join(known)}")
    jobs.check(job)
    latency_us = 1e6 * network.latency_s
    return PlanRequest(
        *(job, workers or 32, network.bytes_per_s, latency_us, sizes["batch_size"], sizes["global_batch_size"]),
        *(reduction, shards or 1, by, codecs),
    )


def split_request(
    job: str,
    parts: int | None,
    network: Link,
    gflops: float | None,
    batch_size: int | None,
    codecs: LayerCodecs,
) -> SplitRequest:
    """What `polytempo plan split` is asked to do. `ValueError` for what it cannot."""
    parts, gflops = 2 if parts is None else parts, 10.0 if gflops is None else gflops
    if parts < 2:
        raise ValueError(f"--parts {parts}: must be at least 2, or there is nothing to split")
    if not 0 < gflops < float("inf"):
        raise ValueError(f"--gflops {gflops:g}: must be above 0")
    if batch_size is not None and batch_size < 1:
        raise ValueError(f"--batch-size {batch_size}: must be at least 1")
    jobs.check(job)
    return SplitRequest(job, parts, network.bytes_per_s, 1e6 * network.latency_s, gflops, batch_size, codecs)


def codecs_of(activations: str | None, gradients: str | None) -> LayerCodecs:
    """The codecs that --activations and --gradients name. ValueError for one that there is not."""
    for option, codec in (("activations", activations), ("gradients", gradients)):
        if codec is not None:
            try:
                declared().codec(codec)
                if codec.partition("(")[0].strip() == "low_rank":
                    raise ValueError("PowerSGD is a way to sum gradients of weights, and no codec; use int8 or bf16")
            except ValueError as error:
                raise ValueError(f"--{option} {codec}: {error}") from None
    return LayerCodecs(activations, gradients)


def network_of(link: str | None, latency_us: float | None, cluster: Path | None) -> Link:
    """The network that --link and --latency-us describe, or that of the file --cluster. ValueError for both."""
    if cluster is not None:
        if link is not None or latency_us is not None:
            raise ValueError(f"--cluster {cluster}: it says the network; leave out --link and --latency-us")
        return read_cluster(cluster).network
    if latency_us is not None and not 0 <= latency_us < float("inf"):
        raise ValueError(f"--latency-us {latency_us:g}: must be at least 0")
    try:
        return Link(1e-6 * (50.0 if latency_us is None else latency_us), rate_of(link or "10gbit"))
    except ValueError as error:
        raise ValueError(f"--link {error}") from None
