"""The tables of `polytempo plan`: options of its commands, checked before torch is imported."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated, Literal

from msgspec import Meta

from polytempo.cli.options import values
from polytempo.cli.options.completion import plan_goals, reduction_names, strategy_names
from polytempo.cli.options.measured_hosts import measured_workers
from polytempo.cli.options.network_options import network_of
from polytempo.cli.options.shared_options import (
    OPTIONS,
    BatchSize,
    Cluster,
    Data,
    Device,
    GlobalBatchSize,
    Job,
    Json,
    Seed,
    Stragglers,
    Ui,
    Until,
    check_shown,
)
from polytempo.cluster import Link
from polytempo.cluster.cluster_file import read_price, read_spread
from polytempo.spec.table.option import Count, Option, Positive, entries

_WORKERS = (1, 2, 4, 8, 16)
_MOST_WORKERS = 4096
_AXES = ("codecs", "periods", "shards", "stages", "parts")


def _layer_codec(given: object) -> str:
    found = values.codec(given)
    if found.partition("(")[0].strip() == "low_rank":
        raise ValueError("PowerSGD is a way to sum gradients of weights, and no codec; use int8 or bf16")
    return found


@dataclass(frozen=True, kw_only=True)
class LayersOptions:
    """Options of `polytempo plan layers`."""

    job: Job
    workers: Annotated[Count, Option(OPTIONS, "N")] = 32
    """Number of workers. Default: 32."""
    link: Annotated[float | None, Option(OPTIONS, "RATE", read=values.rate)] = None
    """Each worker's link, such as 1gbit. Default: 10gbit."""
    latency_us: Annotated[Annotated[float, Meta(ge=0, le=1e12)] | None, Option(OPTIONS, "US")] = None
    """Microseconds from process to process. Default: 50."""
    cluster: Annotated[Path | None, Option(OPTIONS, "FILE")] = None
    """A file of `polytempo calibrate`: its network for the links."""
    batch_size: BatchSize = None
    global_batch_size: GlobalBatchSize = None
    reduction: Annotated[
        Literal["ring", "halving_doubling", "tree", "server"], Option(OPTIONS, "WAY", complete=reduction_names)
    ] = "ring"
    """How gradients are summed: ring, halving_doubling, tree, or server. Default: ring."""
    shards: Annotated[Count, Option(OPTIONS, "S")] = 1
    """Shards of the parameter server. Default: 1."""
    by: Annotated[Literal["bytes", "seconds"], Option(OPTIONS, "GOAL", complete=plan_goals)] = "bytes"
    """Compare bytes (|D| with |W|), or seconds of the cost model. Default: bytes."""
    activations: Annotated[str | None, Option(OPTIONS, "CODEC", read=_layer_codec)] = None
    """Codec of activations between layers, such as int8."""
    gradients: Annotated[str | None, Option(OPTIONS, "CODEC", read=_layer_codec)] = None
    """Codec of their gradients, such as bf16."""
    data: Data = None
    json: Json = False

    network: Link = field(init=False)

    def __post_init__(self) -> None:
        """Refuse options that exclude each other."""
        if self.batch_size is not None and self.global_batch_size is not None:
            raise ValueError("--batch-size and --global-batch-size say the same in two ways; leave one out")
        object.__setattr__(self, "network", network_of(self.link, self.latency_us, self.cluster))


_rows = entries(LayersOptions)
LinkRate = Annotated[float | None, _rows["link"]]
Latency = Annotated[float | None, _rows["latency_us"]]
ClusterFile = Annotated[Path | None, _rows["cluster"]]
Activations = Annotated[str | None, _rows["activations"]]
Gradients = Annotated[str | None, _rows["gradients"]]


@dataclass(frozen=True, kw_only=True)
class SplitOptions:
    """Options of `polytempo plan split`."""

    job: Job
    parts: Annotated[int, Meta(ge=2, le=1_000_000), Option(OPTIONS, "N")] = 2
    """Workers that hold one model together. Default: 2."""
    link: LinkRate = None
    latency_us: Latency = None
    cluster: ClusterFile = None
    gflops: Annotated[Positive, Option(OPTIONS, "G")] = 10.0
    """Gflop/s of a worker, to compare with. Default: 10, as simulated."""
    batch_size: BatchSize = None
    activations: Activations = None
    gradients: Gradients = None
    data: Data = None
    json: Json = False

    network: Link = field(init=False)

    def __post_init__(self) -> None:
        """Refuse options that exclude each other."""
        object.__setattr__(self, "network", network_of(self.link, self.latency_us, self.cluster))


def codec_arguments(asked: LayersOptions | SplitOptions) -> str:
    """The codecs as arguments of a strategy, behind others."""
    given = {"activations": asked.activations, "gradients": asked.gradients}
    return "".join(f", {name}={codec}" for name, codec in given.items() if codec is not None)


Numbers = Annotated[tuple[int, ...] | None, Option(OPTIONS, "N,N", read=values.whole_numbers)]


@dataclass(frozen=True, kw_only=True)
class PlanOptions:
    """Options of `polytempo plan JOB`."""

    job: Job
    until: Until = field(default_factory=dict)
    cluster: Cluster = None
    stragglers: Stragglers = None
    workers: Annotated[
        tuple[int, ...] | None, Option(OPTIONS, "N,N", read=partial(values.whole_numbers, most=_MOST_WORKERS))
    ] = None
    """Numbers of workers. Default: 1,2,4,8,16; with a file of `polytempo calibrate` as many as measured."""
    batch_sizes: Numbers = None
    """Samples of a worker. Default: the job's, a quarter, a half and twice it."""
    strategies: Annotated[str | None, Option(OPTIONS, "A,B", read=values.strategies, complete=strategy_names)] = None
    """Strategies, separated by commas, in place of the strategies of the next five options."""
    codecs: Annotated[tuple[str, ...] | None, Option(OPTIONS, "C,C", read=values.names)] = None
    """Codecs of gradients. Default: bf16,one_bit,low_rank."""
    periods: Numbers = None
    """Periods of local SGD and DiLoCo. Default: 4,16."""
    shards: Numbers = None
    """Shards of a parameter server. Default: 1."""
    stages: Numbers = None
    """Stages of a pipeline. Default: no pipeline."""
    parts: Numbers = None
    """Parts of split layers. Default: no layer is split."""
    memory_gb: Annotated[Positive | None, Option(OPTIONS, "GB")] = None
    """The most memory of a worker. Default: its part of the device, if the cluster's file has one."""
    device: Device = "auto"
    deadline_s: Annotated[Positive | None, Option(OPTIONS, "S")] = None
    """The most seconds. Alone: the cheapest run within them is chosen."""
    budget: Annotated[Positive | None, Option(OPTIONS, "M")] = None
    """The most money: the fastest run for it is chosen."""
    price: Annotated[Positive | None, Option(OPTIONS, "M")] = None
    """Price of a host for an hour. Default: host_hour in [price] of the cluster's file."""
    seed: Seed = 0
    data: Data = None
    page: Annotated[Path | None, Option(OPTIONS, "FILE")] = None
    """Write a page with the picture, and beside it a .plan.json for `polytempo ui`."""
    limit: Annotated[bool, Option(OPTIONS)] = False
    """Find the last number of workers before further ones cost more than they bring, and why."""
    quote: Annotated[bool, Option(OPTIONS)] = False
    """Print only the commands that make the chosen runs."""
    ui: Ui = False
    json: Json = False

    def __post_init__(self) -> None:
        """Refuse options that exclude or need each other, and fill in values of the cluster's file."""
        if not self.until:
            raise ValueError("a plan needs a target: give --until, such as --until accuracy=0.97 or --until loss=0.1")
        check_shown(self, "page", "runs/plan.html")
        if self.page is not None and (self.page.is_dir() or not self.page.parent.is_dir()):
            raise ValueError(f"--page {self.page}: name a file in a folder that exists, such as plan.html")
        if self.strategies is not None and self.axes:
            raise ValueError(
                f"--strategies {self.strategies}: it says all strategies; leave out --{next(iter(self.axes))}"
            )
        if self.limit and self.quote:
            raise ValueError("--quote prints commands alone, without --limit; leave one out")
        if self.workers is None:
            object.__setattr__(self, "workers", _usual_workers(self.cluster))
        if self.price is None and self._file is not None:
            object.__setattr__(self, "price", read_price(self._file))
        if self.budget is not None and self.price is None:
            raise ValueError(
                f"--budget {self.budget:g}: it needs the price of a host for an hour; give --price, or host_hour in "
                "the table [price] of the cluster's file"
            )

    @property
    def axes(self) -> dict[str, tuple[int, ...] | tuple[str, ...]]:
        """Codecs, periods, shards, stages and parts that were given."""
        return {name: getattr(self, name) for name in _AXES if getattr(self, name) is not None}

    @property
    def spread(self) -> dict[str, float]:
        """The spread of measurements in the cluster's file."""
        return {} if self._file is None else read_spread(self._file)

    @property
    def _file(self) -> Path | None:
        return Path(self.cluster) if self.cluster is not None and self.cluster.endswith(".toml") else None


def _usual_workers(cluster: str | None) -> tuple[int, ...]:
    """1, 2, 4, 8, 16; of hosts that were measured as many of them as took part, and all that did."""
    most = measured_workers(cluster)
    return _WORKERS if most is None else (*(each for each in _WORKERS if each < most), most)
