"""Plain functions that wait for other ranks in their midst, as the layers of a split model do inside autograd.

A coroutine suspends only at its own `await`, and autograd calls plain functions. `suspendable(work)` is a coroutine
that runs `work` in a thread; where `work` calls `drive(program)`, the thread stands still and the coroutine awaits
`program` in its place:

    world        drives ──▶ await suspendable(work) ──── await program ────▶ …       any world: it sees a coroutine
                                  │            ▲               │
    thread                  work ─┘── drive(program)     answer └──▶ work goes on

Of the two sides exactly one runs at a time, so a virtual world stays as deterministic as without threads.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, Generic

import torch

from polytempo.core.op import Program, T
from polytempo.device import Autocast, RandomStates, random_states, set_random_states

_here = threading.local()


class _Abandoned(BaseException):
    """The coroutine was closed: `work` is to end."""


class _Call(Generic[T]):
    """`work` in its thread."""

    def __init__(self, work: Callable[[], T]) -> None:
        self._work = work
        self._asked: Program[Any] | None = None
        self._answer: tuple[Any, BaseException | None] = (None, None)
        self._may_run, self._stands = threading.Semaphore(0), threading.Semaphore(0)
        self._random: RandomStates | None = None
        self._gradients, self._autocast = torch.is_grad_enabled(), Autocast()
        self.value: T | None = None
        self.error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="polytempo-suspendable", daemon=True)
        self._thread.start()

    def resume(self, value: Any = None, error: BaseException | None = None) -> Program[Any] | None:
        """Run until `work` asks for a program, which is returned, or is over (None).

        Random numbers: `work` and the code that runs meanwhile draw the numbers of an undisturbed run.
        """
        outside = random_states()
        if self._random is not None:
            set_random_states(self._random)
        self._asked, self._answer = None, (value, error)
        self._may_run.release()
        self._stands.acquire()
        if self._asked is None:
            self._thread.join()
        else:
            self._random = random_states()
            set_random_states(outside)
        return self._asked

    def ask(self, program: Program[Any]) -> Any:
        """Stand still in the thread until `program` is over; its return value, or raises its exception."""
        self._asked = program
        self._stands.release()
        self._may_run.acquire()
        value, error = self._answer
        if error is not None:
            raise error
        return value

    def _run(self) -> None:
        self._may_run.acquire()
        _here.call = self
        try:
            with ExitStack() as modes:
                modes.enter_context(torch.set_grad_enabled(self._gradients))
                modes.enter_context(self._autocast.set())
                # autograd has one thread for each accelerator, and ranks of one process would block each other there
                modes.enter_context(torch.autograd.set_multithreading_enabled(False))
                self.value = self._work()
        except BaseException as error:  # handed to the coroutine
            self.error = error
        self._stands.release()


async def suspendable(work: Callable[[], T]) -> T:
    """The answer of `work()`. Inside, `drive(program)` waits for programs as `await program` would.

    Works in every world. Cost: a thread while it lasts; two switches of threads for each program.
    """
    call = _Call(work)
    over = False
    try:
        program = call.resume()
        while program is not None:
            value, error = None, None
            try:
                value = await program
            except Exception as raised:
                error = raised
            program = call.resume(value, error)
        over = True
    finally:
        while not over:  # the coroutine is closed: let the thread unwind, and refuse its requests
            asked = call.resume(None, _Abandoned())
            over = asked is None
            if asked is not None:
                asked.close()
    if call.error is not None:
        raise call.error
    answer: Any = call.value
    return answer  # type: ignore[no-any-return]


def drive(program: Program[T]) -> T:
    """The answer of `program`, performed by the world, inside `suspendable`. RuntimeError anywhere else."""
    call: _Call[Any] | None = getattr(_here, "call", None)
    if call is None:
        program.close()
        raise RuntimeError(
            "this waits for other ranks outside of suspendable(...); in a virtual world run it as "
            "`await suspendable(lambda: …)`, on processes give the world that pt.init() returned"
        )
    value: T = call.ask(program)
    return value
