"""Polytempo: every distributed-training strategy, written once, run on real processes or under a virtual clock.

Names load when they are first used, so that `import polytempo` alone does not import torch. `__init__.pyi` lists them.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

__version__ = "0.1.0"


def _homes() -> dict[str, str]:
    """The module of each public name: lines `from module import name as name` of the stub."""
    with open(f"{__file__}i", encoding="utf-8") as stub:
        lines = [line.split() for line in stub if line.startswith("from ")]
    return {name: module for _, module, _, name, *_ in lines}


_HOME = _homes()
__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'polytempo' has no attribute {name!r}")
    if _HOME[name] == __name__:
        return import_module(f"polytempo.{name}")
    return getattr(import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return __all__
