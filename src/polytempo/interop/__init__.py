"""Other libraries on Polytempo: a backend of torch.distributed, hooks for DDP, rounds over Spark and dask.

Names load at their first use: `import torch` imports this package, and must not wait.
"""

from __future__ import annotations

from polytempo.lazy_names import lazy_names

__getattr__, __all__ = lazy_names(__name__, __file__)


def __dir__() -> list[str]:
    return __all__
