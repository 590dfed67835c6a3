"""Push, pull and all-reduce between hosts, against the rate of their links.

    python benchmarks/parameter_server/hosts.py --mbit 1000 \\
        --command 'ip netns exec {host} unshare --pid --fork --kill-child --mount-proc' \\
        --hosts h0=10.0.0.1 h1=10.0.0.2 h2=10.0.0.3 h3=10.0.0.4 [--only push_pull all_reduce] [--rounds 7]

Start it on the first host. It starts its processes by `command`, one role each, with their facts as JSON on standard
input. All of them have one thread. Processes in one PID namespace can share memory, so that network namespaces alone
are one host for the native core: `unshare` makes them several.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from ours import SGD, push_and_pull

from polytempo.bench.tables import markdown
from polytempo.collectives import hierarchical
from polytempo.core import native
from polytempo.core.rule import Service
from polytempo.engines.join.init import init
from polytempo.server.layout import Parameter, part, shard_map
from polytempo.server.loop import serve
from polytempo.server.message import COORDINATOR, Members, View
from polytempo.server.rules.asynchronous import on_arrival
from polytempo.server.shard.node import Node
from polytempo.server.shard.shard import Shard
from polytempo.server.timing import Timing
from polytempo.server.worker.client import Client
from polytempo.server.worker.server_calls import through
from polytempo.wire.keys import Keys, make_keys
from polytempo.wire.zeromq import Mailbox
from polytempo.worlds.process.mail import MailWorld

NUMEL = 25_000_000
FIRST_PORT, MEETING_PORT = 29_700, 29_650
RANKS_PER_HOST = 2
TURN_S = 300.0
_TIMING = Timing(retry_s=60.0, longest_retry_s=60.0)
"""Nothing is lost here; a request that is sent again would be measured as well."""


# ------------------------------------------------------------------------------------------------- processes


def _world(order: dict[str, Any]) -> MailWorld:
    """The mail world of a node, connected to all others."""
    node, addresses = order["node"], order["addresses"]
    keys = Keys.from_plain(order["keys"]) if order["keys"] else None
    mailbox = Mailbox(node, addresses[node], keys, keeps_memory=True)
    for other, address in enumerate(addresses):
        mailbox.connect(other, address)
    return MailWorld(node, mailbox, list(range(len(addresses) + 1)))


def hold(order: dict[str, Any]) -> None:
    """A shard: it serves until this process is ended."""
    number, workers = order["shard"], order["workers"]
    parameters = (Parameter("weights", NUMEL),)
    held = shard_map(parameters, order["shards"])[number]
    service = Service(on_arrival(), SGD, shards=order["shards"])
    node = Node(order["node"], Shard(number, parameters, held, part(torch.zeros(NUMEL), held), service), -1, _TIMING)
    members = tuple((worker, 1) for worker in range(workers))
    node.receive(0.0, -1, View(1, tuple((workers + s,) for s in range(order["shards"])), members))
    node.receive(0.0, -1, Members(COORDINATOR, 1, 1, members))
    world = _world(order)
    world.drive(serve(world.port, _Silent(node)))  # type: ignore[arg-type]


class _Silent:
    """A node that says nothing to a coordinator: here is none."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self.finished = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._node, name)

    def tick(self, now_s: float) -> list[Any]:
        """Send the messages for other nodes."""
        return [(to, message) for to, message in self._node.tick(now_s) if to >= 0]


def push_pull_turns(order: dict[str, Any]) -> None:
    """A worker: for each line of standard input a call, and a line with its seconds."""
    parameters = (Parameter("weights", NUMEL),)
    shards = order["shards"]
    chains = [(order["workers"] + s,) for s in range(shards)]
    client = Client(order["node"], 1, shard_map(parameters, shards), chains, len(order["addresses"]), _TIMING)
    world, gradient = _world(order), torch.full((NUMEL,), 1e-3)
    for _ in sys.stdin:
        begun = time.perf_counter()
        world.drive(through(client, world.port, push_and_pull(world.port, order["node"], gradient, 1)))
        print(time.perf_counter() - begun, flush=True)


def raw_turns(order: dict[str, Any]) -> None:
    """Two plain sockets, the limit: so many bytes there and back. Node 1 sends node 0's bytes back."""
    host, _, port = order["addresses"][1].removeprefix("tcp://").rpartition(":")
    buffer = memoryview(bytearray(4 * NUMEL))
    if order["node"]:
        with socket.create_server((host, int(port))) as listener:
            line, _ = listener.accept()
        with line:
            while _filled(line, buffer):
                line.sendall(buffer)
        return
    line = _connected(host, int(port))
    for _ in sys.stdin:
        begun = time.perf_counter()
        line.sendall(buffer)
        _filled(line, buffer)
        print(time.perf_counter() - begun, flush=True)


def _connected(host: str, port: int) -> socket.socket:
    until_s = time.monotonic() + 60
    while True:
        try:
            return socket.create_connection((host, port))
        except OSError:
            if time.monotonic() > until_s:
                raise
            time.sleep(0.1)


def _filled(line: socket.socket, buffer: memoryview) -> bool:
    at = 0
    while at < len(buffer) and (count := line.recv_into(buffer[at:])):
        at += count
    return at == len(buffer)


def all_reduce_turns(order: dict[str, Any]) -> None:
    """A rank: as above, with `dist.all_reduce`, or along a route of ours."""
    os.environ |= order["environment"]
    if order["contender"] == "gloo":
        dist.init_process_group("gloo")
        reduce: Callable[[torch.Tensor], Any] = dist.all_reduce
    else:
        route = native if order["contender"] == "native" else hierarchical()
        world = init(backend="polytempo" if route is native else "gloo", quiet=True)
        reduce = lambda buffer: world.drive(route(world.port, buffer))  # noqa: E731
    tensor = torch.ones(NUMEL)
    for _ in sys.stdin:
        tensor.fill_(1.0)
        dist.barrier()
        begun = time.perf_counter()
        reduce(tensor)
        print(time.perf_counter() - begun, flush=True)
        assert float(tensor[0]) == dist.get_world_size()


def host_turns(order: dict[str, Any]) -> None:
    """All ranks of one host, as children of this process: one line with the seconds of the slowest."""
    words = [sys.executable, __file__, "--role", "all_reduce_turns"]
    ranks = [subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in order["ranks"]]
    with ended(ranks):
        for process, rank in zip(ranks, order["ranks"], strict=True):
            assert process.stdin is not None
            process.stdin.write(json.dumps(rank) + "\n")
        for _ in sys.stdin:
            print(turn(ranks), flush=True)


ROLES = {each.__name__: each for each in (hold, push_pull_turns, raw_turns, all_reduce_turns, host_turns)}


# --------------------------------------------------------------------------------------------------------- the driver


class Hosts:
    """Starts processes on hosts, and lets some of them take turns."""

    def __init__(self, command: str, hosts: Sequence[str], mbit: float) -> None:
        self._command = shlex.split(command)
        self.names, self.addresses = zip(*(host.split("=") for host in hosts), strict=True)
        self.bytes_per_s = mbit * 1e6 / 8

    def start(self, role: str, host: int, order: dict[str, Any]) -> subprocess.Popen[str]:
        """The process of `role` on `host`."""
        words = [word.replace("{host}", self.names[host]) for word in self._command]
        process = subprocess.Popen(
            [*words, sys.executable, __file__, "--role", role],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=dict(os.environ) | {"OMP_NUM_THREADS": "1"},
        )
        assert process.stdin is not None
        process.stdin.write(json.dumps(order) + "\n")
        process.stdin.flush()
        return process


@contextmanager
def ended(processes: list[subprocess.Popen[str]]) -> Iterator[list[subprocess.Popen[str]]]:
    """No process is left afterwards."""
    try:
        yield processes
    finally:
        for process in processes:
            process.kill()
        for process in processes:
            process.wait()


def used_s(pid: int) -> float:
    """CPU seconds of a process and all its descendants, in user mode and in the kernel."""
    seconds, pids = 0.0, [pid]
    for each in pids:
        fields = Path(f"/proc/{each}/stat").read_text().rpartition(") ")[2].split()
        seconds += (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
        pids += map(int, Path(f"/proc/{each}/task/{each}/children").read_text().split())
    return seconds


def turn(processes: Sequence[subprocess.Popen[str]]) -> float:
    """Seconds of the slowest of one call each."""
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
    seconds = []
    for process in processes:
        assert process.stdout is not None
        seconds.append(float(process.stdout.readline()))
    return max(seconds)


def push_pull(hosts: Hosts, rounds: int) -> None:
    """A worker, and one shard on another host or one on each of two; in turns with two plain sockets."""
    keys, seconds = make_keys().to_plain(), dict[str, tuple[list[subprocess.Popen[str]], list[float]]]()
    cpu_s: dict[str, list[float]] = {}
    contenders = (("one shard", "push_pull_turns", "hold", 1), ("two shards", "push_pull_turns", "hold", 2))
    with ended([]) as started:
        for number, (what, first, others, shards) in enumerate(
            (*contenders, ("plain sockets", *2 * ("raw_turns",), 1))
        ):
            ports = range(FIRST_PORT + 10 * number, FIRST_PORT + 10 * number + 1 + shards)
            addresses = [f"tcp://{hosts.addresses[node]}:{port}" for node, port in enumerate(ports)]
            order = {"addresses": addresses, "keys": keys, "workers": 1, "shards": shards}
            for node in range(1 + shards):
                started.append(hosts.start(others if node else first, node, {**order, "node": node, "shard": node - 1}))
            seconds[what] = started[-1 - shards :], []
            turn(seconds[what][0][:1])
            cpu_s[what] = [-used_s(process.pid) for process in seconds[what][0]]
        for _ in range(rounds):
            for processes, found in seconds.values():
                found.append(turn(processes[:1]))
        for what, (processes, _) in seconds.items():
            cpu_s[what] = [(so_far + used_s(p.pid)) / rounds for so_far, p in zip(cpu_s[what], processes, strict=True)]
    limit = statistics.median(seconds["plain sockets"][1])
    rows = []
    for what, (_, found) in seconds.items():
        median = statistics.median(found)
        rate = 2 * 4 * NUMEL / median
        share = f"{100 * rate / hosts.bytes_per_s:.0f} %"
        used = " + ".join(f"{each:.2f}" for each in cpu_s[what])
        rows.append((what, f"{median:.2f} s", f"{rate / 1e6:.0f} MB/s", share, f"{limit / median:.2f}", f"{used} s"))
    names = (
        "100 MB there and back",
        "median",
        "payload",
        "of the link",
        "of plain sockets",
        "CPU time of each process",
    )
    print(markdown((names, rows)))


def all_reduce(hosts: Hosts, rounds: int) -> None:
    """Two ranks on each host, in blocks or dealt in turn: our routes against gloo's ring."""
    rows, num_hosts = [], len(hosts.names)
    for place in ("in blocks", "in turn"):
        medians = {}
        for number, contender in enumerate(("native", "hierarchical()", "gloo")):
            orders: list[list[dict[str, Any]]] = [[] for _ in hosts.names]
            for rank in range(RANKS_PER_HOST * num_hosts):
                blocks = place == "in blocks"
                host, local = divmod(rank, RANKS_PER_HOST) if blocks else (rank % num_hosts, rank // num_hosts)
                environment = _environment(hosts, rank, local, MEETING_PORT + number)
                orders[host].append({"contender": contender, "environment": environment})
            processes = [hosts.start("host_turns", host, {"ranks": ranks}) for host, ranks in enumerate(orders)]
            with ended(processes):
                turn(processes)
                medians[contender] = statistics.median(turn(processes) for _ in range(rounds))
        seconds = [f"{median:.2f} s" for median in medians.values()]
        limit_s = 2 * (num_hosts - 1) / num_hosts * 4 * NUMEL / hosts.bytes_per_s
        rows.append((f"ranks {place}", *seconds, f"{medians['gloo'] / medians['native']:.2f}", f"{limit_s:.2f} s"))
    names = ("100 MB, two ranks a host", "native", "hierarchical()", "gloo", "gloo / native", "limit of the links")
    print(markdown((names, rows)))


def _environment(hosts: Hosts, rank: int, local: int, port: int) -> dict[str, str]:
    """The variables that torchrun would set."""
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(RANKS_PER_HOST * len(hosts.names)),
        "LOCAL_RANK": str(local),
        "LOCAL_WORLD_SIZE": str(RANKS_PER_HOST),
        "MASTER_ADDR": hosts.addresses[0],
        "MASTER_PORT": str(port),
        "GLOO_SOCKET_IFNAME": "eth0",
    }


def main() -> None:
    """Measure and print the tables, or be one of the processes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts = {each.__name__: each for each in (push_pull, all_reduce)}
    parser.add_argument("--role", choices=ROLES, help=argparse.SUPPRESS)
    parser.add_argument("--command", default="ssh {host}")
    parser.add_argument("--hosts", nargs="+", default=[], help="name=address of each")
    parser.add_argument("--mbit", type=float, default=1000.0, help="of each host's link, each way")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--only", nargs="+", choices=parts, default=list(parts))
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.role is not None:
        ROLES[arguments.role](json.loads(sys.stdin.readline()))
        return
    hosts = Hosts(arguments.command, arguments.hosts, arguments.mbit)
    for name in arguments.only:
        parts[name](hosts, arguments.rounds)


if __name__ == "__main__":
    main()
