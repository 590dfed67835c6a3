"""Simulate Inception v3, ResNet-101 and VGG-16 on 1 to 128 GPUs, by a ring and by parameter servers.

    python benchmarks/scaling/main.py                # the figure and its table: some minutes
    python benchmarks/scaling/main.py --most 8       # fewer GPUs

Nothing is computed: `pt.simulate(meta=True)` traces each network and simulates its step on a declared cluster.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from networks import BATCH, inception_v3, resnet_101, vgg_16

import polytempo as pt
from polytempo.report.pictures.style import AXIS, COLORS, GRID, INK, QUIET

GPUS_PER_HOST = 4
GPUS = (1, 4, 8, 16, 32, 64, 128)
LINK = {"gbit_per_s": 25.0, "latency_us": 50.0}
"""The link of a host, which its four GPUs share; between them messages travel at the preset's 10 GB/s."""


class Network(NamedTuple):
    """A network, and the published figures about it."""

    title: str
    job: pt.Job
    images_per_s: float
    """The rate of one Tesla P100 at 64 images a step."""
    published: dict[str, float]
    """Efficiency on 128 GPUs, from 0 to 1."""


NETWORKS = (
    Network("Inception v3", inception_v3, 142.0, {"servers": 0.50, "ring, TCP": 0.88, "ring, RDMA": 0.90}),
    Network("ResNet-101", resnet_101, 128.7, {"servers": 0.50, "ring, TCP": 0.88, "ring, RDMA": 0.90}),
    Network("VGG-16", vgg_16, 154.0, {"ring, RDMA": 0.79}),
)
"""Images a second: TensorFlow's benchmarks, May 2017; ResNet-101's is between 219 (ResNet-50) and 91.8 (ResNet-152), by
operations. Efficiencies: Sergeev and Del Balso, 2018 (servers and TCP), and Horovod's documentation of 2017 (RDMA)."""

WAYS = {
    "ring": lambda gpus: pt.strategies.sync_sgd(route=pt.collectives.ring),
    "servers": lambda gpus: pt.strategies.backup_workers(0, shards=max(1, gpus // GPUS_PER_HOST)),
    "one server": lambda gpus: pt.strategies.backup_workers(0),
}
"""A shard for each host in `servers`, as TensorFlow's benchmarks have. No backup: a step waits for all workers."""


class Point(NamedTuple):
    """The efficiency of a network on so many GPUs by one way: its samples a second, of so many times one GPU's."""

    network: str
    way: str
    gpus: int
    efficiency: float


def step_s(network: Network, way: str, gpus: int, gflops: float) -> float:
    """Seconds of a step, without the first ones."""
    cluster = pt.cluster.ethernet(**LINK, workers_per_host=GPUS_PER_HOST, gflops=gflops)
    few, many = (1, 2) if way == "ring" else (2, 4)
    ends = [
        pt.simulate(network.job, WAYS[way](gpus), gpus, cluster, meta=True, steps=steps).seconds
        for steps in (few, many)
    ]
    return (ends[1] - ends[0]) / (many - few)


def curves(networks: Sequence[Network], most: int) -> list[Point]:
    """All points. A GPU's operations a second are such that one GPU alone makes the published images a second."""
    found = []
    for network in networks:
        alone = BATCH / network.images_per_s
        gflops = step_s(network, "ring", 1, 1e3) * 1e3 / alone
        print(f"{network.title}: {gflops:,.0f} GFLOP/s")
        for gpus in (each for each in GPUS if each <= most):
            for way in WAYS:
                if way == "one server" and gpus > 32:
                    continue  # a step of 64 takes twice as long as of 32, and so on
                took = alone if gpus == 1 else step_s(network, way, gpus, gflops)
                found.append(Point(network.title, way, gpus, alone / took))
                print(f"  {gpus:4} GPUs, {way:12} {alone / took:.1%}", flush=True)
    return found


def draw(path: Path, points: Sequence[Point]) -> None:
    """A panel for each network: images a second in units of one GPU's, and the published efficiencies as marks."""
    figure = Figure(figsize=(11, 4.3), dpi=120, facecolor="white", layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, len(NETWORKS), sharey=True)
    for axes, network in zip(panels, NETWORKS, strict=True):
        axes.plot(GPUS, GPUS, color=QUIET, linestyle=":", linewidth=1.3, label="ideal")
        for number, way in enumerate(WAYS):
            mine = [each for each in points if (each.network, each.way) == (network.title, way)]
            x, y = [each.gpus for each in mine], [each.gpus * each.efficiency for each in mine]
            axes.plot(x, y, color=COLORS[number], marker="osD"[number], markersize=4, label=f"simulated: {way}")
        for mark, (way, efficiency) in zip("x+*", sorted(network.published.items(), reverse=True), strict=False):
            at = {"marker": mark, "color": "black", "linestyle": "", "markersize": 8, "zorder": 5}
            axes.plot([GPUS[-1]], [GPUS[-1] * efficiency], **at, label=f"published: {way}, {efficiency:.0%}")
        axes.set_xscale("log", base=2)
        axes.set_yscale("log", base=2)
        axes.set_xticks(GPUS, map(str, GPUS))
        axes.set_yticks(GPUS, map(str, GPUS))
        axes.set_title(network.title, fontsize=10.5, color=INK, loc="left")
        axes.set_xlabel("GPUs, four on a host", fontsize=9, color=QUIET)
        axes.tick_params(labelsize=8.5, color=AXIS, labelcolor=INK)
        axes.grid(color=GRID, linewidth=0.6)
        axes.legend(fontsize=7.5, frameon=False, labelcolor=INK, loc="upper left")
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
    panels[0].set_ylabel("images a second, of one GPU's", fontsize=9, color=QUIET)
    figure.savefig(path)


def main() -> None:
    """Simulate, print, and draw."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--most", type=int, default=GPUS[-1], choices=GPUS, help="the largest number of GPUs")
    parser.add_argument("--out", type=Path, default=Path(__file__).parents[2] / "docs" / "pictures" / "scaling.png")
    parser.add_argument("--json", type=Path, help="also write the points into this file")
    asked = parser.parse_args()
    points = curves(NETWORKS, asked.most)
    if asked.json is not None:
        asked.json.write_text(json.dumps([each._asdict() for each in points], indent=1))
    draw(asked.out, points)


if __name__ == "__main__":
    main()
