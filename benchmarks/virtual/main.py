"""How fast the virtual world is: operations a second, rings on meta tensors, and 256 workers that really train.

python benchmarks/virtual/main.py [--workers 256] [--steps 200]
"""

from __future__ import annotations

import argparse
import time

import torch

import polytempo as pt
from polytempo.cluster import Cluster, Link
from polytempo.collectives import ring, ring_price
from polytempo.core import Port
from polytempo.jobs import find

LINK = Link(latency_s=5e-6, bytes_per_s=25e9)
NUM_VALUES = 10**9
"""4 GB of float32."""


def messages(num_messages: int = 20_000) -> None:
    """A ping-pong: what one message costs this program."""

    async def program(port: Port) -> None:
        ball = torch.zeros(1)
        for _ in range(num_messages // 2):
            if port.rank == 0:
                await port.send(ball, 1)
                await port.recv(ball, 1)
            else:
                await port.recv(ball, 0)
                await port.send(ball, 0)

    begin_s = time.perf_counter()
    pt.VirtualWorld(Cluster(network=LINK), 2).run(program)
    seconds = time.perf_counter() - begin_s
    print(
        f"| ping-pong, {num_messages:,} messages | {seconds:.2f} s | {1e6 * seconds / num_messages:.1f} µs a message |"
    )


def rings() -> None:
    """The closed form for 1,024 ranks, and the simulation that it is held to for 64."""
    begin_s = time.perf_counter()
    price = ring_price(1024, 4.0 * NUM_VALUES, LINK.latency_s, LINK.bytes_per_s)
    seconds = time.perf_counter() - begin_s
    print(f"| ring, 1,024 ranks, 4 GB, closed form | {seconds:.6f} s | {price.seconds:.6f} virtual s |")

    async def program(port: Port) -> None:
        await ring(port, torch.empty(NUM_VALUES, device="meta"))

    begin_s = time.perf_counter()
    simulated_s = pt.VirtualWorld(Cluster(network=LINK), 64).run(program).seconds
    seconds = time.perf_counter() - begin_s
    price = ring_price(64, 4.0 * NUM_VALUES, LINK.latency_s, LINK.bytes_per_s)
    error = abs(simulated_s / price.seconds - 1)
    told = f"{simulated_s:.6f} virtual s, closed form {error:.1e} away"
    print(f"| ring, 64 ranks, 4 GB, every message | {seconds:.2f} s | {told} |")


def training(workers: int, steps: int) -> None:
    """Real gradients for every virtual worker."""
    begin_s = time.perf_counter()
    result = pt.simulate(
        find("digits"), pt.strategies.sync_sgd(), workers, pt.cluster.ethernet(), steps=steps, batch_size=4, epochs=1000
    )
    seconds = time.perf_counter() - begin_s
    print(
        f"| digits, {workers} workers, {result.steps} steps | {seconds:.1f} s | accuracy {result.accuracy:.1%}, "
        f"{1e6 * seconds / (workers * result.steps):.0f} µs a worker and step |"
    )


def main() -> None:
    """Measure and print the rows of a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, default=256)
    parser.add_argument("--steps", type=int, default=200)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    messages()
    rings()
    training(arguments.workers, arguments.steps)


if __name__ == "__main__":
    main()
