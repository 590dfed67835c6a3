"""Modules of `benchmarks/`, which is not a package, for tests."""

from __future__ import annotations

import sys
from functools import cache
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any


@cache
def benchmark(path: str) -> Any:
    """The module at `path`, such as `attacks/attacks.py`."""
    file = Path(__file__).parents[1] / "benchmarks" / path
    spec = spec_from_file_location(file.stem, file)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[spec.name] = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
