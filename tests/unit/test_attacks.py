"""Every kind of attack of `benchmarks/attacks/attacks.py`, a few times; `make soak` makes hundreds and millions."""

from __future__ import annotations

import random

import pytest

from benchmark_module import benchmark

attacks = benchmark("attacks/attacks.py")
SEED = random.SystemRandom().randrange(1_000_000)
TIMES = {"frames": 3_000, "kills": 6, "bits": 30, "manifests": 60, "standings": 60, "strings": 400}


@pytest.mark.process
@pytest.mark.parametrize("name", TIMES)
def test_an_attack_ends_as_documented(name: str) -> None:
    print(f"seed {SEED}")
    assert attacks.search(name, TIMES[name], SEED) == (TIMES[name], [])


def test_every_search_is_here() -> None:
    assert set(TIMES) == set(attacks.SEARCHES)
