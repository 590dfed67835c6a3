"""Pure data parallelism beside the hybrid that a plan of layers chooses, on four hosts: measured and predicted.

    export POLYTEMPO_NETLAB=…/netlab.sh      # see compression/lab.py for the script; needs root
    python benchmarks/layers/main.py [--mbit 1000] [--samples 32]

One process a host, one thread each. A host is a network namespace with a PID namespace and a /dev/shm of its own, so
no memory is shared. The hosts share this machine's cores.

The network is a small AlexNet: three convolutions, three fully connected layers that hold 99 % of the weights. The
prediction is the time of the same step in place, four ranks at the same time on this machine's cores and on links that
take no time, and the plan's time of a step's bytes, one after the other.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import polytempo as pt
from polytempo.bench.machine import machine
from polytempo.bench.tables import markdown
from polytempo.cluster import Link
from polytempo.partition.plan import LayerPlan
from polytempo.partition.plan.choice import Scheme
from polytempo.worlds import ProcessWorld

sys.path.append(str(Path(__file__).resolve().parents[1] / "compression"))
from lab import lab, on_every_host

HOSTS = 4
FAST_MBIT = 40_000
"""Links that take less than a fortieth of the time."""
GOODPUT = 1448 / 1514
"""The part of a shaped link's rate that TCP, IP and Ethernet leave of a frame, as `tc` counts it."""
LATENCY_S = 100e-6
_WARM_UP, _RUN_S = 2, 230.0
SCHEMES: tuple[Scheme, ...] = ("data", "hybrid")
ALONE = ["unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]
OWN_MEMORY = ["sh", "-c", 'mount -t tmpfs none /dev/shm && exec "$@"', "sh"]


@dataclass(frozen=True)
class Settings:
    """The settings of a run."""

    samples: int
    """The samples of a rank and step."""
    steps: int
    rounds: int
    bytes_per_s: float
    exchange: str


def network() -> nn.Module:
    """Images of 32 x 32; 71 thousand weights in convolutions, 10.7 million in fully connected layers."""
    torch.manual_seed(0)
    return nn.Sequential(
        *(nn.Conv2d(3, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(64, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()),
        *(nn.Linear(1024, 4096), nn.ReLU(), nn.Linear(4096, 1536), nn.ReLU(), nn.Linear(1536, 100)),
    )


def batch(samples: int, rank: int) -> tuple[Tensor, Tensor]:
    """One rank's batch."""
    random = torch.Generator().manual_seed(rank)
    return torch.randn(samples, 3, 32, 32, generator=random), torch.randint(0, 100, (samples,), generator=random)


def planned(settings: Settings) -> LayerPlan:
    """The network's plan, on links as fast as they carry data."""
    return pt.training.plan_layers(
        network(),
        batch(2, 0)[0],
        workers=HOSTS,
        batch_size=HOSTS * settings.samples,
        link=Link(LATENCY_S, settings.bytes_per_s),
    )


# ------------------------------------------------------------------------------------------------- measured


def on_host(settings: Settings, result: Path) -> None:
    """One rank. Ends with its launcher: then standard input closes."""
    threading.Thread(target=_end_with_launcher, daemon=True).start()
    torch.set_num_threads(1)
    world = pt.init(quiet=True)
    assert len(set(world.port.hosts)) == HOSTS, f"ranks share hosts: {world.port.hosts}"
    plan = planned(settings)
    contenders = {name: make(world, settings, plan) for name, make in _MAKES.items()}
    found: dict[str, list[Any]] = {name: [] for name in contenders}
    for _ in range(settings.rounds):
        for name, step in contenders.items():
            for _ in range(_WARM_UP):
                step()
            dist.barrier()
            before, begun_s = sum(world.trace.bytes_sent.values()), time.perf_counter()
            for _ in range(settings.steps):
                step()
            dist.barrier()
            took_s, sent = time.perf_counter() - begun_s, sum(world.trace.bytes_sent.values()) - before
            found[name].append([took_s / settings.steps, sent / settings.steps])
    if world.rank == 0:
        result.write_text(json.dumps(found), encoding="utf-8")
    dist.barrier()


def _end_with_launcher() -> None:
    while os.read(0, 1):
        pass
    os._exit(1)


Step = Callable[[], None]


def _step(net: nn.Module, settings: Settings, rank: int) -> Step:
    images, labels = batch(settings.samples, rank)
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
    pt.attach(net, optimizer, pt.strategies.sync_sgd(pt.collectives.ring))

    def step() -> None:
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(images), labels).backward()
        optimizer.step()

    return step


def _hybrid(world: ProcessWorld, settings: Settings, plan: LayerPlan) -> Step:
    exchange: Any = settings.exchange
    return _step(pt.hybrid(network(), plan, exchange=exchange), settings, world.rank)


_MAKES: dict[str, Callable[[ProcessWorld, Settings, LayerPlan], Step]] = {
    "data": lambda world, settings, plan: _step(network(), settings, world.rank),
    "hybrid": _hybrid,
}


# ------------------------------------------------------------------------------------------------- both


def measured(script: Path, mbit_per_s: int, settings: Settings) -> dict[str, Any]:
    """Rank 0's numbers, over a network that is made for this and gone afterwards."""
    with tempfile.TemporaryDirectory(prefix="polytempo-layers-") as folder, lab(script, HOSTS, mbit_per_s):
        result = Path(folder) / "seconds.json"
        told = json.dumps([vars(settings), str(result)])
        command = [*ALONE, *OWN_MEMORY, sys.executable, str(Path(__file__).resolve()), "host", told]
        on_every_host(script, HOSTS, command, _RUN_S)
        found: dict[str, Any] = json.loads(result.read_text(encoding="utf-8"))
    return found


def main() -> None:
    """Measure, predict, and print a table."""
    if sys.argv[1:2] == ["host"]:
        settings, result = json.loads(sys.argv[2])
        on_host(Settings(**settings), Path(result))
        return
    given = parsed(sys.argv[1:])
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # through the end of `lab`, which takes it down
    settings = Settings(given.samples, given.steps, given.rounds, GOODPUT * given.mbit * 1e6 / 8, given.exchange)
    plan = planned(settings)
    found = {rate: measured(given.lab, rate, settings) for rate in (FAST_MBIT, given.mbit)}
    fast, slow = (_medians(found[rate]) for rate in found)
    told_s = {name: fast[name][0] + plan.seconds_of(name) for name in SCHEMES}
    rows = []
    for name in SCHEMES:
        took_s, sent = slow[name]
        figures = (took_s, told_s[name], fast[name][0], plan.seconds_of(name))
        shown = [f"{1e3 * each:.1f} ms" for each in figures]
        rows.append((name, *shown[:2], f"{took_s / told_s[name]:.2f}", *shown[2:], f"{sent / 1e6:.2f} MB"))
    if given.json:
        whole = {"machine": machine(), "command": sys.argv, **vars(settings), "found": found, "predicted_s": told_s}
        given.json.write_text(json.dumps(whole, indent=2) + "\n", encoding="utf-8")
    print(f"divided: {', '.join(plan.model_parallel)} of {', '.join(each.volume.name for each in plan.layers)}")
    columns = ("a step", "measured", "predicted", "ratio", "on fast links", "exchanges, predicted", "a rank sends")
    print(markdown((columns, rows)))
    print(f"\nhybrid: {slow['data'][0] / slow['hybrid'][0]:.2f} times as fast as data parallelism")


def _medians(runs: dict[str, list[list[float]]]) -> dict[str, list[float]]:
    """Seconds and bytes of a step, by contender."""
    return {name: [statistics.median(column) for column in zip(*each, strict=True)] for name, each in runs.items()}


def parsed(argv: Sequence[str]) -> argparse.Namespace:
    """The arguments."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lab", type=Path, default=os.environ.get("POLYTEMPO_NETLAB"), help="the script of the lab")
    parser.add_argument("--mbit", type=int, default=1000)
    parser.add_argument("--samples", type=int, default=8, help="of a rank and step")
    parser.add_argument("--exchange", default="joined", choices=("joined", "turns", "slices"))
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args(argv)
    if given.lab is None:
        print("left out: name the script of a network of emulated hosts by --lab or POLYTEMPO_NETLAB")
        sys.exit(0)  # `make bench` runs every experiment that it can
    return given


if __name__ == "__main__":
    main()
