"""A message names `ulimit -v` where it bounds the memory."""

from __future__ import annotations

import resource

import pytest

from polytempo.native.address_space import address_space_advice


@pytest.mark.parametrize(
    ("limit", "said", "advised"),
    [
        (2_000_000_000, "MemoryError: MemoryError", True),
        (2_000_000_000, "RuntimeError: [enforce fail at alloc_cpu.cpp:117] can't allocate memory", True),
        (2_000_000_000, "RuntimeError: can't start new thread", True),
        (2_000_000_000, "ValueError: no such data", False),
        (resource.RLIM_INFINITY, "MemoryError: MemoryError", False),
    ],
)
def test_the_limit_is_named_where_it_may_be_the_cause(
    limit: int, said: str, advised: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (limit, resource.RLIM_INFINITY))
    assert ("ulimit -v" in address_space_advice(said)) is advised
