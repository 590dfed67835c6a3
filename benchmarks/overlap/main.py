"""The part of an exchange between two hosts that hides behind the backward pass.

    export POLYTEMPO_NETLAB=…/netlab.sh             # see compression/lab.py for the script; needs root
    python benchmarks/overlap/main.py --mbit 1000 --megabytes 32

A model of equal layers with a backward pass that computes nothing on the CPU and takes a given time, as on an
accelerator: by default, together, as long as its gradients take on the link. Steps of all contenders are timed in
turns, in one process a host. *Before* is `pt.attach` without the thread of `worlds/process/progress_thread.py`:
coroutines advance when they are launched and when the step waits for them. The limit is the longer one of backward and
the link's time for the bytes.
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
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD

import polytempo as pt
from polytempo.bench.machine import machine
from polytempo.bench.tables import markdown
from polytempo.collectives import halving_doubling, native, ring, tree
from polytempo.core import Route
from polytempo.engines.join.init import init
from polytempo.worlds import ProcessWorld

sys.path.append(str(Path(__file__).resolve().parents[1] / "compression"))
from lab import lab, on_every_host

GOODPUT = 0.95
"""The part of a link's rate that Ethernet, IP and TCP leave of frames of 1,500 bytes."""
ROUTES: dict[str, Route] = {"ring": ring, "tree": tree, "halving_doubling": halving_doubling, "native": native}
_HOSTS, _RUN_S = 2, 1800.0

Step = Callable[[], None]


class _Layer(torch.autograd.Function):
    """Hands its input on. Its backward takes `seconds`, and leaves a gradient as large as `weight`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, seconds: float) -> Tensor:
        ctx.save_for_backward(weight)
        ctx.seconds = seconds
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:  # type: ignore[override]
        time.sleep(ctx.seconds)
        return gradient, torch.full_like(ctx.saved_tensors[0], 1e-3), None


class Layers(nn.Module):
    """`num` layers of `numel` parameters, with backward passes of `seconds` each."""

    def __init__(self, num: int, numel: int, seconds: float) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.zeros(numel) for _ in range(num))
        self.seconds = seconds

    def forward(self, x: Tensor) -> Tensor:
        """The input, after all layers."""
        for weight in self.weights:
            x = _Layer.apply(x, weight, self.seconds)  # type: ignore[no-untyped-call]
        return x


def contenders(given: dict[str, Any]) -> dict[str, Step]:
    """A step of each, by name. A world for each route and mode: only `progress` differs."""
    bucket_bytes = given["bucket_bytes"]
    steps: dict[str, Step] = {"backward alone": _step(_model(given))}
    for name in given["routes"]:
        for mode in ("before", "ours"):
            world = ProcessWorld(dist.get_rank(), range(_HOSTS))
            if mode == "before":
                world.progress = None
            net = _model(given)
            optimizer = SGD(net.parameters(), lr=0.1)
            strategy = pt.strategies.sync_sgd(route=ROUTES[name])
            pt.attach(net, optimizer, strategy, world=world, bucket_bytes=bucket_bytes, on_drift="ignore")
            steps[f"{name}, {mode}"] = _step(net, optimizer)
    steps["DDP"] = _step(DistributedDataParallel(_model(given), bucket_cap_mb=bucket_bytes / 2**20))
    return steps


def _model(given: dict[str, Any]) -> Layers:
    return Layers(given["layers"], given["numel"], given["layer_s"])


def _step(net: nn.Module, optimizer: SGD | None = None) -> Step:
    own = optimizer or SGD(net.parameters(), lr=0.1)

    def step() -> None:
        own.zero_grad()
        net(torch.zeros(1, requires_grad=True)).sum().backward()
        own.step()

    return step


def timed(given: dict[str, Any]) -> dict[str, list[float]]:
    """Seconds a step of each contender on the slower rank, one figure a round, in turns."""
    steps = contenders(given)
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for number in range(given["rounds"] + 2):
        for name, step in steps.items():
            dist.barrier()
            begun = time.perf_counter()
            step()
            most = torch.tensor([time.perf_counter() - begun], dtype=torch.float64)
            dist.all_reduce(most, op=dist.ReduceOp.MAX)
            if number > 1:  # the first open connections, and DDP rebuilds its buckets
                seconds[name].append(float(most))
    return seconds


def on_host(given: dict[str, Any]) -> None:
    """One rank's process on a host of the lab. Ends with its launcher: then standard input closes."""
    threading.Thread(target=_end_with_launcher, daemon=True).start()
    torch.set_num_threads(1)
    init(quiet=True)
    seconds = timed(given)
    if dist.get_rank() == 0:
        Path(given["result"]).write_text(json.dumps(seconds), encoding="utf-8")
    dist.barrier()


def _end_with_launcher() -> None:
    while os.read(0, 1):
        pass
    os._exit(1)


def measured(script: Path, mbit_per_s: int, given: dict[str, Any]) -> dict[str, list[float]]:
    """Seconds a step, over a network that is made for this and gone afterwards."""
    with tempfile.TemporaryDirectory(prefix="polytempo-overlap-") as folder, lab(script, _HOSTS, mbit_per_s):
        result = Path(folder) / "seconds.json"
        told = json.dumps({**given, "result": str(result)})
        on_every_host(script, _HOSTS, [sys.executable, str(Path(__file__).resolve()), "host", told], _RUN_S)
        found: dict[str, list[float]] = json.loads(result.read_text(encoding="utf-8"))
    return found


def table(seconds: dict[str, list[float]], link_s: dict[str, float], backward_s: float) -> str:
    """Milliseconds a step, medians."""
    middle = {name: 1e3 * statistics.median(found) for name, found in seconds.items()}
    rows = []
    for route, busy_s in link_s.items():
        before, ours = middle[f"{route}, before"], middle[f"{route}, ours"]
        limit = 1e3 * max(backward_s, busy_s)
        figures = (ours, middle["DDP"], limit, before)
        rows.append((route, *(f"{figure:.0f}" for figure in figures), f"{before / ours:.2f}"))
    print(f"backward alone: {middle['backward alone']:.0f} ms", file=sys.stderr)
    return markdown((("route", "ours", "gloo DDP", "limit", "before", "before / ours"), rows))


def main() -> None:
    """Measure and print a table."""
    if sys.argv[1:2] == ["host"]:
        on_host(json.loads(sys.argv[2]))
        return
    given, arguments = parsed(sys.argv[1:])
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # through the end of `lab`, which takes it down
    seconds = measured(arguments.lab, arguments.mbit, given)
    if arguments.json:
        found = {"machine": machine(), "command": sys.argv, **given, "seconds": seconds}
        arguments.json.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    whole_s = 4 * given["layers"] * given["numel"] / given["bytes_per_s"]
    link_s = dict.fromkeys(
        given["routes"], whole_s
    )  # of two ranks, each sends the buffer once, both ways at the same time
    print(table(seconds, link_s, given["layers"] * given["layer_s"]))


def parsed(argv: Sequence[str]) -> tuple[dict[str, Any], argparse.Namespace]:
    """The arguments of both hosts, and the rest."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lab", type=Path, default=os.environ.get("POLYTEMPO_NETLAB"), help="the script of the lab")
    parser.add_argument("--mbit", type=int, default=1000)
    parser.add_argument("--megabytes", type=int, default=32, help="of gradients")
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--bucket-megabytes", type=int, default=4)
    parser.add_argument("--backward", type=float, help="seconds; default: the gradients' time on the link")
    parser.add_argument("--routes", nargs="+", choices=ROUTES, default=list(ROUTES))
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args(argv)
    if arguments.lab is None:
        print("left out: name the script of a network of emulated hosts by --lab or POLYTEMPO_NETLAB")
        sys.exit(0)  # `make bench` runs every experiment that it can
    bytes_per_s = GOODPUT * arguments.mbit * 1e6 / 8
    num_bytes = arguments.megabytes * 2**20
    backward_s = num_bytes / bytes_per_s if arguments.backward is None else arguments.backward
    given = {
        "routes": arguments.routes,
        "rounds": arguments.rounds,
        "layers": arguments.layers,
        "numel": num_bytes // 4 // arguments.layers,
        "layer_s": backward_s / arguments.layers,
        "bucket_bytes": arguments.bucket_megabytes * 2**20,
        "bytes_per_s": bytes_per_s,
    }
    return given, arguments


if __name__ == "__main__":
    main()
