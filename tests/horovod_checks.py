"""Checks of `polytempo.horovod.torch` that ranks make one after the other, in processes that are started once a file.

CHECKS = Checks()

@CHECKS.check
def sums(rank: int, size: int) -> None: ...        # called on every rank, in the order of the file

@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("name", CHECKS)
def test_of(name: str, size: int) -> None:
    CHECKS.passed(name, size)
"""

from __future__ import annotations

import re
import traceback
from collections.abc import Callable, Collection, Iterator
from typing import Any

import pytest
import torch
import torch._dynamo
from torch import Tensor

import polytempo.horovod.torch as hvd
from polytempo.engines.local_engine import launch
from polytempo.engines.processes.worker import RankInfo, Result

LOADED = (torch._dynamo,)
"""Slow to load: once here instead of once in every worker."""
INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
Check = Callable[[int, int], None]


class Checks(Collection[str]):
    """The checks of a file, by name."""

    def __init__(self) -> None:
        self._checks: dict[str, Check] = {}
        self._outcomes: dict[int, list[dict[str, str]]] = {}

    def __iter__(self) -> Iterator[str]:
        return iter(self._checks)

    def __len__(self) -> int:
        return len(self._checks)

    def __contains__(self, name: object) -> bool:
        return name in self._checks

    def check(self, function: Check, name: str = "") -> Check:
        """Make it one of the checks, by its own name if no other is given."""
        self._checks[name or function.__name__] = function
        return function

    def passed(self, name: str, size: int) -> None:
        """Assert that the check went well on each of `size` ranks."""
        if size not in self._outcomes:
            self._outcomes[size] = self._made(size)
        for rank, said in enumerate(self._outcomes[size]):
            assert not said.get(name, "not made"), f"rank {rank}: {said.get(name, 'not made')}"

    def _made(self, size: int) -> list[dict[str, str]]:
        """The results of each check on each rank: nothing, or its traceback."""

        def work(_: RankInfo) -> Result:
            hvd.init()
            said = {}
            for name, made in self._checks.items():
                try:
                    made(hvd.rank(), hvd.size())
                    said[name] = ""
                except BaseException:  # "did not raise" is not an Exception
                    said[name] = traceback.format_exc()
                    break  # ranks are in different places now
            else:
                hvd.barrier()
            hvd.shutdown()
            return said

        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("HOROVOD_STALL_SHUTDOWN_TIME_SECONDS", "20")
            return launch(work, size, threads=1, timeout_s=150)


def equal(found: Any, expected: Any) -> None:
    """Assert it, with room for sums of float16."""
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-6)


def refused(error: type[Exception], words: str, call: Callable[[], Any]) -> None:
    """`call` raises `error`, with `words` in its message."""
    with pytest.raises(error, match=re.escape(words)):
        call()


def values(rank: int, dtype: torch.dtype = torch.float32, shape: tuple[int, ...] = (3, 5)) -> Tensor:
    """Small whole numbers, others on each rank."""
    return torch.randint(1, 5, shape, generator=torch.Generator().manual_seed(rank)).to(dtype)
