"""The cost of codecs: each kernel against a memory copy of the tensor, and against the same codec in torch's
operations.

Two processes live all the time and take turns: one with the native core, one without it, where codecs are written in
torch. Both hold 25 million float32 and compute with one thread. A figure is the median over rounds of the ratio to a
copy of the tensor in the same process and round.

    python benchmarks/compression/main.py [--quick] [--only kernels low_rank hooks] [--codecs 'bf16, feedback(int8)']
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from hooks import HOOKS, hooked
from torch import Tensor
from torch.nn import functional

from polytempo import aggregation
from polytempo.bench.compression import costs
from polytempo.bench.models import mlp
from polytempo.bench.tables import duration, markdown
from polytempo.bench.turns import Measurement, figure, ratio
from polytempo.cli.bench.bench import candidate
from polytempo.core import ALONE, Codec
from polytempo.engines.join.init import init
from polytempo.engines.local_engine import launch
from polytempo.engines.processes.worker import RankInfo
from polytempo.native.library import OFF_VARIABLE, why_not
from polytempo.spec.text.call import split_calls

SIDE = 5000
"""25 million float32: 100 MB, far beyond any cache."""
GOALS = {
    "fp16": 1.5,
    "bf16": 1.5,
    "int8": 2.0,
    "dynamic8": None,
    "one_bit": 2.5,
    "sign": None,
    "threshold(density=0.01)": 2.5,
    "top_k(ratio=0.01)": 4.0,
    "random_k(ratio=0.01)": None,
    "qsgd": 4.0,
    "terngrad": 4.0,
    "natural": None,
}
"""Codecs, and the most copies that encoding may take: with the residual, for codecs that need feedback."""
UNFED = {"fp16", "bf16", "qsgd", "terngrad", "natural"}
"""Strategies use these without a residual."""
MATRICES, MATRIX_SIDE, RANK = 25, 1000, 4


# ------------------------------------------------------------------------------------------- a process of a contender


class Bench:
    """The tensors, and the calls with them."""

    def __init__(self, side: int) -> None:
        torch.manual_seed(0)
        self.x = torch.randn(side, side)
        self.residual, self.out = torch.zeros_like(self.x), torch.zeros_like(self.x)

    def calls(self, operation: str, text: str) -> Callable[[], object]:
        """One call of `operation` with the codec that `text` spells."""
        if operation == "copy":
            return lambda: self.out.copy_(self.x)
        codec = candidate(text).codec
        assert codec is not None
        self.residual.zero_()
        self.out.zero_()
        room = torch.zeros(codec.wire_bytes(self.x), dtype=torch.uint8).view(codec.wire_dtype(self.x))
        if operation == "add_":
            wire, _ = codec.encode(self.x, codec.init(self.x), ALONE, room)
            return lambda: codec.add_(wire, self.out)
        return self._encoding(operation, codec, room)

    def _encoding(self, operation: str, codec: Codec, room: Tensor) -> Callable[[], object]:
        state, step = codec.init(self.x), 0

        def call() -> None:
            nonlocal state, step
            step += 1
            when = ALONE._replace(step=step)
            if operation == "encode_":
                _, state = codec.encode_(self.x, self.residual, state, when, room)
            else:
                _, state = codec.encode(self.x, state, when, room)

        return call


def serve(side: int) -> None:
    """Answer lines of `{"operation", "codec", "calls"}` with seconds a call."""
    torch.set_num_threads(1)
    reason = why_not()
    if reason and os.environ[OFF_VARIABLE] == "1":
        raise RuntimeError(f"there are no kernels to measure: {reason}")
    bench = Bench(side)
    for line in sys.stdin:
        asked = json.loads(line)
        call = bench.calls(asked["operation"], asked["codec"])
        seconds = []
        for _ in range(asked["calls"] + 1):
            begun = time.perf_counter()
            call()
            seconds.append(time.perf_counter() - begun)
        print(json.dumps(statistics.median(seconds[1:])), flush=True)


class Served:
    """The process of a contender, as the main program sees it. It ends when its input does."""

    def __init__(self, side: int, native: bool) -> None:
        environ = os.environ | {OFF_VARIABLE: "1" if native else "0", "OMP_NUM_THREADS": "1"}
        self._process = subprocess.Popen(
            [sys.executable, str(Path(__file__).resolve()), "serve", str(side)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environ,
        )

    def seconds(self, operation: str, codec: str, calls: int) -> float:
        """The seconds of a call: the median, after one that warms up."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps({"operation": operation, "codec": codec, "calls": calls}) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        if not answer:
            raise RuntimeError(f"the process that measures {operation} of {codec} has ended; it says why above")
        return float(json.loads(answer))

    def close(self) -> None:
        """Let it go."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(timeout=10)


# ------------------------------------------------------------------------------------------------------------ kernels


def kernels(side: int, rounds: int, calls: int, codecs: Sequence[str]) -> list[dict[str, Any]]:
    """Encoding with and without a residual, and adding decoded values, of each codec."""
    ours, torchs = Served(side, native=True), Served(side, native=False)
    rows: list[dict[str, Any]] = []
    try:
        for codec in codecs:
            fed = candidate(codec).codec.facts.memory != "own"  # has a residual of its own, as dgc
            for operation in ("encode", *(["encode_"] if fed else []), "add_"):
                found: dict[str, list[float]] = {"copy": [], "ours": [], "torch's copy": [], "torch": []}
                for number in range(rounds):
                    parts = [(ours, "copy", "ours", calls), (torchs, "torch's copy", "torch", 1)]  # it takes seconds
                    for served, copy, name, its_calls in parts[:: -1 if number % 2 else 1]:
                        found[copy].append(served.seconds("copy", codec, calls))
                        found[name].append(served.seconds(operation, codec, its_calls))
                rows.append({"codec": codec, "operation": operation, **found})
                print(_kernel_row(rows[-1]), flush=True)
    finally:
        ours.close()
        torchs.close()
    return rows


COLUMNS = ("codec", "operation", "copy", "ours", "of a copy", "goal", "torch's operations", "of ours")


def _kernel_row(row: dict[str, Any]) -> str:
    copy, ours, torchs = (figure(row[name]) for name in ("copy", "ours", "torch"))
    goal = GOALS.get(row["codec"])
    meant = row["operation"] == ("encode" if row["codec"] in UNFED else "encode_")
    cells = (
        *(row["codec"], row["operation"], _ms(copy), _ms(ours), f"{ratio(ours, copy).median:.2f}"),
        *(f"at most {goal}" if goal and meant else "", _ms(torchs), f"{ratio(torchs, ours).median:.1f}"),
    )
    return f"| {' | '.join(cells)} |"


def _ms(found: Measurement) -> str:
    return duration(found.median * 1e6)


# ------------------------------------------------------------------------------------------------------------ PowerSGD


def low_rank(rounds: int) -> list[dict[str, Any]]:
    """PowerSGD's computing for 25 square matrices, one of two ranks, and how many operations a second that is."""
    torch.set_num_threads(1)
    gradients = [{f"w{i}": torch.randn(MATRIX_SIDE, MATRIX_SIDE) for i in range(MATRICES)} for _ in range(2)]
    flat = torch.zeros(MATRICES * MATRIX_SIDE**2)
    copies = []
    for _ in range(rounds + 1):
        begun = time.perf_counter()
        flat.copy_(torch.cat([t.view(-1) for t in gradients[0].values()]))
        copies.append(time.perf_counter() - begun)
    seconds = costs(aggregation.low_rank(rank=RANK), gradients, rounds).computing_s
    # M Q, M^T P and P Q^T, and Gram-Schmidt on P: multiplications and additions.
    flops = MATRICES * (6 * MATRIX_SIDE**2 * RANK + 2 * MATRIX_SIDE * RANK**2)
    row = {"seconds": seconds, "copy_twice": statistics.median(copies[1:]), "gflops": flops / seconds / 1e9}
    print(f"| low_rank(rank={RANK}), {MATRICES} of {MATRIX_SIDE} x {MATRIX_SIDE} | {duration(seconds * 1e6)} |", end="")
    print(f" {row['gflops']:.1f} GFLOP/s | {seconds / row['copy_twice']:.2f} of two copies |", flush=True)
    return [row]


# --------------------------------------------------------------------------------------------------------------- hooks


def hooks(turns: int, steps: int) -> list[dict[str, Any]]:
    """A step of DDP with torch's hooks and with ours, two workers on this host over gloo, in turns."""

    def work(rank_info: RankInfo) -> dict[str, list[float]]:
        init(backend="gloo", quiet=True)
        torch.manual_seed(0)
        batch = (torch.randn(16, 784), torch.randint(10, (16,)))
        contenders = {name: _ddp_step(name, batch) for name in HOOKS}
        seconds: dict[str, list[float]] = {name: [] for name in contenders}
        names = list(contenders)
        for turn in range(turns + 1):
            first = turn % len(names)
            for name in (*names[first:], *names[:first]):
                dist.barrier()
                begun = time.perf_counter()
                for _ in range(steps):
                    contenders[name]()
                if turn:  # the first builds buckets again, and begins PowerSGD
                    seconds[name].append((time.perf_counter() - begun) / steps)
        return seconds

    seconds = launch(work, 2, threads=1)[0]
    for name, peer in HOOKS.items():
        against = f"{ratio(figure(seconds[peer]), figure(seconds[name])).median:.2f}" if peer else ""
        print(f"| {name} | {_ms(figure(seconds[name]))} | {peer or ''} | {against} |", flush=True)
    return [{"name": name, "seconds": found} for name, found in seconds.items()]


def _ddp_step(name: str, batch: tuple[Tensor, Tensor]) -> Callable[[], None]:
    model = hooked(mlp(), name)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def step() -> None:
        optimizer.zero_grad()
        functional.cross_entropy(model(batch[0]), batch[1]).backward()
        optimizer.step()

    return step


def main() -> None:
    """Measure and print the tables."""
    if sys.argv[1:2] == ["serve"]:
        serve(int(sys.argv[2]))
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts = ("kernels", "low_rank", "hooks")
    parser.add_argument("--quick", action="store_true", help="a rough look")
    parser.add_argument("--only", nargs="+", choices=parts, default=list(parts))
    parser.add_argument("--codecs", help="with commas between them; default: all that have kernels")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    quick = arguments.quick
    found: dict[str, Any] = {}
    if "kernels" in arguments.only:
        codecs = split_calls(arguments.codecs) if arguments.codecs else list(GOALS)
        print(markdown((COLUMNS, [])), end="")
        found["kernels"] = kernels(SIDE, 2 if quick else 5, 2 if quick else 5, codecs)
    if "low_rank" in arguments.only:
        found["low_rank"] = low_rank(3 if quick else 11)
    if "hooks" in arguments.only:
        found["hooks"] = hooks(*(3, 3) if quick else (15, 5))
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
