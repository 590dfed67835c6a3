"""SIGKILL random ranks at random moments, many times, and say how soon the others notice.

python benchmarks/one_host/kills.py [--kills 1000] [--seed 1]

Two to five processes make random collectives and send each other messages, and check every value, until one or two of
them are killed. Each survivor has to raise `PeerLost`: within a second, after nothing but right values, and naming a
rank that is dead, or that has ended because it noticed before. The first round that goes otherwise ends the program.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import select
import signal
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from torch._C._distributed_c10d import FileStore

from polytempo.core.errors import PeerLost
from polytempo.engines.processes.fork import die_with, fork
from polytempo.native.group import Group

LIMIT_S = 1.0
"""The time from the kill to the error of each survivor."""
GIVE_UP_S = 20.0
COUNTS = (1, 1000, 50_000, 300_000)
MOST_DELAY_S = 0.02
"""A round makes tens of calls in this time, so a kill may hit any part of one."""


class Notice(NamedTuple):
    """A rank's end: the error, the named rank, and the time of the error."""

    rank: int
    error: str
    peer: int | None
    at_ns: int


class Crew:
    """Processes that run `work(group)` in one group; each prints a line at its begin and at its end."""

    def __init__(self, size: int, work: Callable[[Group], None], folder: str) -> None:
        self._lines, write_end = os.pipe()
        self._rest = b""
        self.processes: list[int] = []
        parent = os.getpid()

        def serve(rank: int) -> None:
            die_with(parent)
            group = Group(FileStore(str(Path(folder) / "store"), size), rank, size, timeout_s=GIVE_UP_S)
            group.barrier()
            os.write(write_end, b"ready\n")
            notice = Notice(rank, "nothing", None, 0)
            try:
                work(group)
            except Exception as error:
                text = "PeerLost" if type(error) is PeerLost else f"{type(error).__name__}: {error}"
                notice = Notice(rank, text, getattr(error, "peer", None), time.monotonic_ns())
            os.write(write_end, json.dumps(notice).encode() + b"\n")
            os._exit(0)

        for rank in range(size):
            self.processes.append(fork(lambda rank=rank: serve(rank)))  # type: ignore[misc]
        os.close(write_end)
        for _ in range(size):
            if self._line() != "ready":
                raise RuntimeError("a rank has ended before its group began; its log is above")

    def notice(self) -> Notice | None:
        """The next one; None when all processes have ended. Raises TimeoutError when there is neither."""
        line = self._line()
        return Notice(*json.loads(line)) if line else None

    def _line(self) -> str:
        while b"\n" not in self._rest:
            if not select.select([self._lines], [], [], GIVE_UP_S)[0]:
                raise TimeoutError(f"some of the processes {self.processes} say nothing for {GIVE_UP_S:g} s")
            read = os.read(self._lines, 1 << 16)
            if not read:
                return ""
            self._rest += read
        line, _, self._rest = self._rest.partition(b"\n")
        return line.decode()

    def end(self) -> None:
        """Kill the remaining processes, and wait for all."""
        for process in self.processes:
            os.kill(process, signal.SIGKILL)
        for process in self.processes:
            os.waitpid(process, 0)
        os.close(self._lines)


def busy(seed: int) -> Callable[[Group], None]:
    """Random calls with checked values, for ever."""

    def work(group: Group) -> None:
        plan = random.Random(seed)  # the same on all ranks
        step = 0
        while True:
            step += 1
            CALLS[plan.randrange(len(CALLS))](group, plan.choice(COUNTS), step, plan.random() < 0.5)

    return work


def filled(group: Group, count: int, value: int, in_arena: bool) -> Tensor:
    """A tensor of one whole number."""
    return (group.arena.empty(count) if in_arena else torch.empty(count)).fill_(value)


def check(tensor: Tensor, value: int) -> None:
    """True if all of a tensor has the right value."""
    if not bool((tensor == value).all()):
        raise ArithmeticError(f"{tensor[tensor != value][0].item()} instead of {value} among {tensor.numel()} values")


def _barrier(group: Group, count: int, step: int, in_arena: bool) -> None:
    group.barrier()


def _all_reduce(group: Group, count: int, step: int, in_arena: bool) -> None:
    tensor = filled(group, count, step % 100 + group.rank, in_arena)
    group.all_reduce(tensor)
    check(tensor, sum(step % 100 + rank for rank in range(group.size)))


def _reduce_scatter(group: Group, count: int, step: int, in_arena: bool) -> None:
    pieces = [filled(group, count // group.size, step % 100 + to, in_arena) for to in range(group.size)]
    output = torch.empty(count // group.size)
    group.reduce_scatter(pieces, output)
    check(output, (step % 100 + group.rank) * group.size)


def _broadcast(group: Group, count: int, step: int, in_arena: bool) -> None:
    root = step % group.size
    tensor = filled(group, count, step if group.rank == root else -1, in_arena)
    sends = [tensor] if group.rank == root else []
    group.exchange(
        "broadcast", sends, [tensor if r == root != group.rank else None for r in range(group.size)], root=root
    )
    check(tensor, step)


def _all_to_all(group: Group, count: int, step: int, in_arena: bool) -> None:
    sends = [filled(group, count // group.size, step + 10 * group.rank + to, in_arena) for to in range(group.size)]
    receives = [torch.empty(count // group.size) for _ in range(group.size)]
    group.exchange("all_to_all", sends, receives)
    for source, received in enumerate(receives):
        check(received, step + 10 * source + group.rank)


def _around(group: Group, count: int, step: int, in_arena: bool) -> None:
    """Two messages to the next rank, which asks for the second one first."""
    after, before = (group.rank + 1) % group.size, (group.rank - 1) % group.size
    ours = [filled(group, count, step + group.rank + tag, in_arena) for tag in range(2)]
    theirs = [torch.empty(count) for _ in range(2)]
    sends = [group.send(tensor, after, tag) for tag, tensor in enumerate(ours)]
    receives = [group.receive(theirs[tag], before, tag) for tag in (1, 0)]
    for transfer in (*receives, *sends):
        transfer.wait()
    for tag, tensor in enumerate(theirs):
        check(tensor, step + before + tag)


CALLS = (_barrier, _all_reduce, _all_reduce, _reduce_scatter, _broadcast, _all_to_all, _around)


def one_round(seed: int, limit_s: float = LIMIT_S) -> tuple[int, list[float]]:
    """Kill once: how many were killed, and each survivor's seconds to notice. AssertionError if it goes wrong."""
    choice = random.Random(seed)
    size = choice.randint(2, 5)
    victims = choice.sample(range(size), 2 if size > 2 and choice.random() < 0.25 else 1)
    with tempfile.TemporaryDirectory() as folder:
        crew = Crew(size, busy(seed), folder)
        try:
            time.sleep(choice.random() * MOST_DELAY_S)
            killed_at_ns = time.monotonic_ns()
            for victim in victims:
                os.kill(crew.processes[victim], signal.SIGKILL)
            notices = []
            while notice := crew.notice():
                notices.append(notice)
        finally:
            crew.end()
    return len(victims), judged(notices, size, victims, killed_at_ns, f"seed {seed}, {size} ranks", limit_s)


def judged(
    notices: Sequence[Notice], size: int, victims: Sequence[int], killed_at_ns: int, what: str, limit_s: float
) -> list[float]:
    """Each survivor's time to notice in seconds, if all is as it has to be."""
    gone = dict.fromkeys(victims, killed_at_ns)
    for notice in sorted(notices, key=lambda notice: notice.at_ns):
        assert notice.error == "PeerLost", f"{what}: {notice}"
        assert notice.peer in gone, f"{what}: {notice} names a rank that is still there; gone are {gone}"
        assert notice.at_ns - killed_at_ns < limit_s * 1e9, f"{what}: {notice} is too late"
        gone[notice.rank] = notice.at_ns
    assert set(gone) == set(range(size)), f"{what}: ranks {set(range(size)) - set(gone)} have said nothing"
    return [(notice.at_ns - killed_at_ns) / 1e9 for notice in notices]


def main() -> None:
    """Print the distribution."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(1)
    before = set(os.listdir("/dev/shm"))
    num_kills, num_rounds, times_s = 0, 0, list[float]()
    while num_kills < options.kills:
        killed, noticed_s = one_round(options.seed * 1_000_000 + num_rounds)
        num_kills, num_rounds = num_kills + killed, num_rounds + 1
        times_s += noticed_s
    left = set(os.listdir("/dev/shm")) - before
    print(
        f"seed {options.seed}: {num_kills} kills in {num_rounds} rounds, {len(times_s)} survivors, all raised PeerLost"
    )
    cuts = [time_s * 1e3 for time_s in statistics.quantiles(times_s, n=100)]
    print(
        f"ms to notice: median {cuts[49]:.1f}, 90 % {cuts[89]:.1f}, 99 % {cuts[98]:.1f}, most {max(times_s) * 1e3:.1f}"
    )
    print(f"left in /dev/shm: {sorted(left) or 'nothing'}")


if __name__ == "__main__":
    main()
