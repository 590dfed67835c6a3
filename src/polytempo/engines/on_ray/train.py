"""Ray Train: its workers join Polytempo's world before the training function begins.

    TorchTrainer(train, torch_config=RayTorchConfig(), scaling_config=ScalingConfig(num_workers=4))

In place of Ray's own set-up, each worker calls `pt.init()` with the place that Ray Train gave it, so that ranks of one
host meet in shared memory and nothing listens on all interfaces. `import polytempo.engines.on_ray.train` needs Ray.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from polytempo.engines.extras import missing
from polytempo.engines.join.init import init
from polytempo.worlds import current, set_current

try:
    import ray
    from ray.train.backend import Backend
    from ray.train.torch import TorchConfig, get_device
except ImportError as error:
    raise missing(error, "ray") from error

_LOOPBACK = "127.0.0.1"
_LEAVE_S = 30.0


@dataclass
class RayTorchConfig(TorchConfig):
    """`torch_config=` of Ray Train's `TorchTrainer`: scripts for Ray Train stay as they are, but for this line.

    In the training function `pt.attach(model, optimizer, strategy)` works immediately; `ray.train.torch.prepare_model`
    wraps the model in DDP, with gradients that travel over the same process group. `backend` is torch.distributed's,
    with `pt.init`'s defaults: "polytempo" where all workers are on one host, else gloo, and NCCL for tensors on CUDA.
    `timeout_s` is the deadline of every wait for another worker. `mesh` is `pt.init`'s. `init_method` has no effect.
    """

    mesh: Mapping[str, int] | None = None

    @property
    def backend_cls(self) -> type[Any]:
        """The class by which Ray Train sets workers up."""
        return WorldBackend


class WorldBackend(Backend):
    """See Ray's `Backend`: it is called by the trainer, and calls functions on its workers."""

    share_cuda_visible_devices = True

    def on_training_start(self, worker_group: Any, backend_config: RayTorchConfig) -> None:
        """Let all workers join the world; they know their ranks by now."""
        address, port = worker_group.execute_single(0, free_address)
        config = backend_config
        mesh = None if config.mesh is None else dict(config.mesh)
        worker_group.execute(join_world, address, port, config.backend, float(config.timeout_s), mesh)

    def on_shutdown(self, worker_group: Any, backend_config: RayTorchConfig) -> None:
        """Let all that still live leave it; a worker that waits for a lost one is ended by Ray soon."""
        del backend_config
        with suppress(ray.exceptions.RayError):
            ray.get(worker_group.execute_async(leave_world), timeout=_LEAVE_S)


def free_address() -> tuple[str, int]:
    """Runs on rank 0's worker: where its ranks meet. Loopback where all are on its node."""
    context = ray.train.get_context()
    alone = context.get_local_world_size() == context.get_world_size()
    address = _LOOPBACK if alone else ray.util.get_node_ip_address()
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.create_server((address, 0), family=family) as listener:
        return address, listener.getsockname()[1]


def join_world(address: str, port: int, backend: str | None, timeout_s: float, mesh: dict[str, int] | None) -> None:
    """Runs on each worker: become a rank, by the variables that torchrun would set."""
    context = ray.train.get_context()
    os.environ.update(
        {
            "MASTER_ADDR": address,
            "MASTER_PORT": str(port),
            "RANK": str(context.get_world_rank()),
            "WORLD_SIZE": str(context.get_world_size()),
            "LOCAL_RANK": str(context.get_local_rank()),
            "LOCAL_WORLD_SIZE": str(context.get_local_world_size()),
            "NODE_RANK": str(context.get_node_rank()),
            "ACCELERATE_TORCH_DEVICE": str(get_device()),  # as Ray's own set-up does
        }
    )
    if context.get_world_size() == 1 and not dist.is_initialized():
        dist.init_process_group(backend or "gloo", store=HashStore(), rank=0, world_size=1)  # scripts expect a group
    init(mesh=mesh, timeout_s=timeout_s, backend=backend)


def leave_world() -> None:
    """Runs on each worker: let go of the group, so that Ray can form another one in this process."""
    if dist.is_initialized():
        current().forget_groups()
        dist.destroy_process_group()
    set_current(None)
