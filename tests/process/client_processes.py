"""A program that is one process for each client of a server: `client_processes.py HOST:PORT TICKETS LEAVES`.

The client with the number LEAVES is killed when its first round has come.
"""

from __future__ import annotations

import os
import signal
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset, Subset

import polytempo as pt
from laws.test_federated import CLIENTS, SEED, data, job
from polytempo import federated as fed


def part(client: int) -> Dataset[Any]:
    """A client's samples."""
    return Subset(data(), fed.clients(data(), fed.by_size(CLIENTS, sigma=0.7), SEED).parts[client].tolist())


def main(server: str, tickets: str, leaves: int) -> None:
    """Fork the clients, and wait for them."""
    torch.set_num_threads(1)
    for name in ("torch._dynamo", "polytempo.runs.clients.join"):
        import_module(name)  # once, before the forks
    children = []
    for client in range(CLIENTS):
        child = os.fork()
        if child:
            children.append(child)
            continue
        killed = {"loss": lambda output, target: os.kill(os.getpid(), signal.SIGKILL)} if client == leaves else {}
        own = job(**killed)
        joined = pt.federated.join(own, Path(tickets, f"client-{client}.ticket"), part(client), server=server)
        os._exit(0 if joined.trained else 1)
    ends = [os.waitpid(child, 0)[1] for child in children]
    sys.exit(sum(end != 0 for end in ends))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
