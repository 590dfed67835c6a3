"""What meets torch: training loops, DDP, checkpoints, and a backend of torch.distributed.

Names load when they are first used: torch's own start finds `autoload` in here, and must not wait for the rest.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from polytempo.interop.ddp_hook import CommHook, comm_hook

_HOME = {"CommHook": "polytempo.interop.ddp_hook", "comm_hook": "polytempo.interop.ddp_hook"}

__all__ = ["CommHook", "comm_hook"]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(import_module(_HOME[name]), name)
    raise AttributeError(f"module 'polytempo.torch' has no attribute {name!r}")
