"""Polytempo: every distributed-training strategy, written once, run on real processes or under a virtual clock.

Names load when they are first used. `__init__.pyi` lists them.
"""

from __future__ import annotations

from polytempo.lazy_names import lazy_names

__version__ = "0.1.0"

__getattr__, __all__ = lazy_names(__name__, __file__)


def __dir__() -> list[str]:
    return __all__
