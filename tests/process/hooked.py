"""A small model in torch's own DistributedDataParallel with a hook, on real processes."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch._dynamo
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD

import polytempo as pt
from polytempo.compression import feedback, natural
from polytempo.engines.local_engine import launch
from polytempo.engines.processes.worker import RankInfo, Result

LOADED = (torch._dynamo, pt.attach)
"""Slow to load: once here instead of once in every worker."""

SIZE = 2
SMALL_BUCKETS = {"bucket_cap_mb": 0.01}
FED = feedback(natural())
"""Coarse: without feedback, and with it too, a step is far from the exact one."""

Story = Callable[[int], Sequence[Tensor]]
"""A rank's program in the default group; returns the tensors that must be the same on all ranks."""


class Net(nn.Module):
    """Three layers, 24 kB; `other` is not always used."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.middle, self.last = nn.Linear(6, 70), nn.Linear(70, 70), nn.Linear(70, 4)
        self.other: nn.Linear | None = None

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = torch.tanh(self.middle(torch.tanh(self.first(inputs))))
        use_other = self.other is not None and float(inputs[0, 0]) > 0
        return self.other(hidden) if use_other and self.other else self.last(hidden)


def inputs(rank: int, step: int) -> Tensor:
    """A batch of eight."""
    return torch.randn(8, 6, generator=torch.Generator().manual_seed(100 * step + rank))


def train(net: nn.Module, rank: int, steps: Iterable[int] = range(4)) -> list[Tensor]:
    optimizer = SGD(net.parameters(), 0.1, momentum=0.5)
    for step in steps:
        optimizer.zero_grad()
        net(inputs(rank, step)).pow(2).mean().backward()
        optimizer.step()
    return [parameter.detach().clone() for parameter in net.parameters()]


def ddp(hook: Any, net: nn.Module | None = None, state: Any = None, **options: Any) -> DistributedDataParallel:
    wrapped = DistributedDataParallel(Net() if net is None else net, **options)
    if hook is not None:
        wrapped.register_comm_hook(state, hook)
    return wrapped


def told(story: Story, size: int = SIZE, backends: Sequence[str] = ("gloo", "polytempo"), hosts: str = "") -> None:
    """The story on these backends, as if on these hosts; all ranks end with the same bits."""

    def work(rank_info: RankInfo) -> Result:
        warnings.simplefilter("ignore")  # torch's own, about its own calls of deprecated functions
        if hosts:
            os.environ["POLYTEMPO_HOST"] = hosts[rank_info.rank]
        ends = []
        for backend in backends:
            store = dist.FileStore(str(rank_info.rendezvous / backend), size)
            limit = timedelta(seconds=20)
            dist.init_process_group(backend, store=store, rank=rank_info.rank, world_size=size, timeout=limit)
            ends.append([tensor.double().flatten().tolist() for tensor in story(rank_info.rank)])
            dist.destroy_process_group()
        return ends

    ends = launch(work, size, threads=1, timeout_s=60)
    assert ends[0] == ends[1]
    assert ends[0][0]


def equal(a: Sequence[Tensor], b: Sequence[Tensor]) -> bool:
    return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def close(a: Sequence[Tensor], b: Sequence[Tensor], tolerance: float = 1e-6) -> None:
    torch.testing.assert_close(list(a), list(b), rtol=tolerance, atol=tolerance)


def summed(tensors: Iterable[Tensor]) -> list[Tensor]:
    totals = [tensor.clone() for tensor in tensors]
    for total in totals:
        dist.all_reduce(total)
    return totals


def recorded(hook: Any, layouts: list[list[list[int]]]) -> Any:
    """The hook, which notes the shapes of each bucket's parameters."""

    def recording(state: Any, bucket: Any) -> Any:
        layouts.append([list(parameter.shape) for parameter in bucket.parameters()])
        return hook(state, bucket)

    recording.__annotations__ = {}  # DDP wants no text in them
    return recording
