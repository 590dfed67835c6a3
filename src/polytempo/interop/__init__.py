"""Other libraries on Polytempo: a backend of torch.distributed, hooks for DDP, rounds over Spark and dask.

`map_reduce` loads at its first use: `import torch` imports this package, and must not wait.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from polytempo.interop.averaging_rounds import map_reduce

__all__ = ["map_reduce"]


def __getattr__(name: str) -> Any:
    if name != "map_reduce":
        raise AttributeError(f"module 'polytempo.interop' has no attribute {name!r}")
    return import_module("polytempo.interop.averaging_rounds").map_reduce
