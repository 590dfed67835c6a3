"""The time of an exchange over a network of emulated hosts, and its price in the virtual world.

    export POLYTEMPO_NETLAB=…/netlab.sh                          # see lab.py for the script; needs root
    python benchmarks/compression/routes.py --hosts 2 4 --mbit 100

The price is the virtual world's time for the same program on links of the network's goodput: 95 % of its rate, the part
of frames of 1,500 bytes that Ethernet, IP and TCP leave. Measured is the slowest rank's time; all begin together.
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
from lab import lab, on_every_host
from torch import Tensor

from polytempo import aggregation
from polytempo.bench.machine import machine
from polytempo.bench.tables import markdown
from polytempo.cluster import Cluster, Link
from polytempo.collectives import halving_doubling, hierarchical, ring, star, tree
from polytempo.core import Bundle, Port, Program, Route, Transform, native
from polytempo.engines.join.init import init
from polytempo.worlds import ProcessWorld, VirtualWorld

GOODPUT = 0.95
LATENCY_S = 100e-6
"""The latency between two processes in namespaces of this machine, by gloo over TCP."""
_RUN_S = 1800.0

Exchange = Callable[[Port, Tensor], Program[Any]]


def _transformed(transform: Transform) -> Exchange:
    async def exchange(port: Port, buffer: Tensor) -> None:
        bundle = Bundle({"x": buffer}, flat=buffer)
        await transform.apply(port, bundle, transform.init(bundle))

    return exchange


def _all_to_all(port: Port, buffer: Tensor) -> Program[Any]:
    async def exchange() -> None:
        pieces = buffer.tensor_split(port.size)
        await port.all_to_all(pieces, [pieces[port.rank]] * port.size)

    return exchange()


def _operation(name: str, part: bool) -> Exchange:
    """One of the port's collectives; `part`: on this rank's part of the buffer."""

    async def exchange(port: Port, buffer: Tensor) -> None:
        given = buffer.tensor_split(port.size)[0] if part else buffer
        await getattr(port, name)(given)

    return exchange


ROUTES: dict[str, Route] = {
    "ring": ring,
    "halving_doubling": halving_doubling,
    "tree": tree,
    "star": star,
    "hierarchical()": hierarchical(),
}
EXCHANGES: dict[str, Exchange] = {
    **ROUTES,
    "native": native,
    "mix(ring)": _transformed(aggregation.mix(aggregation.ring_graph)),
    "adasum": _transformed(aggregation.adasum()),
    "all_gather": _operation("all_gather", part=True),
    "reduce_scatter": _operation("reduce_scatter", part=False),
    "all_to_all": _all_to_all,
    "broadcast": _operation("broadcast", part=False),
}


def price_s(exchange: Exchange, hosts: int, num_bytes: int, mbit_per_s: int) -> float:
    """Virtual seconds of the exchange at the network's goodput; only messages are charged."""
    link = Link(LATENCY_S, GOODPUT * mbit_per_s * 1e6 / 8)

    async def program(port: Port) -> None:
        await exchange(port, torch.zeros(num_bytes // 4))

    return VirtualWorld(Cluster(network=link, flops_per_s=1e15), hosts).run(program).seconds


def timed(world: ProcessWorld, given: dict[str, Any]) -> dict[str, list[float]]:
    """Seconds of each exchange, one figure a round; who begins changes from round to round."""
    buffer = torch.zeros(given["num_bytes"] // 4)
    names = given["names"]
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for number in range(given["rounds"] + 1):
        first = number % len(names)
        for name in (*names[first:], *names[:first]):
            dist.barrier()
            begun = time.perf_counter()
            world.drive(EXCHANGES[name](world.port, buffer))
            most = torch.tensor([time.perf_counter() - begun], dtype=torch.float64)
            dist.all_reduce(most, op=dist.ReduceOp.MAX)
            if number:  # the first opens connections
                seconds[name].append(float(most))
    return seconds


def on_host(given: dict[str, Any]) -> None:
    """One rank's process on a host of the lab. Ends with its launcher: then standard input closes."""
    threading.Thread(target=_end_with_launcher, daemon=True).start()
    torch.set_num_threads(1)
    world = init(quiet=True)
    seconds = timed(world, given)
    if world.rank == 0:
        Path(given["result"]).write_text(json.dumps(seconds), encoding="utf-8")
    dist.barrier()


def _end_with_launcher() -> None:
    while os.read(0, 1):
        pass
    os._exit(1)


def over_network(script: Path, hosts: int, mbit_per_s: int, given: dict[str, Any]) -> list[dict[str, Any]]:
    """A row for each exchange, of a lab that is made for this and gone afterwards."""
    with tempfile.TemporaryDirectory(prefix="polytempo-routes-") as folder, lab(script, hosts, mbit_per_s):
        result = Path(folder) / "seconds.json"
        told = json.dumps({**given, "result": str(result)})
        on_every_host(script, hosts, [sys.executable, str(Path(__file__).resolve()), "host", told], _RUN_S)
        seconds: dict[str, list[float]] = json.loads(result.read_text(encoding="utf-8"))
    facts = {"hosts": hosts, "mbit_per_s": mbit_per_s, "num_bytes": given["num_bytes"]}
    prices = {name: price_s(EXCHANGES[name], hosts, given["num_bytes"], mbit_per_s) for name in seconds}
    return [{**facts, "name": name, "price_s": prices[name], "seconds": found} for name, found in seconds.items()]


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Medians, and the quartiles' distance as a part of them."""
    cells = []
    for row in rows:
        low, middle, high = statistics.quantiles(row["seconds"], n=4)
        place = (str(row["hosts"]), str(row["mbit_per_s"]), f"{row['num_bytes'] / 1e6:.2f}", row["name"])
        figures = (f"{1e3 * middle:.1f}", f"{1e3 * row['price_s']:.1f}", f"{middle / row['price_s']:.2f}")
        cells.append((*place, *figures, f"{(high - low) / row['price_s']:.2f}"))
    columns = ("hosts", "Mbit/s", "MB", "exchange", "measured, ms", "price, ms", "measured / price", "quartiles apart")
    return markdown((columns, cells))


def main() -> None:
    """Measure and print a table."""
    if sys.argv[1:2] == ["host"]:
        on_host(json.loads(sys.argv[2]))
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lab", type=Path, default=os.environ.get("POLYTEMPO_NETLAB"), help="the script of the lab")
    parser.add_argument("--hosts", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--mbit", type=int, nargs="+", default=[100])
    parser.add_argument("--bytes", type=int, default=2_670_000, help="of the buffer")
    parser.add_argument("--only", nargs="+", choices=EXCHANGES, default=list(EXCHANGES), metavar="NAME")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    if arguments.lab is None:
        parser.error("name the lab's script: --lab, or POLYTEMPO_NETLAB")
    given = {"names": arguments.only, "rounds": arguments.rounds, "num_bytes": arguments.bytes // 48 * 48}
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # through the end of `lab`, which takes it down
    rows = [
        row
        for hosts in arguments.hosts
        for mbit in arguments.mbit
        for row in over_network(arguments.lab, hosts, mbit, given)
    ]
    if arguments.json:
        found = {"machine": machine(), "command": sys.argv, "rows": rows}
        arguments.json.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    print(table(rows))


if __name__ == "__main__":
    main()
