"""The slow rank is named by its windows, quiet runs are left alone, and its host's samples say why."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from polytempo.diagnosis.host_sample import HostSample, ProcessTime, cause_between, host_sample
from polytempo.diagnosis.pace import PaceSnapshot, PaceWindow, window_between
from polytempo.diagnosis.sentence import slow_sentence
from polytempo.diagnosis.slow_rank import LONG, SlowRank, SlowRankJudge

STEPS = 3
"""Steps of a window."""
Noise = Callable[[np.random.Generator, int, int], np.ndarray]


def windows(busy_s: np.ndarray, read: float = 0.0) -> list[PaceWindow]:
    """`busy_s`: shape (windows, ranks)."""
    return [
        PaceWindow(STEPS * i, STEPS * (i + 1), dict(enumerate(map(float, row))), dict.fromkeys(range(len(row)), read))
        for i, row in enumerate(busy_s)
    ]


def named(busy_s: np.ndarray) -> list[tuple[int, SlowRank]]:
    """The verdicts, each with the number of its window, from 1."""
    judge = SlowRankJudge()
    return [(i, each) for i, window in enumerate(windows(busy_s), 1) for each in judge.take(window)]


def normal(deviation: float) -> Noise:
    return lambda random, n, ranks: np.maximum(0.2, 1 + deviation * random.standard_normal((n, ranks)))


def log_normal(sigma: float) -> Noise:
    return lambda random, n, ranks: np.exp(sigma * random.standard_normal((n, ranks)))


def exponential(mean: float) -> Noise:
    return lambda random, n, ranks: 1 + mean * random.exponential(1, (n, STEPS, ranks)).mean(1)


def spikes(probability: float) -> Noise:
    """Rare windows that take a multiple, with a heavy tail."""

    def drawn(random: np.random.Generator, n: int, ranks: int) -> np.ndarray:
        spiked = random.random((n, ranks)) < probability
        return 1 + 0.02 * random.standard_normal((n, ranks)) ** 2 + spiked * random.pareto(1.5, (n, ranks))

    return drawn


def alike(rho: float, sigma: float) -> Noise:
    """Windows that resemble the ones before."""

    def drawn(random: np.random.Generator, n: int, ranks: int) -> np.ndarray:
        x = sigma * random.standard_normal((n, ranks))
        for i in range(1, n):
            x[i] = rho * x[i - 1] + np.sqrt(1 - rho**2) * x[i]
        return np.exp(x)

    return drawn


def together(sigma: float) -> Noise:
    """All ranks are slow at the same time, as by batches of varying length."""
    own = normal(0.03)
    return lambda random, n, ranks: np.exp(sigma * random.standard_normal((n, 1))) * own(random, n, ranks)


QUIET: dict[str, Noise] = {
    "normal 2 %": normal(0.02),
    "normal 5 %": normal(0.05),
    "normal 10 %": normal(0.10),
    "normal 25 %": normal(0.25),
    "log-normal 0.3": log_normal(0.3),
    "exponential 0.3": exponential(0.3),
    "exponential 1": exponential(1.0),
    "spikes 5 %": spikes(0.05),
    "alike 0.5": alike(0.5, 0.1),
    "alike 0.8": alike(0.8, 0.05),
    "together": together(0.5),
}


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_quiet_runs_have_at_most_one_false_alarm_in_1000_windows(ranks: int) -> None:
    alarms = 0
    for number, noise in enumerate(QUIET.values()):
        alarms += len(named(noise(np.random.default_rng([ranks, number]), 400, ranks)))
    assert alarms <= 400 * len(QUIET) / 1000


@pytest.mark.parametrize("slow", range(4))
@pytest.mark.parametrize("noise", ["normal 2 %", "spikes 5 %", "together"])
def test_a_worker_of_four_that_becomes_30_percent_slower_is_named_within_12_steps(noise: str, slow: int) -> None:
    """Rank 0 sees a window one snapshot later, and the cause one or two later: 20 steps at most."""
    begin = 25
    busy_s = QUIET[noise](np.random.default_rng(5), 60, 4)
    busy_s[begin:, slow] *= 1.3
    [(window, found)] = [each for each in named(busy_s) if each[1].rank == slow]
    assert 0 < STEPS * (window - begin) <= 12
    assert abs(found.since_step - STEPS * begin) <= STEPS
    assert found.slower == pytest.approx(0.3, abs=0.07)


def test_a_worker_that_is_slow_from_the_beginning_is_named_once() -> None:
    busy_s = normal(0.02)(np.random.default_rng(1), 200, 4)
    busy_s[:, 2] *= 1.3
    [(window, found)] = named(busy_s)
    assert (found.rank, found.since_step, window) == (2, 0, 4)


def test_a_worker_that_recovers_may_be_named_again() -> None:
    busy_s = normal(0.02)(np.random.default_rng(1), 120, 4)
    busy_s[20:50, 1] *= 1.5
    busy_s[80:, 1] *= 1.5
    assert [(each.rank, each.since_step) for _, each in named(busy_s)] == [(1, 60), (1, 240)]


def test_two_of_five_are_both_named() -> None:
    busy_s = normal(0.02)(np.random.default_rng(1), 60, 5)
    busy_s[30:, 1] *= 1.4
    busy_s[40:, 4] *= 1.6
    assert [each.rank for _, each in named(busy_s)] == [1, 4]


def test_a_small_excess_under_noise_takes_longer() -> None:
    busy_s = normal(0.06)(np.random.default_rng(3), 80, 4)
    busy_s[20:, 3] *= 1.3
    [(window, found)] = [each for each in named(busy_s) if each[1].rank == 3]
    assert 20 < window <= 20 + LONG + 1
    assert found.slower == pytest.approx(0.3, abs=0.07)


def test_a_loss_below_the_least_is_not_worth_a_word() -> None:
    busy_s = 0.010 * normal(0.02)(np.random.default_rng(1), 60, 4)
    busy_s[:, 2] *= 1.3
    for least_s, count in ((0.002, 1), (0.005, 0)):
        judge = SlowRankJudge(least_s)
        assert sum(len(judge.take(window)) for window in windows(busy_s)) == count


def test_another_group_of_ranks_begins_again_and_one_rank_has_no_peers() -> None:
    judge = SlowRankJudge()
    for window in windows(np.tile([1.0, 1.3], (2, 1))):
        assert judge.take(window) == []
    for window in windows(np.tile([1.0, 1.0, 1.3], (3, 1))):
        assert judge.take(window) == []
    for window in windows(np.ones((20, 1))):
        assert judge.take(window) == []


def test_windows_begin_when_all_ranks_have_advanced() -> None:
    def at(steps: tuple[int, ...], busy_s: tuple[float, ...]) -> dict[int, PaceSnapshot]:
        return {r: PaceSnapshot(s, 2 * b, b, b, b / 4) for r, (s, b) in enumerate(zip(steps, busy_s, strict=True))}

    first = at((3, 3), (3.0, 3.0))
    assert window_between({}, first, 2) is None
    assert window_between(first, at((6, 3), (6.0, 3.0)), 2) is None
    window = window_between(first, at((6, 5), (6.0, 6.0)), 2)
    assert window == PaceWindow(3, 6, {0: 1.0, 1: 1.5}, {0: 0.25, 1: 0.25})


# ------------------------------------------------------------------------------------------------------------ causes

CORES = frozenset({0, 1})
PEER, LOADER, STRESS, FAR = 11, 21, 4711, 4712
NAMES = {PEER: ("python", 1, 0), LOADER: ("python", 20, 0), STRESS: ("stress (x)", 900, 1), FAR: ("other", 900, 7)}


def sample(at_s: float, *, own: int = 20, **more: float) -> HostSample:
    """`more`: seconds of processes by name, or fields."""
    used = {pid: more.pop(f"pid{pid}", 0.0) for pid in NAMES}
    processes = {pid: ProcessTime(name, parent, used[pid], core) for pid, (name, parent, core) in NAMES.items()}
    return HostSample(at_s, (own, 1), CORES, processes, **more)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("after", "cause"),
    [
        (sample(10.0), ""),
        (sample(10.0, pid4711=18.0), "1.8 cores are used by pid 4711 (stress (x))"),
        (sample(10.0, pid4711=0.5), ""),
        (sample(10.0, pid4712=18.0), ""),  # on another core
        (sample(10.0, pid11=9.0, pid21=9.0), ""),  # a rank of the run, and this rank's data loader
        (sample(10.0, throttled_s=3.0), "its cgroup's quota of processors throttles it 30% of the time"),
        (sample(10.0, pid4711=9.0, throttled_s=3.0), "its cgroup's quota of processors throttles it 30% of the time"),
        (
            sample(10.0, memory_stall_s=4.0, major_faults=1200),
            "its host is short of memory: tasks wait for it 40% of the time, 1,200 major page faults",
        ),
        (sample(10.0, clock_share=0.6), "its cores run at 60% of their highest frequency"),
        (sample(10.0, clock_share=0.97), ""),
        (sample(10.0, queued_s=5.0), "it is ready and has no core 50% of the time"),
        (sample(0.0), ""),
    ],
)
def test_causes_are_read_from_two_samples(after: HostSample, cause: str) -> None:
    before = sample(0.0, throttled_s=0.0, memory_stall_s=0.0, queued_s=0.0)
    assert cause_between(before, after, slower=0.3) == cause


def test_a_sample_reads_the_files_of_the_system(tmp_path: Path) -> None:
    def write(path: str, text: str) -> None:
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)

    me = os.getpid()
    fields = ["S", "7", *["0"] * 5, "0", "0", "3", "0", "250", "50", *["0"] * 23, "1", "0"]
    write(f"proc/{me}/stat", f"{me} (a (b) c) {' '.join(fields)}")
    write("proc/99/stat", "99 (gone")
    write(f"proc/{me}/schedstat", "5 2500000000 9\n")
    write("proc/self/cgroup", "0::/a\n")
    write("sys/fs/cgroup/a/cpu.stat", "usage_usec 5\nthrottled_usec 1500000\n")
    write("proc/pressure/memory", "some avg10=0.00 avg60=0.00 avg300=0.00 total=2000000\nfull avg10=0 total=1\n")
    for core in os.sched_getaffinity(0):
        write(f"sys/devices/system/cpu/cpu{core}/cpufreq/scaling_cur_freq", "1500000\n")
        write(f"sys/devices/system/cpu/cpu{core}/cpufreq/cpuinfo_max_freq", "3000000\n")
    found = host_sample(1.0, tmp_path)
    tick_s = 1 / os.sysconf("SC_CLK_TCK")
    assert found.processes == {me: ProcessTime("a (b) c", 7, 300 * tick_s, 1)}
    assert (found.throttled_s, found.queued_s, found.clock_share) == (1.5, 2.5, 0.5)
    assert (found.memory_stall_s, found.major_faults) == (2.0, 3)


def test_a_sample_of_a_system_without_these_files_is_empty(tmp_path: Path) -> None:
    found = host_sample(1.0, tmp_path)
    assert (found.processes, found.throttled_s, found.queued_s, found.clock_share) == ({}, None, None, None)
    assert cause_between(found, found._replace(at_s=2.0), 0.3) == ""


def test_this_host_can_be_read() -> None:
    before = host_sample(1.0)
    after = host_sample(2.0)
    assert before.own[0] in before.processes
    assert isinstance(cause_between(before, after, 0.3), str)


FOUND = SlowRank(3, 1200, 1230, 0.31, 0.02, 0.02, 0.01)


@pytest.mark.parametrize(
    ("found", "host", "cause", "text"),
    [
        (
            FOUND,
            "n2",
            "1.9 cores are used by pid 4711 (stress)",
            "rank 3 on n2 is 31 % slower since step 1,200: 1.9 cores are used by pid 4711 (stress)",
        ),
        (
            FOUND._replace(read_share=0.4),
            "",
            "it is ready and has no core 50% of the time",
            "rank 3 is 31 % slower since step 1,200: getting batches takes 40 % of its time (1 % on its peers)",
        ),
        (
            FOUND,
            "",
            "",
            "rank 3 is 31 % slower since step 1,200: its computations take longer, and nothing on its host explains it",
        ),
    ],
)
def test_the_sentence_names_rank_host_step_and_cause(found: SlowRank, host: str, cause: str, text: str) -> None:
    assert slow_sentence(found, "rank 3", host, cause) == text
