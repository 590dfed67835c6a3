"""DistributedDataParallel with torch's communication hooks, and with ours in the same place."""

from __future__ import annotations

from collections.abc import Callable

from peers import PEERS, distributed
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import polytempo as pt
from polytempo.core import Codec, Transform

OURS: dict[str, Callable[[], Codec | Transform]] = {
    "comm_hook(exact())": pt.compression.exact,
    "comm_hook(fp16())": pt.compression.fp16,
    "comm_hook(bf16())": pt.compression.bf16,
    "comm_hook(low_rank(rank=1))": lambda: pt.aggregation.low_rank(rank=1),
    "comm_hook(low_rank(rank=4))": lambda: pt.aggregation.low_rank(rank=4),
}
HOOKS: dict[str, str] = {
    **{name: "" for name in PEERS if "default" not in name},
    "comm_hook(exact())": "DDP",
    "comm_hook(fp16())": "DDP, fp16 hook",
    "comm_hook(bf16())": "DDP, fp16 hook",
    "comm_hook(low_rank(rank=1))": "DDP, PowerSGD hook (rank 1, from step 2)",
    "comm_hook(low_rank(rank=4))": "DDP, PowerSGD hook (rank 4, from step 2)",
}
"""Contender -> the peer to be compared with ("": it is one)."""


def hooked(model: nn.Module, name: str) -> nn.Module:
    """`model` in DDP with the hook of that name."""
    if name in PEERS:
        return distributed(model, name)
    wrapped = DistributedDataParallel(model)
    wrapped.register_comm_hook(None, pt.interop.comm_hook(OURS[name](), model))
    return wrapped
