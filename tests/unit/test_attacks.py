"""Every kind of attack of `benchmarks/attacks/attacks.py`, a few times; `make soak` makes hundreds and millions."""

from __future__ import annotations

import importlib.util
import random
from pathlib import Path
from typing import Any

import pytest


def _loaded() -> Any:
    path = Path(__file__).parents[2] / "benchmarks" / "attacks" / "attacks.py"
    spec = importlib.util.spec_from_file_location("attacks", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


attacks = _loaded()
SEED = random.SystemRandom().randrange(1_000_000)
TIMES = {"frames": 3_000, "kills": 6, "bits": 30, "manifests": 60, "standings": 60, "strings": 400}


@pytest.mark.process
@pytest.mark.parametrize("name", TIMES)
def test_an_attack_ends_as_documented(name: str) -> None:
    print(f"seed {SEED}")
    assert attacks.search(name, TIMES[name], SEED) == (TIMES[name], [])


def test_every_search_is_here() -> None:
    assert set(TIMES) == set(attacks.SEARCHES)
