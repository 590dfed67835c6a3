"""Users' programs on torch.distributed run on "polytempo" unchanged, and end with gloo's values."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch._dynamo
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.algorithms.join import Join
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, Adam

from polytempo.engines.local_engine import launch
from polytempo.engines.processes.worker import RankInfo, Result

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # importing it compiles with torch.jit, which torch has deprecated
    from torch.distributed.optim import ZeroRedundancyOptimizer

pytestmark = pytest.mark.process

SIZE = 2
NUM_STEPS = 4
Story = Callable[[int], Sequence[Tensor]]
"""A rank's program in the default group; returns its final tensors."""


class Net(nn.Module):
    """Two layers; the second output is not always used."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.other = nn.Linear(6, 70), nn.Linear(70, 4), nn.Linear(70, 4)

    def forward(self, inputs: Tensor, use_other: bool = False) -> Tensor:
        hidden = torch.tanh(self.first(inputs))
        return self.other(hidden) if use_other else self.second(hidden)


class Plain(nn.Sequential):
    """The same without the part that is not used."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__(nn.Linear(6, 70), nn.Tanh(), nn.Linear(70, 4))


def inputs(rank: int, step: int) -> Tensor:
    """A batch of eight."""
    return torch.randn(8, 6, generator=torch.Generator().manual_seed(100 * step + rank))


def loop(net: nn.Module, optimizer: Any, rank: int, num_steps: int = NUM_STEPS) -> list[Tensor]:
    """The plain training loop."""
    for step in range(num_steps):
        optimizer.zero_grad()
        net(inputs(rank, step)).pow(2).mean().backward()
        optimizer.step()
    return ended(net)


def ended(net: nn.Module) -> list[Tensor]:
    """Parameters and buffers, whole where they are dealt to the ranks."""
    tensors = [*net.parameters(), *net.buffers()]
    return [(t.full_tensor() if isinstance(t, DTensor) else t).detach().clone() for t in tensors]


def ddp(**options: Any) -> Story:
    def story(rank: int) -> Sequence[Tensor]:
        net = DistributedDataParallel(Plain(), **options)
        return loop(net, SGD(net.parameters(), 0.1, momentum=0.9), rank)

    return story


def ddp_with_small_buckets(rank: int) -> Sequence[Tensor]:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 300), nn.Tanh(), *(nn.Linear(300, 300) for _ in range(4)), nn.Linear(300, 4))
    wrapped = DistributedDataParallel(net, bucket_cap_mb=0.1)
    return loop(wrapped, SGD(wrapped.parameters(), 0.1), rank)


def ddp_with_unused_parameters(rank: int) -> Sequence[Tensor]:
    net = DistributedDataParallel(Net(), find_unused_parameters=True)
    optimizer = SGD(net.parameters(), 0.1)
    for step in range(NUM_STEPS):
        optimizer.zero_grad()
        net(inputs(rank, step), use_other=(rank + step) % 2 == 0).pow(2).mean().backward()
        optimizer.step()
    return ended(net)


def ddp_without_sync(rank: int) -> Sequence[Tensor]:
    net = DistributedDataParallel(Plain())
    optimizer = SGD(net.parameters(), 0.1)
    for step in range(6):
        with net.no_sync() if step % 3 else nullcontext():
            net(inputs(rank, step)).pow(2).mean().backward()
        if not step % 3:
            optimizer.step()
            optimizer.zero_grad()
    return ended(net)


def ddp_joined(rank: int) -> Sequence[Tensor]:
    net = DistributedDataParallel(Plain())
    with net.join():
        return loop(net, SGD(net.parameters(), 0.1), rank, NUM_STEPS + 2 * rank)


def ddp_with_sparse_gradients(rank: int) -> Sequence[Tensor]:
    torch.manual_seed(0)
    net = DistributedDataParallel(nn.EmbeddingBag(50, 8, sparse=True, mode="sum"))
    optimizer = SGD(net.parameters(), 0.1)
    for step in range(NUM_STEPS):
        rows = torch.randint(0, 50, (4, 3), generator=torch.Generator().manual_seed(10 * step + rank))
        optimizer.zero_grad()
        net(rows).pow(2).mean().backward()
        optimizer.step()
    return ended(net)


def ddp_with_hook(hook: Any, state: Callable[[], Any] = lambda: None) -> Story:
    def story(rank: int) -> Sequence[Tensor]:
        net = DistributedDataParallel(Plain())
        net.register_comm_hook(state(), hook)
        return loop(net, SGD(net.parameters(), 0.1), rank)

    return story


def power_state() -> Any:
    return powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=2, start_powerSGD_iter=2)


def ddp_with_batch_statistics(rank: int) -> Sequence[Tensor]:
    torch.manual_seed(0)
    net = DistributedDataParallel(nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Linear(5, 2)))
    return loop(net, SGD(net.parameters(), 0.1), rank)


def ddp_compiled(rank: int) -> Sequence[Tensor]:
    torch._dynamo.reset()
    net = DistributedDataParallel(Plain())
    compiled = torch.compile(net, backend="aot_eager")
    return loop(compiled, SGD(net.parameters(), 0.1), rank)  # type: ignore[arg-type]


def sharded(rank: int) -> Sequence[Tensor]:
    net = Plain()
    mesh = init_device_mesh("cpu", (SIZE,))
    for layer in (net[0], net[2]):
        fully_shard(layer, mesh=mesh)
    fully_shard(net, mesh=mesh)
    return loop(net, Adam(net.parameters(), 0.01), rank)


def tensor_parallel(rank: int) -> Sequence[Tensor]:
    mesh = init_device_mesh("cpu", (SIZE,))
    net = parallelize_module(Plain(), mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    return loop(net, SGD(net.parameters(), 0.1), 0)


def redistributed(rank: int) -> Sequence[Tensor]:
    mesh = init_device_mesh("cpu", (SIZE,))
    whole = torch.arange(35.0).view(7, 5)
    rows = distribute_tensor(whole, mesh, [Shard(0)])
    columns = rows.redistribute(mesh, [Shard(1)])
    return [columns.to_local(), columns.redistribute(mesh, [Replicate()]).to_local(), (rows @ rows.t()).full_tensor()]


def pipelined(kind: Any) -> Story:
    def story(rank: int) -> Sequence[Tensor]:
        torch.manual_seed(0)
        stages = [nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(SIZE)]
        stage = PipelineStage(stages[rank], rank, SIZE, torch.device("cpu"))
        schedule = kind(stage, n_microbatches=4, loss_fn=lambda output, target: (output - target).pow(2).mean())
        losses: list[Tensor] = []
        for step in range(2):
            if rank == 0:
                schedule.step(inputs(0, step))
            else:
                schedule.step(target=inputs(1, step), losses=losses)
        return [parameter.grad.clone() for parameter in stages[rank].parameters() if parameter.grad is not None]

    return story


def optimizer_dealt(rank: int) -> Sequence[Tensor]:
    net = DistributedDataParallel(Plain())
    optimizer = ZeroRedundancyOptimizer(net.parameters(), Adam, lr=0.01)
    answer = loop(net, optimizer, rank)
    optimizer.consolidate_state_dict(to=0)
    if rank == 0:
        answer += [state["exp_avg"].clone() for state in optimizer.state_dict()["state"].values()]
    return answer


def joined(rank: int) -> Sequence[Tensor]:
    net = DistributedDataParallel(Plain())
    optimizer = ZeroRedundancyOptimizer(net.parameters(), SGD, lr=0.1)
    with Join([net, optimizer]):
        return loop(net, optimizer, rank, NUM_STEPS + rank)


def functional_collectives(rank: int) -> Sequence[Tensor]:
    group = dist.group.WORLD
    given = inputs(rank, 0)
    answers = [
        functional.all_reduce(given, "sum", group),
        functional.all_gather_tensor(given, 0, group),
        functional.reduce_scatter_tensor(given, "sum", 0, group),
        functional.all_to_all_single(given, None, None, group),
        functional.all_to_all_single(given, [3, 3] if rank == 0 else [5, 5], [3, 5], group),
        functional.broadcast(given, 1, group),
        *functional.all_reduce_coalesced([given, given + 1], "max", group),
        *functional.all_gather_into_tensor_coalesced([given, given + 1], group),
        *functional.reduce_scatter_tensor_coalesced([given, given + 1], "sum", [0, 0], group),
    ]
    return [functional.wait_tensor(answer) for answer in answers]


def compiled_collectives(rank: int) -> Sequence[Tensor]:
    torch._dynamo.reset()

    def inner(given: Tensor) -> Tensor:
        return functional.all_reduce(given * 2, "sum", dist.group.WORLD) + 1

    return [torch.compile(inner, backend="aot_eager", fullgraph=True)(inputs(rank, 0))]


STORIES: dict[str, Story] = {
    "DDP": ddp(),
    "DDP, gradients are views of buckets": ddp(gradient_as_bucket_view=True),
    "DDP, static graph": ddp(static_graph=True),
    "DDP, averaged by fp16": ddp_with_hook(default_hooks.fp16_compress_hook),
    "DDP, all-reduce hook": ddp_with_hook(default_hooks.allreduce_hook),
    "DDP, PowerSGD": ddp_with_hook(powerSGD_hook.powerSGD_hook, power_state),
    "pipeline, GPipe": pipelined(ScheduleGPipe),
    "pipeline, 1F1B": pipelined(Schedule1F1B),
    **{
        story.__name__: story
        for story in (
            *(ddp_with_small_buckets, ddp_with_unused_parameters, ddp_without_sync, ddp_joined),
            *(ddp_with_sparse_gradients, ddp_with_batch_statistics, ddp_compiled, sharded, tensor_parallel),
            *(redistributed, optimizer_dealt, joined, functional_collectives, compiled_collectives),
        )
    },
}


@pytest.mark.parametrize("name", STORIES)
def test_a_story_ends_as_on_gloo(name: str) -> None:
    kept = []  # gloo's thread drops callbacks of torch's hooks, which hold the group: as the last, it joins itself

    def work(rank_info: RankInfo) -> Result:
        warnings.simplefilter("ignore")  # torch's own, about its own calls of deprecated functions
        ends = []
        for backend in ("gloo", "polytempo"):
            store = dist.FileStore(str(rank_info.rendezvous / backend), SIZE)
            limit = timedelta(seconds=20)
            dist.init_process_group(backend, store=store, rank=rank_info.rank, world_size=SIZE, timeout=limit)
            assert dist.get_backend() == backend
            torch.manual_seed(rank_info.rank)
            ends.append(STORIES[name](rank_info.rank))
            kept.append(dist.group.WORLD)
            dist.barrier()
            dist.destroy_process_group()
        ours, theirs = ends[1], ends[0]
        assert ours
        torch.testing.assert_close(list(ours), list(theirs), rtol=1e-5, atol=1e-6)
        return len(ours)

    assert all(launch(work, SIZE, threads=1, timeout_s=60))
