"""The others: DistributedDataParallel over gloo, as it is, and with each of torch's own compressing hooks."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

Peer = Callable[[DistributedDataParallel], None]


def uncompressed(model: DistributedDataParallel) -> None:
    """DDP's own all-reduce of float32."""


def fp16(model: DistributedDataParallel) -> None:
    """`fp16_compress_hook`. The one for bf16 is for CUDA alone."""
    model.register_comm_hook(None, default_hooks.fp16_compress_hook)


def power_sgd(rank: int, begins: int) -> Peer:
    """`powerSGD_hook` of that rank; until step `begins` gradients travel as they are (torch's default: 1000)."""

    def hooked(model: DistributedDataParallel) -> None:
        state = powerSGD_hook.PowerSGDState(
            process_group=None, matrix_approximation_rank=rank, start_powerSGD_iter=begins
        )
        model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)

    return hooked


PEERS: dict[str, Peer] = {
    "DDP": uncompressed,
    "DDP, fp16 hook": fp16,
    "DDP, PowerSGD hook (rank 1, from step 2)": power_sgd(1, 2),
    "DDP, PowerSGD hook (rank 4, from step 2)": power_sgd(4, 2),
    "DDP, PowerSGD hook (rank 1, its default: from step 1000)": power_sgd(1, 1000),
}


ONE_BUCKET_MB = 1000
"""PowerSGD's hook sums twice for a bucket, the second time when the first is over. With two buckets under way ranks
begin these sums in different orders, and gloo stops with "Received data size doesn't match expected size"."""


def distributed(model: nn.Module, name: str) -> nn.Module:
    """`model` as this peer trains it."""
    wrapped = DistributedDataParallel(model, bucket_cap_mb=ONE_BUCKET_MB if "PowerSGD" in name else None)
    PEERS[name](wrapped)
    return wrapped
