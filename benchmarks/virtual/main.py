"""The speed of the virtual world: operations a second, rings on meta tensors, workers that really train, and prices.

python benchmarks/virtual/main.py [messages rings exact batched many priced] [--workers 256] [--steps 200]

Seconds are a core's (`time.process_time`): a shared machine gives them to this program later.
"""

from __future__ import annotations

import argparse
import os
import resource
import signal
import subprocess
import sys
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import TensorDataset

import polytempo as pt
from polytempo.cluster import Cluster, Link
from polytempo.collectives import ring, ring_price
from polytempo.core import Port
from polytempo.jobs import find

LINK = Link(latency_s=5e-6, bytes_per_s=25e9)
NUM_VALUES = 10**9
"""4 GB of float32."""


def messages(num_messages: int = 20_000) -> None:
    """A ping-pong: this program's cost of one message."""

    async def program(port: Port) -> None:
        ball = torch.zeros(1)
        for _ in range(num_messages // 2):
            if port.rank == 0:
                await port.send(ball, 1)
                await port.recv(ball, 1)
            else:
                await port.recv(ball, 0)
                await port.send(ball, 0)

    begin_s = time.process_time()
    pt.worlds.VirtualWorld(Cluster(network=LINK), 2).run(program)
    seconds = time.process_time() - begin_s
    print(
        f"| ping-pong, {num_messages:,} messages | {seconds:.2f} s | {1e6 * seconds / num_messages:.1f} µs a message |"
    )


def rings() -> None:
    """The closed form for 1,024 ranks, and the simulations that it is held to."""
    begin_s = time.process_time()
    price = ring_price(1024, 4.0 * NUM_VALUES, LINK.latency_s, LINK.bytes_per_s)
    seconds = time.process_time() - begin_s
    print(f"| ring, 1,024 ranks, 4 GB, closed form | {seconds:.6f} s | {price.seconds:.6f} virtual s |")

    async def program(port: Port) -> None:
        await ring(port, torch.empty(NUM_VALUES, device="meta"))

    for num_ranks, how, at_once in ((64, "every message", False), (64, "whole", True), (1024, "whole", True)):
        begin_s = time.process_time()
        simulated_s = pt.worlds.VirtualWorld(Cluster(network=LINK), num_ranks, whole_sums=at_once).run(program).seconds
        seconds = time.process_time() - begin_s
        price = ring_price(num_ranks, 4.0 * NUM_VALUES, LINK.latency_s, LINK.bytes_per_s)
        error = abs(simulated_s / price.seconds - 1)
        told = f"{simulated_s:.6f} virtual s, closed form {error:.1e} away"
        print(f"| ring, {num_ranks:,} ranks, 4 GB, {how} | {seconds:.2f} s | {told} |")


def training(workers: int, steps: int, *, batched: bool) -> None:
    """Real gradients for every virtual worker."""
    begin_s = time.process_time()
    result = pt.simulate(
        find("digits"),
        pt.strategies.sync_sgd(),
        workers,
        pt.cluster.ethernet(),
        steps=steps,
        batch_size=4,
        epochs=1000,
        batched=batched,
    )
    seconds = time.process_time() - begin_s
    how = "batched" if batched else "exact"
    print(
        f"| digits, {workers} workers, {result.steps} steps, {how} | {seconds:.1f} s | accuracy {result.accuracy:.1%}, "
        f"{1e6 * seconds / (workers * result.steps):.0f} µs a worker and step |"
    )


def many(workers: int = 1000, steps: int = 100) -> None:
    """Samples a second of many workers, without setting them up: from two lengths of a run."""
    job = find("digits")
    num_samples = workers * job.batch_size  # an epoch is a step, or every other one would be of the rest

    def data(folder: Path | None) -> pt.Data:
        train: Any = job.data(folder).train
        again = torch.arange(num_samples) % len(train)
        return pt.Data(TensorDataset(*(tensor[again] for tensor in train.tensors)))

    seconds, samples = [], []
    for length in (1, 1, 1 + steps):  # the first one makes the shared objects
        begin_s = time.process_time()
        result = pt.simulate(
            replace(job, data=data), pt.strategies.sync_sgd(), workers, steps=length, epochs=1000, batched=True
        )
        seconds.append(time.process_time() - begin_s)
        samples.append(result.samples)
    rate = (samples[2] - samples[1]) / (seconds[2] - seconds[1])
    print(
        f"| digits, {workers:,} workers with {job.batch_size} samples each, batched "
        f"| {seconds[2]:.1f} s for {1 + steps} steps, {seconds[0]:.1f} s for one | {rate:,.0f} samples/s |"
    )


_LONGEST_S, _MOST_BYTES = 60, 6 << 30
"""The limits of one price: seconds of a core, loading included, and address space."""


def priced(workers: int, strategies: list[str]) -> None:
    """Two steps of each strategy without values, each in a process of its own with measured memory."""
    for strategy in strategies:
        asked = [sys.executable, __file__, "one", "--workers", str(workers), "--strategy", strategy]
        done = subprocess.run(asked, capture_output=True, text=True, timeout=60 * _LONGEST_S, check=False)
        said = done.stdout.strip() if done.returncode == 0 else done.stderr.strip().rpartition("\n")[2][:200]
        if done.returncode == -signal.SIGXCPU:
            said = f"more than {_LONGEST_S} s"
        print(f"| {strategy}, {workers:,} workers, 2 steps | {said} |", flush=True)


def one(workers: int, strategy: str) -> None:
    """The program that `priced` starts."""
    resource.setrlimit(resource.RLIMIT_AS, (_MOST_BYTES, _MOST_BYTES))
    resource.setrlimit(resource.RLIMIT_CPU, (_LONGEST_S, 2 * _LONGEST_S))
    made, job = pt.parse_strategy(strategy), find("digits")
    pt.simulate(job, pt.strategies.sync_sgd(), 2, meta=True, steps=1)  # loads shared modules once
    begin_s = time.process_time()
    cluster = None if made.one_copy is not None else pt.cluster.ethernet()
    result = pt.simulate(job, made, workers, cluster, meta=True, steps=2)
    seconds = time.process_time() - begin_s
    with open(f"/proc/{os.getpid()}/status", encoding="ascii") as status:
        peak = next(int(line.split()[1]) for line in status if line.startswith("VmHWM"))
    print(f"{seconds:.1f} s, {peak / 1e6:.2f} GB | {result.seconds:.6f} virtual s")


PRICED = [
    *("sync_sgd", "sync_sgd(route=ring)", "sync_sgd(route=tree)", "sync_sgd(route=star)", "local_sgd", "diloco"),
    *("parameter_averaging", "post_local_sgd", "slowmo", "delayed_sgd", "shared_memory", "hogwild", "adasum"),
    *("robust_sgd", "bf16_sgd", "dgc", "int8_sgd", "one_bit_sgd", "power_sgd", "qsgd", "sign_sgd", "terngrad"),
    *("threshold_sgd", "top_k_sgd", "gossip", "stochastic_gradient_push", "async_sgd", "downpour", "easgd", "ssp"),
    *("softsync", "backup_workers", "dc_asgd", "staleness_aware"),
]


def main() -> None:
    """Measure and print the rows of a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("rows", nargs="*", default=["messages", "rings", "exact", "batched", "many"])
    parser.add_argument("--workers", type=int)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--strategy", action="append")
    given = parser.parse_args()
    torch.set_num_threads(1)
    measure = {
        "messages": messages,
        "rings": rings,
        "exact": partial(training, given.workers or 256, given.steps, batched=False),
        "batched": partial(training, given.workers or 256, given.steps, batched=True),
        "many": partial(many, given.workers or 1000),
        "priced": partial(priced, given.workers or 10_000, given.strategy or PRICED),
        "one": lambda: one(given.workers, given.strategy[0]),
    }
    for row in given.rows:
        measure[row]()


if __name__ == "__main__":
    main()
