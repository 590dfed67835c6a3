"""`in_fork`: a value that a fork computes, so that this process can still fork workers that compute gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from polytempo.core.errors import JobFailed
from polytempo.device import accelerator_kind, gradients_after_fork
from polytempo.engines.engine import Result
from polytempo.engines.local_engine import launch
from polytempo.engines.processes.worker import RankInfo

_LONGEST_S = 600.0
T = TypeVar("T", bound=Result)


def gradients_keep_forks() -> bool:
    """True if gradients that this process computes would keep later forks from computing theirs, and none were yet."""
    return accelerator_kind() is not None and gradients_after_fork()


def beside_forks(work: Callable[[], T]) -> T:
    """The value of `work()`, which computes gradients: from a fork where these would keep later forks from theirs."""
    if not gradients_keep_forks():
        return work()
    found: T = in_fork(work)
    return found


def in_fork(work: Callable[[], Result], *, threads: int | None = None, timeout_s: float = _LONGEST_S) -> Any:
    """The value of `work()` as JSON has it: a tuple is a list.

    The fork keeps its random numbers, memory, and the threads of autograd away from this process.
    Errors: ValueError and JobFailed as of `work`; `WorkerDied` where the fork dies; `RunTimedOut` after `timeout_s`.
    """

    def told(rank_info: RankInfo) -> dict[str, Any]:
        try:
            return {"found": work()}
        except JobFailed as error:
            return {"failed": str(error)}
        except ValueError as error:
            return {"wrong": str(error)}

    [answer] = launch(told, 1, threads=threads, timeout_s=timeout_s)
    if "failed" in answer:
        raise JobFailed(answer["failed"])
    if "wrong" in answer:
        raise ValueError(answer["wrong"])
    return answer["found"]
