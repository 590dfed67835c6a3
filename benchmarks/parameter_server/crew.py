"""Crews: the processes of each contender, which live all the time and take turns.

main      ── calls ──▶ rank_info, rank_info, …       a rank_info makes so many calls and says how long they took
          ◀─ seconds ─                     a server of the crew just serves; the others sleep
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import torch

from polytempo.bench.turns import Measurement, figure

_FORK = multiprocessing.get_context("fork")
_START_S, _TURN_S = 120.0, 300.0

Attend = Callable[[Callable[[int], object]], None]
"""A ready worker calls it, with a function that makes a number of calls. It returns when the benchmark is over."""
RankInfo = Callable[[Attend], None]


class Unavailable(RuntimeError):
    """This contender cannot run here."""


class Crew:
    """One contender: `rank_infos` take part in the timing, `servers` do not. Every member is a process of its own."""

    def __init__(self, name: str, rank_infos: Sequence[RankInfo], servers: Sequence[Callable[[], None]] = ()) -> None:
        self.name, self._pipes, self._processes = name, list[Connection](), list[Any]()
        for server in servers:
            self._start(_alone, server)
        for rank_info in rank_infos:
            ours, theirs = _FORK.Pipe()
            self._pipes.append(ours)
            self._start(_seated, rank_info, theirs)
            theirs.close()
        try:
            self._answers(_START_S)
        except BaseException:
            self.close()
            raise

    def _start(self, *work: Any) -> None:
        process = _FORK.Process(target=_quiet, args=work, daemon=False)
        process.start()
        self._processes.append(process)

    def turn(self, calls: int) -> float:
        """Seconds a call, of the slowest rank_info, when each makes `calls` calls."""
        for pipe in self._pipes:
            pipe.send_bytes(str(calls).encode())
        return max(self._answers(_TURN_S)) / calls

    def _answers(self, wait_s: float) -> list[float]:
        answers = []
        for pipe in self._pipes:
            try:
                answer = pipe.recv_bytes().decode() if pipe.poll(wait_s) else f"no answer within {wait_s:.0f} s"
            except EOFError:
                answer = "its process has ended"
            try:
                answers.append(float(answer))
            except ValueError:
                raise Unavailable(f"{self.name}: {answer}") from None
        return answers

    def close(self) -> None:
        """End all its processes."""
        for pipe in self._pipes:
            pipe.close()
        until = time.monotonic() + 3.0
        for process in reversed(self._processes):
            process.join(max(0.0, until - time.monotonic()) if self._pipes else 0.0)
            if process.is_alive():
                os.kill(process.pid, signal.SIGKILL)
                process.join()


def _quiet(work: Callable[..., None], *arguments: Any) -> None:
    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    work(*arguments)


def _alone(server: Callable[[], None]) -> None:
    parent = os.getppid()

    def look(*_: object) -> None:  # a server has no pipe that tells it of main's end
        if os.getppid() != parent:
            os._exit(0)

    signal.signal(signal.SIGALRM, look)
    signal.setitimer(signal.ITIMER_REAL, 5.0, 5.0)
    server()


def _seated(rank_info: RankInfo, pipe: Connection) -> None:
    def attend(run: Callable[[int], object]) -> None:
        run(1)
        pipe.send_bytes(b"0")
        while True:
            try:
                calls = int(pipe.recv_bytes())
            except EOFError:
                return
            begun = time.perf_counter()
            run(calls)
            pipe.send_bytes(repr(time.perf_counter() - begun).encode())

    try:
        rank_info(attend)
    except Exception as error:
        pipe.send_bytes(f"{type(error).__name__}: {error}".encode())
        raise


class Turn(NamedTuple):
    """A contender and the calls that it makes in each round."""

    crew: Crew
    calls: int


def rounds_of(crews: Sequence[Crew], rounds: int, turn_s: float, min_calls: int = 3) -> dict[str, Measurement]:
    """Seconds a call of each crew. In every round each takes a turn, in an order that rotates."""
    turns = []
    for crew in crews:
        crew.turn(min_calls)  # which warms up caches and buffers
        turns.append(Turn(crew, max(min_calls, round(turn_s / crew.turn(min_calls)))))
    seconds: dict[str, list[float]] = {crew.name: [] for crew in crews}
    for number in range(rounds):
        first = number % len(turns)
        for crew, calls in (*turns[first:], *turns[:first]):
            seconds[crew.name].append(crew.turn(calls))
    return {name: figure(found) for name, found in seconds.items()}
