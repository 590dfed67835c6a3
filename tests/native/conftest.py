"""The instruction sets of this machine, one after the other."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from native.kernels import choose, instruction_sets, library
from polytempo.native.library import available


@pytest.fixture(params=instruction_sets() if available() else [])
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    """The name of the instruction set that kernels use in this test."""
    before = library().pt_isa().decode()
    assert choose(request.param)
    yield request.param
    choose(before)
