"""Training of a model by a strategy: models in parts, steps without exchanges, growing batches, checkpoints."""

from __future__ import annotations

from polytempo.lazy_names import lazy_names

__getattr__, __all__ = lazy_names(__name__, __file__)


def __dir__() -> list[str]:
    return __all__
