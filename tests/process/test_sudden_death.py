"""Ranks that are killed or stopped at random moments: the others get an error in time, with the name, and nothing is
left.

`benchmarks/one_host/kills.py` has the rounds, and makes a thousand of them.
"""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmark_module import benchmark
from polytempo.native.group import Group
from shared_memory import segments

pytestmark = pytest.mark.process

SEED = random.SystemRandom().randrange(1_000_000)
NUM_KILLS = 20
DEADLINE_S = 1.0
"""Longer than a rank that has met the others is kept from its first call by other programs."""
kills = benchmark("one_host/kills.py")


def test_survivors_of_a_kill_raise_peer_lost_long_before_their_deadline() -> None:
    before = segments()
    num_kills = num_rounds = 0
    while num_kills < NUM_KILLS:
        print(f"seed {SEED + num_rounds}")
        killed, _ = kills.one_round(SEED + num_rounds, limit_s=kills.GIVE_UP_S / 2)
        num_kills, num_rounds = num_kills + killed, num_rounds + 1
    assert segments() == before


@pytest.mark.parametrize("size", [2, 5])
def test_when_all_are_killed_at_once_nothing_is_left(size: int, tmp_path: Path) -> None:
    before = segments()
    crew = kills.Crew(size, kills.busy(SEED), str(tmp_path))
    for process in crew.processes:
        os.kill(process, signal.SIGKILL)
    crew.end()
    for process in crew.processes:
        with pytest.raises(ProcessLookupError):
            os.kill(process, 0)
    assert segments() == before


def waits_in_a_barrier(group: Group) -> None:
    group.barrier(DEADLINE_S)


def waits_for_a_sum(group: Group) -> None:
    group.all_reduce(kills.filled(group, 300_000, 1, in_arena=True), timeout_s=DEADLINE_S)


def waits_for_a_message(group: Group) -> None:
    group.receive(kills.filled(group, 1000, 0, in_arena=False), 1).wait(DEADLINE_S)


@pytest.mark.parametrize(
    ("size", "waiting", "told"),
    [
        (2, waits_in_a_barrier, "timed out: barrier did not finish within 1 s (rank 1 did not come)"),
        (4, waits_in_a_barrier, "timed out: barrier did not finish within 1 s (rank 1 did not come)"),
        (4, waits_for_a_sum, "timed out: all_reduce did not finish within 1 s (rank 1 did not come)"),
        (3, waits_for_a_message, "timed out: recv(source=1, tag=0) did not finish within 1 s"),
    ],
    ids=["barrier of 2", "barrier of 4", "sum of 4", "message of 3"],
)
def test_a_stopped_rank_is_named_when_the_deadline_is_over(
    size: int, waiting: Callable[[Group], None], told: str, tmp_path: Path
) -> None:
    def work(group: Group) -> None:
        if group.rank == 1:
            os.kill(os.getpid(), signal.SIGSTOP)
        begin_s = time.monotonic()
        try:
            waiting(group)
        finally:
            assert time.monotonic() - begin_s >= DEADLINE_S

    crew = kills.Crew(size, work, str(tmp_path))
    try:
        notices = [crew.notice() for _ in range(size - 1)]
    finally:
        crew.end()
    assert sorted((notice.rank, notice.error) for notice in notices) == [
        (rank, f"TimedOut: rank {rank}: {told}") for rank in range(size) if rank != 1
    ]
