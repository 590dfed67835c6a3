"""The tables of `polytempo bench` and `tune`, checked before torch is imported. None: it depends on --quick."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from msgspec import Meta

from polytempo.cli.options import values
from polytempo.cli.options.network_options import network_of
from polytempo.cli.options.shared_options import (
    OPTIONS,
    BatchSize,
    Data,
    Device,
    GlobalBatchSize,
    Job,
    Json,
    Seed,
    Strategy,
    Ui,
    Workers,
    check_shown,
    new_folder,
)
from polytempo.spec.table.option import Count, Option, Positive, entries

MEASURED = (
    "fp16, bf16, feedback(int8), feedback(dynamic8), feedback(one_bit), feedback(bins), feedback(sign), "
    "feedback(threshold(density=0.01)), feedback(top_k(ratio=0.01)), feedback(random_k(ratio=0.01)), dgc(ratio=0.001), "
    "qsgd, terngrad, natural, low_rank(rank=1), low_rank(rank=4)"
)
"""The codecs to measure if none is named: with feedback where a codec takes it (`int8_sgd` itself has none)."""
RESULT = "result.json"
_MAX_FOLDERS = 10_000


def bench_folder(name: str, out: Path | None) -> Path:
    """The folder that was asked for, or a new one under `runs/`."""
    if out is not None:
        return out
    for number in range(1, _MAX_FOLDERS + 1):
        folder = Path("runs") / (f"bench-{name}" if number == 1 else f"bench-{name}-{number}")
        if not folder.exists():
            return folder
    raise ValueError(f"runs holds {_MAX_FOLDERS:,} folders named bench-{name}; name another one with --out")


Rounds = Annotated[Count | None, Option(OPTIONS, "R")]
Turn = Annotated[Positive | None, Option(OPTIONS, "S")]


@dataclass(frozen=True, kw_only=True)
class CollectivesOptions:
    """Options of `polytempo bench collectives`."""

    ranks: Annotated[tuple[int, ...] | None, Option(OPTIONS, "N,M", read=values.whole_numbers)] = None
    """Numbers of ranks to measure. Default: 2,4."""
    sizes: Annotated[tuple[int, ...] | None, Option(OPTIONS, "A,B", read=values.sizes)] = None
    """Tensor sizes. Default: 4KiB,64KiB,1MiB,16MiB,256MiB."""
    operations: Annotated[tuple[str, ...] | None, Option(OPTIONS, "A,B", read=values.names)] = None
    """all_reduce, broadcast, …, send_recv, barrier. Default: all."""
    rounds: Rounds = None
    """Number of rounds; in each, every contender runs once. Default: 7."""
    turn_s: Turn = None
    """Seconds that a contender runs in a round. Default: 0.1."""
    quick: Annotated[bool, Option(OPTIONS)] = False
    """Measure roughly, in about 20 seconds."""
    out: Annotated[Path | None, Option(OPTIONS, "DIR", read=new_folder)] = None
    """The folder for the results. Default: a new one, runs/bench-…."""
    json: Json = False


Quick = Annotated[bool, entries(CollectivesOptions)["quick"]]
Out = Annotated[Path | None, entries(CollectivesOptions)["out"]]


@dataclass(frozen=True, kw_only=True)
class TrainingOptions:
    """Options of `polytempo bench training`."""

    models: Annotated[tuple[str, ...] | None, Option(OPTIONS, "A,B", read=values.names)] = None
    """mlp, cnn, embedding, transformer. Default: all."""
    workers: Annotated[int, Option(OPTIONS, "N")] = 2
    """Number of workers. Default: 2."""
    rounds: Rounds = None
    """Number of rounds; in each, every contender runs once. Default: 9."""
    turn_s: Turn = None
    """Seconds that a contender runs in a round. Default: 1."""
    quick: Quick = False
    out: Out = None
    json: Json = False


@dataclass(frozen=True, kw_only=True)
class MemoryOptions:
    """Options of `polytempo bench memory`."""

    workers: Annotated[int | None, Option(OPTIONS, "N")] = None
    """Number of workers. Default: 4."""
    parameters: Annotated[int | None, Option(OPTIONS, "P", read=values.count)] = None
    """Number of parameters of the model. Default: 100M."""
    steps: Annotated[Count | None, Option(OPTIONS, "K")] = None
    """Steps to train. Default: 3."""
    quick: Quick = False
    out: Out = None
    json: Json = False


@dataclass(frozen=True, kw_only=True)
class CompressionOptions:
    """Options of `polytempo bench compression`."""

    model: Annotated[tuple[int, ...], Option(OPTIONS, "A-B-C", read=values.layer_sizes)] = (784, 2048, 2048, 10)
    """Layer sizes of a perceptron. Default: 784-2048-2048-10."""
    link: Annotated[float | None, Option(OPTIONS, "V", read=values.rate)] = None
    """Network speed of each host: 100mbit, 1gbit, … Default: 1gbit."""
    latency_us: Annotated[Annotated[float, Meta(ge=0, le=1e12)] | None, Option(OPTIONS, "µS")] = None
    """Latency of the network in microseconds. Default: 50."""
    cluster: Annotated[Path | None, Option(OPTIONS, "FILE")] = None
    """A file of `polytempo calibrate`: its network and kernels, and nothing is measured on this machine."""
    workers: Annotated[int, Option(OPTIONS, "N")] = 4
    """Number of workers. Default: 4."""
    codecs: Annotated[tuple[str, ...] | None, Option(OPTIONS, "A,B", read=values.codecs)] = None
    """Codecs to measure, such as 'bf16, feedback(top_k(ratio=0.01)), low_rank(rank=2)'. Default: all."""
    rounds: Rounds = None
    """Number of rounds; in each, every contender runs once. Default: 9."""
    quick: Quick = False
    out: Out = None
    json: Json = False

    def __post_init__(self) -> None:
        """Refuse options that exclude each other."""
        network_of(self.link, self.latency_us, self.cluster, "1gbit")


@dataclass(frozen=True, kw_only=True)
class TuneBatchOptions:
    """Options of `polytempo tune batch`."""

    job: Job
    workers: Annotated[Count | None, Option(OPTIONS, "N")] = None
    """Number of workers. Default: it is recommended, too."""
    extra: Annotated[Positive, Option(OPTIONS, "X")] = 0.1
    """Samples that the batch may cost beyond the cost of small ones. Default: 0.1, 10 %."""
    budget: Annotated[Positive, Option(OPTIONS, "R")] = 0.75
    """The most that the advice may cost, in runs of the job's epochs. Default: 0.75."""
    device: Device = "auto"
    seed: Seed = 0
    data: Data = None
    out: Annotated[Path | None, Option(OPTIONS, "DIR")] = None
    """Keep the rates that are tried in this folder, as they come: the live page shows them."""
    ui: Ui = False
    json: Json = False

    def __post_init__(self) -> None:
        """Refuse a page without a folder."""
        check_shown(self, "out", "runs/tune")


def _picture(given: Path) -> Path:
    """A file's name in a folder that is there."""
    if given.suffix != ".png" or not given.parent.is_dir():
        raise ValueError("name a file that ends in .png, in a folder that is there")
    return given


@dataclass(frozen=True, kw_only=True)
class TuneRateOptions:
    """Options of `polytempo tune rate`."""

    job: Job
    strategy: Strategy = "sync_sgd"
    workers: Workers = 1
    steps: Annotated[Annotated[int, Meta(ge=10, le=1_000_000)], Option(OPTIONS, "N")] = 100
    """The most steps; fewer where the loss grows before. Default: 100."""
    lowest: Annotated[Positive | None, Option(OPTIONS, "R")] = None
    """The first rate. Default: the job's, divided by 1,000."""
    highest: Annotated[Positive | None, Option(OPTIONS, "R")] = None
    """The last rate. Default: the job's, multiplied by 1,000."""
    batch_size: BatchSize = None
    global_batch_size: GlobalBatchSize = None
    seed: Seed = 0
    data: Data = None
    picture: Annotated[Path | None, Option(OPTIONS, "FILE", read=_picture)] = None
    """Draw the loss against the rates into this PNG file."""
    json: Json = False


@dataclass(frozen=True, kw_only=True)
class TuneThreadsOptions:
    """Options of `polytempo tune threads`."""

    job: Job
    cores: Annotated[Count | None, Option(OPTIONS, "N")] = None
    """Cores to divide. Default: all of this machine."""
    batch_size: BatchSize = None
    global_batch_size: GlobalBatchSize = None
    rounds: Annotated[Count, Option(OPTIONS, "R")] = 5
    """Number of rounds; every division runs in each. Default: 5."""
    turn_s: Annotated[Positive, Option(OPTIONS, "S")] = 0.5
    """Seconds that a division runs in a round. Default: 0.5."""
    data: Data = None
    json: Json = False

    def __post_init__(self) -> None:
        """Refuse more cores than there are, and batches that they cannot share."""
        there = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        if self.cores is not None and self.cores > there:
            raise ValueError(f"--cores {self.cores}: this process may use {there}")
        if self.batch_size is not None and self.global_batch_size is not None:
            raise ValueError("--batch-size and --global-batch-size say the same in two ways; leave one out")
        cores = self.cores or there
        if self.global_batch_size is not None and self.global_batch_size < cores:
            raise ValueError(
                f"--global-batch-size {self.global_batch_size}: {cores} workers would not have a sample each; give "
                f"{cores} or more, or fewer --cores"
            )
        object.__setattr__(self, "cores", cores)
