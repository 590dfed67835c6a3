"""Four stages on four hosts, measured and predicted: seconds of a step, by schedule, over emulated links.

    export POLYTEMPO_NETLAB=…/netlab.sh      # see compression/lab.py for the script; needs root
    python benchmarks/pipeline/hosts.py [--mbit 1000] [--forward-ms 4]

One process a host, one thread each. A host is a network namespace with a PID namespace and a /dev/shm of its own, so no
memory is shared. The hosts share this machine's cores. So that they do not compute for each other, a layer waits for an
accelerator's time; the cores only send, receive, and run the executor.

The prediction is the virtual world's: the same stages, schedule and sizes, with those times, on links of that rate.
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
from polytempo.core import Port
from polytempo.partition import schedules
from polytempo.partition.cut import Cut
from polytempo.partition.cutting import cut
from polytempo.runs.own_loop.pipeline import pipeline
from polytempo.training.pipeline.stage_program import MicroBatch, StageProgram
from polytempo.worlds import ProcessWorld, VirtualWorld

sys.path.append(str(Path(__file__).resolve().parents[1] / "compression"))
from lab import lab, on_every_host

STAGES, MICRO_BATCHES, SAMPLES = 4, 8, 64
WIDTH = 16_384
"""The width of a layer: numbers that a sample sends to the next stage."""
GOODPUT = 1448 / 1514
"""The part of a shaped link's rate that TCP, IP and Ethernet leave of a frame, as `tc` counts it."""
WARM_UP = 6
"""Steps until every schedule's pipeline is full."""
_RUN_S = 900.0
SCHEDULES: dict[str, Callable[[], schedules.Schedule]] = {
    "gpipe": lambda: schedules.gpipe(STAGES, MICRO_BATCHES, recompute=False),
    "one_f_one_b": lambda: schedules.one_f_one_b(STAGES, MICRO_BATCHES),
    "zero_bubble": lambda: schedules.zero_bubble(STAGES, MICRO_BATCHES),
    "pipedream_2bw": lambda: schedules.pipedream_2bw(STAGES, MICRO_BATCHES),
    "ddg": lambda: schedules.ddg(STAGES),
}
ALONE = ["unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]
OWN_MEMORY = ["sh", "-c", 'mount -t tmpfs none /dev/shm && exec "$@"', "sh"]


@dataclass(frozen=True)
class Settings:
    """The settings of a run."""

    forward_s: float
    """A layer's time for a micro-batch; backward takes twice as long."""
    steps: int
    bytes_per_s: float


class _Waits(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, seconds: float) -> Tensor:
        ctx.save_for_backward(x)
        ctx.seconds = seconds
        time.sleep(seconds)
        return x * weight

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:  # type: ignore[override]
        time.sleep(2 * ctx.seconds)
        return gradient, gradient[0], None


class Layer(nn.Module):
    """An accelerator's layer: `seconds_per_sample` for a sample's forward pass, twice that for its backward pass."""

    def __init__(self, width: int, seconds_per_sample: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.seconds_per_sample = seconds_per_sample

    def forward(self, x: Tensor) -> Tensor:
        """x: (samples, width)."""
        out: Tensor = _Waits.apply(x, self.weight, len(x) * self.seconds_per_sample)  # type: ignore[no-untyped-call]
        return out


def made(settings: Settings, *, waits: bool) -> tuple[nn.Module, Tensor]:
    """A model of one layer a stage, and a batch."""
    torch.manual_seed(0)
    each_s = settings.forward_s / (SAMPLES // MICRO_BATCHES) if waits else 0.0
    return nn.Sequential(*[Layer(WIDTH, each_s) for _ in range(STAGES)]), torch.randn(SAMPLES, WIDTH)


def half_square(output: Tensor, target: Tensor) -> Tensor:
    """A loss that costs next to nothing."""
    return (output * target).mean()


def sgd(parameters: Any) -> torch.optim.Optimizer:
    """SGD without momentum."""
    return torch.optim.SGD(parameters, lr=1e-3)


# ------------------------------------------------------------------------------------------------- measured


def on_host(settings: Settings, names: Sequence[str], result: Path) -> None:
    """One stage. Ends with its launcher: then standard input closes."""
    threading.Thread(target=_end_with_launcher, daemon=True).start()
    torch.set_num_threads(1)
    world = pt.init(quiet=True)
    assert len(set(world.port.hosts)) == STAGES, f"ranks share hosts: {world.port.hosts}"
    found = {name: _measured(world, settings, SCHEDULES[name]()) for name in names}
    if world.rank == 0:
        result.write_text(json.dumps(found), encoding="utf-8")
    dist.barrier()


def _end_with_launcher() -> None:
    while os.read(0, 1):
        pass
    os._exit(1)


def _measured(world: ProcessWorld, settings: Settings, schedule: schedules.Schedule) -> dict[str, list[float]]:
    """Each stage's seconds of a step, of its computing, and of the update."""
    model, x = made(settings, waits=True)
    begins = [str(number) for number in range(1, STAGES)]
    pipe = pipeline(model, sgd, half_square, schedule, sample=x[:1], by=begins, world=world)
    update_s, own_step = [0.0], pipe.optimizer.step

    def timed_step(*args: Any) -> Any:
        begun_s = time.perf_counter()
        own_step(*args)
        update_s[0] += time.perf_counter() - begun_s

    pipe.optimizer.step = timed_step  # type: ignore[method-assign]
    key = (world.rank, "compute")
    for _ in range(WARM_UP):
        pipe.step(x, x)
    before_s, begun_s, update_s[0] = world.trace.seconds[key], time.perf_counter(), 0.0
    for _ in range(settings.steps):
        pipe.step(x, x)
    step_s, computed_s = time.perf_counter() - begun_s, world.trace.seconds[key] - before_s
    pipe.finish()
    own = torch.tensor([step_s, computed_s, update_s[0]], dtype=torch.float64) / settings.steps
    rows = [torch.empty_like(own) for _ in range(STAGES)]
    dist.all_gather(rows, own)
    columns = torch.stack(rows).t().tolist()
    return dict(zip(("step_s", "computed_s", "update_s"), columns, strict=True))


# ------------------------------------------------------------------------------------------------- predicted


def predicted(settings: Settings, schedule: schedules.Schedule, computed_s: float, update_s: float) -> float:
    """Seconds of a step in the virtual world, with stages that compute `computed_s` in one, and update in
    `update_s`."""
    model, x = made(settings, waits=False)
    parts = cut(model, sample=x[:1], by=[str(number) for number in range(1, STAGES)])
    link = pt.cluster.ethernet(gbit_per_s=settings.bytes_per_s * 8e-9)
    split = _micro_batches(parts, x, schedule.micro_batches, computed_s * STAGES * link.flops_per_s)
    ends: dict[int, list[float]] = {stage: [] for stage in range(STAGES)}

    async def program(port: Port) -> None:
        async def update() -> None:
            await port.compute(_nothing, update_s * link.flops_per_s)

        stage = StageProgram(parts, schedule, port.rank, update)
        for _ in range(WARM_UP + settings.steps):
            await stage.step(port, split)
            ends[port.rank].append(await port.now())

    VirtualWorld(link, STAGES).run(program)
    return max(own[-1] - own[WARM_UP - 1] for own in ends.values()) / settings.steps


def _micro_batches(parts: Cut, x: Tensor, count: int, flops: float) -> list[MicroBatch]:
    """The parts of a batch, with passes through the whole model that cost `flops` together."""

    def one(piece: Tensor) -> MicroBatch:
        layouts = parts.layouts(piece)
        return MicroBatch(
            (piece,), layouts, lambda output: half_square(output, piece), lambda part: None, flops / count
        )

    return [one(piece) for piece in x.chunk(count)]


def _nothing() -> None:
    """An action that costs time alone."""


# ------------------------------------------------------------------------------------------------- both


def measured(script: Path, mbit_per_s: int, settings: Settings, names: Sequence[str]) -> dict[str, Any]:
    """The stages' numbers, over a network that is made for this and gone afterwards."""
    with tempfile.TemporaryDirectory(prefix="polytempo-stages-") as folder, lab(script, STAGES, mbit_per_s):
        result = Path(folder) / "seconds.json"
        told = json.dumps([vars(settings), list(names), str(result)])
        command = [*ALONE, *OWN_MEMORY, sys.executable, str(Path(__file__).resolve()), "host", told]
        on_every_host(script, STAGES, command, _RUN_S)
        found: dict[str, Any] = json.loads(result.read_text(encoding="utf-8"))
    return found


def main() -> None:
    """Measure, predict, and print a table."""
    if sys.argv[1:2] == ["host"]:
        settings, names, result = json.loads(sys.argv[2])
        on_host(Settings(**settings), names, Path(result))
        return
    given = parsed(sys.argv[1:])
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # through the end of `lab`, which takes it down
    bytes_per_s = GOODPUT * given.mbit * 1e6 / 8
    settings = Settings(given.forward_ms / 1e3, given.steps, bytes_per_s)
    runs = [measured(given.lab, given.mbit, settings, given.only) for _ in range(given.rounds)]
    rows = []
    for name in given.only:
        step_s = statistics.median(max(run[name]["step_s"]) for run in runs)
        computed_s = statistics.median(statistics.mean(run[name]["computed_s"]) for run in runs)
        update_s = statistics.median(statistics.mean(run[name]["update_s"]) for run in runs)
        told_s = predicted(settings, SCHEDULES[name](), computed_s, update_s)
        figures = (
            f"{1e3 * step_s:.1f} ms",
            f"{1e3 * told_s:.1f} ms",
            f"{step_s / told_s:.2f}",
            f"{1e3 * computed_s:.1f} ms",
        )
        rows.append((f"`{name}`", *figures))
    if given.json:
        told = {"machine": machine(), "command": sys.argv, **vars(settings), "runs": runs}
        given.json.write_text(json.dumps(told, indent=2) + "\n", encoding="utf-8")
    print(markdown((("schedule", "measured", "predicted", "ratio", "a stage computes"), rows)))


def parsed(argv: Sequence[str]) -> argparse.Namespace:
    """The arguments."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lab", type=Path, default=os.environ.get("POLYTEMPO_NETLAB"), help="the script of the lab")
    parser.add_argument("--mbit", type=int, default=1000)
    parser.add_argument("--forward-ms", type=float, default=4.0, help="that a layer waits for a micro-batch")
    parser.add_argument("--only", nargs="+", choices=SCHEDULES, default=list(SCHEDULES))
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args(argv)
    if given.lab is None:
        print("left out: name the script of a network of emulated hosts by --lab or POLYTEMPO_NETLAB")
        sys.exit(0)  # `make bench` runs every experiment that it can
    return given


if __name__ == "__main__":
    main()
