"""One rank of the MPI peer, started by mpirun: `python -m polytempo.bench.mpi_rank FOLDER`.

It connects to its partner, the worker of the same rank, through the socket FOLDER/RANK, and obeys each line:
`{"operation": "all_reduce", "num_bytes": 4096, "calls": 100}` → seconds of each call. While others have their turn it
sleeps in the socket. It ends when the partner does. numpy only: torch would take seconds to load in every rank.
"""

from __future__ import annotations

import json
import socket
import sys
import time
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy

_STEPS = {"send_recv": 2}


def main(folder: Path) -> None:
    """Serve until the partner closes the connection."""
    mpi = import_module("mpi4py.MPI")  # optional, so it has no types here
    world = mpi.COMM_WORLD
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(str(folder / str(world.Get_rank())))
        stream = connection.makefile("rw", encoding="ascii")
        prepared: tuple[str, int] | None = None
        for line in stream:
            asked = json.loads(line)
            case = (asked["operation"], asked["num_bytes"])
            if case != prepared:
                call, prepared = _checked(mpi, world, *case), case
            print(json.dumps(_seconds(call, asked["calls"], _STEPS.get(case[0], 1))), file=stream, flush=True)


def _seconds(call: Callable[[], Any], calls: int, steps: int) -> list[float]:
    seconds = []
    for _ in range(calls):
        begun = time.perf_counter()
        call()
        seconds.append((time.perf_counter() - begun) / steps)
    return seconds


def _checked(mpi: Any, world: Any, operation: str, num_bytes: int) -> Callable[[], Any]:
    """The operation as one call, after a check of its answer (see `operations.Prepared`)."""
    rank, size = world.Get_rank(), world.Get_size()
    count = num_bytes // 4 // size * size
    whole, other = numpy.empty(count, numpy.float32), numpy.empty(count, numpy.float32)
    piece = numpy.empty(count // size, numpy.float32)
    partner = rank ^ 1

    def there_and_back() -> None:
        for sender in sorted((rank, partner)) if partner < size else ():
            if sender == rank:
                world.Send(whole, partner)
            else:
                world.Recv(other, partner)

    added, each = [size * (size + 1) / 2], [r + 1.0 for r in range(size)]
    alone = partner >= size
    table: dict[str, tuple[Callable[[], Any], Any, Any, list[float]]] = {
        "all_reduce": (lambda: world.Allreduce(mpi.IN_PLACE, whole), whole, whole, added),
        "broadcast": (lambda: world.Bcast(whole, 0), whole, whole, [1.0]),
        "all_gather": (lambda: world.Allgather(piece, whole), piece, whole, each),
        "reduce_scatter": (lambda: world.Reduce_scatter_block(whole, piece), whole, piece, added),
        "all_to_all": (lambda: world.Alltoall(whole, other), whole, other, each),
        "send_recv": (there_and_back, whole, whole if alone else other, [rank + 1.0 if alone else partner + 1.0]),
        "barrier": (world.Barrier, whole, whole, [rank + 1.0]),
    }
    call, sent, received, expected = table[operation]
    sent.fill(rank + 1)
    call()
    if not (received.reshape(len(expected), -1) == numpy.array(expected)[:, None]).all():
        raise ValueError(f"rank {rank}: MPI answered {operation} with wrong values")
    sent.fill(0)
    return call


if __name__ == "__main__":
    main(Path(sys.argv[1]))
