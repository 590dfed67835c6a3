"""`harm`: the runs of `benchmarks/parameter_server/harm.py`, which kill processes on purpose, for tests."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any


def _loaded() -> Any:
    path = Path(__file__).parents[2] / "benchmarks" / "parameter_server" / "harm.py"
    spec = importlib.util.spec_from_file_location("harm", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


harm = _loaded()
