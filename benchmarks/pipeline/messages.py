"""A tensor from one stage to the next: lent, as stages do, and sent by our backend and by gloo, on one host.

    python benchmarks/pipeline/messages.py

Two processes, one thread each; the contenders take turns in the same processes. `limit`: one copy of so many bytes.
"lent" answers a tensor of its own each time, and reads nothing of it; the others receive into memory that is there.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import polytempo as pt
from polytempo.core import Port, Program
from polytempo.worlds import ProcessWorld, current

SIZES = {"64 KiB": 64 << 10, "256 KiB": 256 << 10, "1 MiB": 1 << 20, "4 MB": 4_000_000}


def there_and_back(group: Any, mine: Tensor, theirs: Tensor) -> None:
    """Rank 0 sends, and rank 1 answers."""
    if dist.get_rank() == 0:
        dist.send(mine, 1, group)
        dist.recv(theirs, 1, group)
    else:
        dist.recv(theirs, 0, group)
        dist.send(mine, 0, group)


def both_at_once(group: Any, mine: Tensor, theirs: Tensor) -> None:
    """Each sends to the other one."""
    other = 1 - dist.get_rank()
    works = [dist.irecv(theirs, other, group), dist.isend(mine, other, group)]
    for work in works:
        work.wait()


async def lent_there_and_back(port: Port, mine: Tensor) -> None:
    """Rank 0 lends, and rank 1 lends as much back."""
    if port.rank == 0:
        await port.lend(mine, 1)
        await port.borrow(mine, 1)
    else:
        await port.borrow(mine, 0)
        await port.lend(mine, 0)


async def lent_both_at_once(port: Port, mine: Tensor) -> None:
    """Each lends to the other one."""
    coming = await port.start(port.borrow(mine, 1 - port.rank))
    await port.lend(mine, 1 - port.rank)
    await coming


def driven(world: ProcessWorld, exchange: Callable[[Port, Tensor], Program[None]], mine: Tensor) -> None:
    """Perform an exchange of this library's own."""
    world.drive(exchange(world.port, mine))


def seconds_of(turn: Callable[[], object], together: bool) -> float:
    """One turn, begun together."""
    if together:
        dist.barrier()
    begin_s = time.perf_counter()
    turn()
    return time.perf_counter() - begin_s


def measured(turns: int) -> list[dict[str, float]]:
    """This rank's median seconds of one message, for each size: by "way: contender"."""
    pt.init(quiet=True)
    world = current()
    groups = {"gloo": dist.new_group(backend="gloo"), "ours": dist.group.WORLD}
    ways = {
        "one way": (there_and_back, lent_there_and_back, 2),
        "both ways": (both_at_once, lent_both_at_once, 1),
    }
    found = []
    for num_bytes in SIZES.values():
        mine, theirs = torch.ones(num_bytes // 4), torch.zeros(num_bytes // 4)
        seconds: dict[str, list[float]] = {}
        for turn in range(turns + 5):
            for way, (exchange, lent, messages) in ways.items():
                turns_of = {name: partial(exchange, group, mine, theirs) for name, group in groups.items()}
                turns_of["lent"] = partial(driven, world, lent, mine)
                for name, once in turns_of.items():
                    taken_s = seconds_of(once, together=True) / messages
                    if turn >= 5:
                        seconds.setdefault(f"{way}: {name}", []).append(taken_s)
            if turn >= 5:
                copied_s = seconds_of(partial(theirs.copy_, mine), together=False)
                seconds.setdefault("one way: limit", []).append(copied_s)
        found.append({key: statistics.median(values) for key, values in seconds.items()})
    return found


def main() -> None:
    """Print a line for each size and way: microseconds a message, and the ratio of medians."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=200)
    given = parser.parse_args()
    ranks = pt.launch(lambda info: measured(given.turns), 2, threads=1)
    print(f"{'':10}{'':14}{'lent':>10}{'sent':>10}{'gloo':>10}{'limit':>10}   gloo / lent, gloo / sent")
    for size, *each in zip(SIZES, *ranks, strict=True):
        slowest = {key: max(one[key] for one in each) for key in each[0]}
        for way in ("one way", "both ways"):
            lent, ours, gloo = (slowest[f"{way}: {name}"] for name in ("lent", "ours", "gloo"))
            copied_s = slowest.get(f"{way}: limit")
            limit = "" if copied_s is None else f"{1e6 * copied_s:7.0f} µs"
            times = "".join(f"{1e6 * each:7.0f} µs" for each in (lent, ours, gloo))
            print(f"{size:10}{way:14}{times}{limit:>10}   {gloo / lent:.1f}, {gloo / ours:.1f}")


if __name__ == "__main__":
    main()
