"""Every argument of every form in `polytempo.horovod.torch`, at 2 and at 4 ranks: rank 0 alone in one process set, the
others in another. `unit/test_horovod_arguments.py` looks whether one is left out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import polytempo.horovod.torch as hvd
from horovod_checks import Checks, equal, refused, values

pytestmark = pytest.mark.process

CHECKS = Checks()
Form = Callable[[Tensor, hvd.ProcessSet], Tensor]


def parted(rank: int, size: int) -> tuple[hvd.ProcessSet, hvd.ProcessSet]:
    """The process set of this rank, and the other one."""
    first, others = hvd.add_process_set([0]), hvd.add_process_set(range(1, size))
    return (others, first) if rank else (first, others)


REDUCTIONS: dict[str, Form] = {
    "allreduce": lambda x, here: hvd.allreduce(
        x, average=False, name="all", prescale_factor=4.0, postscale_factor=0.5, process_set=here
    ),
    "allreduce_": lambda x, here: hvd.allreduce_(
        x.clone(), average=False, name="all", prescale_factor=4.0, postscale_factor=0.5, process_set=here
    ),
    "allreduce_async": lambda x, here: hvd.synchronize(
        hvd.allreduce_async(x, average=False, name="all", prescale_factor=4.0, postscale_factor=0.5, process_set=here)
    ),
    "allreduce_async_": lambda x, here: hvd.synchronize(
        hvd.allreduce_async_(
            x.clone(), average=False, name="all", prescale_factor=4.0, postscale_factor=0.5, process_set=here
        )
    ),
    "grouped_allreduce": lambda x, here: hvd.grouped_allreduce(
        [x, x], average=False, name="all", prescale_factor=4.0, postscale_factor=0.5, process_set=here
    )[1],
    "grouped_allreduce_": lambda x, here: hvd.grouped_allreduce_(
        [x.clone(), x.clone()],
        average=False,
        name="all",
        prescale_factor=4.0,
        postscale_factor=0.5,
        process_set=here,
    )[1],
    "grouped_allreduce_async": lambda x, here: hvd.synchronize(
        hvd.grouped_allreduce_async(
            [x, x], average=False, name="all", prescale_factor=4.0, postscale_factor=0.5, process_set=here
        )
    )[1],
    "grouped_allreduce_async_": lambda x, here: hvd.synchronize(
        hvd.grouped_allreduce_async_(
            [x.clone(), x.clone()],
            average=False,
            name="all",
            prescale_factor=4.0,
            postscale_factor=0.5,
            process_set=here,
        )
    )[1],
}
"""Each is twice the sum over the process set."""
SCATTERS: dict[str, Form] = {
    "reducescatter": lambda x, here: hvd.reducescatter(
        x,
        name="part",
        compression=hvd.Compression.fp16,
        op=hvd.Sum,
        process_set=here,
        prescale_factor=4.0,
        postscale_factor=0.5,
    ),
    "reducescatter_async": lambda x, here: hvd.synchronize(
        hvd.reducescatter_async(x, name="part", op=hvd.Sum, process_set=here, prescale_factor=4.0, postscale_factor=0.5)
    ),
    "grouped_reducescatter": lambda x, here: hvd.grouped_reducescatter(
        [x, x],
        name="part",
        compression=hvd.Compression.fp16,
        op=hvd.Sum,
        process_set=here,
        prescale_factor=4.0,
        postscale_factor=0.5,
    )[1],
    "grouped_reducescatter_async": lambda x, here: hvd.synchronize(
        hvd.grouped_reducescatter_async(
            [x, x], name="part", op=hvd.Sum, process_set=here, prescale_factor=4.0, postscale_factor=0.5
        )
    )[1],
}
"""Each is twice this rank's rows of that sum."""
GATHERS: dict[str, Form] = {
    "allgather": lambda x, here: hvd.allgather(x, name="rows", process_set=here),
    "allgather_async": lambda x, here: hvd.synchronize(hvd.allgather_async(x, name="rows", process_set=here)),
    "grouped_allgather": lambda x, here: hvd.grouped_allgather([x, x], name="rows", process_set=here)[1],
    "grouped_allgather_async": lambda x, here: hvd.synchronize(
        hvd.grouped_allgather_async([x, x], name="rows", process_set=here)
    )[1],
}
BROADCASTS: dict[str, Form] = {
    "broadcast": lambda x, here: hvd.broadcast(x, root_rank=here.ranks[-1], name="one", process_set=here),
    "broadcast_": lambda x, here: hvd.broadcast_(x.clone(), root_rank=here.ranks[-1], name="one", process_set=here),
    "broadcast_async": lambda x, here: hvd.synchronize(
        hvd.broadcast_async(x, root_rank=here.ranks[-1], name="one", process_set=here)
    ),
    "broadcast_async_": lambda x, here: hvd.synchronize(
        hvd.broadcast_async_(x.clone(), root_rank=here.ranks[-1], name="one", process_set=here)
    ),
}


@CHECKS.check
def forms_in_process_sets(rank: int, size: int) -> None:
    """The value of each, and its error where this rank is not in the set, and where the set is not registered."""
    here, there = parted(rank, size)
    ranks, shape = here.ranks or [], (here.size(), 3)
    mine, all_of_them = values(rank, shape=shape), [values(other, shape=shape) for other in ranks]
    total = torch.stack(all_of_them).sum(0)
    row = total[here.rank() : here.rank() + 1]
    expected = [
        (REDUCTIONS, 2 * total),
        (SCATTERS, 2 * row),
        (GATHERS, torch.cat(all_of_them)),
        (BROADCASTS, all_of_them[-1]),
    ]
    for forms, answer in expected:
        for name, call in forms.items():
            equal(call(mine, here), answer)
            equal(mine, values(rank, shape=shape))
            refused(ValueError, "cannot take part", lambda call=call: call(mine, there))
            assert name in hvd.__all__
    for done in (here, there) if rank == 0 else (there, here):
        assert hvd.remove_process_set(done)
    for forms, _ in expected:
        for call in forms.values():
            refused(ValueError, "not registered", lambda call=call: call(mine, here))


@CHECKS.check
def averages_that_are_given_twice(rank: int, size: int) -> None:
    one = torch.ones(2)
    for call in (hvd.allreduce, hvd.allreduce_, hvd.allreduce_async, hvd.allreduce_async_):
        refused(ValueError, "supersedes", lambda call=call: call(one, average=True, op=hvd.Sum))
    grouped = (hvd.grouped_allreduce, hvd.grouped_allreduce_, hvd.grouped_allreduce_async, hvd.grouped_allreduce_async_)
    for call in grouped:
        refused(ValueError, "supersedes", lambda call=call: call([one], average=True, op=hvd.Sum))


@CHECKS.check
def other_operations_in_process_sets(rank: int, size: int) -> None:
    here, there = parted(rank, size)
    ranks, place = here.ranks or [], here.rank()
    given, answer = torch.arange(here.size()) + 10 * rank, torch.tensor([10 * other + place for other in ranks])
    even = hvd.alltoall(given, process_set=here, name="dealt")
    equal(even, answer)
    rows, received = hvd.synchronize(hvd.alltoall_async(given, [1] * here.size(), name="dealt", process_set=here))
    equal(rows, answer)
    assert received.tolist() == [1] * here.size()
    entries = torch.sparse_coo_tensor(torch.tensor([[rank]]), torch.ones(1), (size,), check_invariants=True)
    summed = hvd.synchronize(hvd.sparse_allreduce_async(entries, name="entries", op=hvd.Sum, process_set=here))
    equal(summed.to_dense(), torch.zeros(size).index_fill_(0, torch.tensor(ranks), 1.0))
    hvd.barrier(process_set=here)
    for call in (
        lambda: hvd.alltoall(given, process_set=there),
        lambda: hvd.sparse_allreduce_async(entries, "entries", hvd.Sum, process_set=there),
        lambda: hvd.barrier(process_set=there),
    ):
        refused(ValueError, "cannot take part", call)
    for done in (here, there) if rank == 0 else (there, here):
        assert hvd.remove_process_set(done)


@CHECKS.check
def values_and_states_in_process_sets(rank: int, size: int) -> None:
    here, there = parted(rank, size)
    ranks = here.ranks or []
    root = ranks[-1]
    assert hvd.broadcast_object({"from": rank}, root_rank=root, name="told", process_set=here) == {"from": root}
    assert hvd.broadcast_object_fn(root_rank=root, name="told", process_set=here)([rank]) == [root]
    assert hvd.allgather_object(rank, name="said", process_set=here) == ranks
    weight = nn.Parameter(torch.full((2,), float(rank)))
    hvd.broadcast_parameters([("weight", weight)], root_rank=root, process_set=here)
    equal(weight.detach(), torch.full((2,), float(root)))
    model = nn.EmbeddingBag(3, 2, mode="sum", sparse=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0 + rank, momentum=0.5)
    hvd.broadcast_optimizer_state(optimizer, root_rank=root, model=model, process_set=here)
    assert optimizer.param_groups[0]["lr"] == 1.0 + root
    for call in (
        lambda: hvd.broadcast_object(1, root, process_set=there),
        lambda: hvd.allgather_object(1, process_set=there),
        lambda: hvd.broadcast_parameters([("weight", weight)], root, process_set=there),
        lambda: hvd.broadcast_optimizer_state(optimizer, root, process_set=there),
    ):
        refused(ValueError, "cannot take part", call)
    for done in (here, there) if rank == 0 else (there, here):
        assert hvd.remove_process_set(done)


@CHECKS.check
def norms_with_all_arguments(rank: int, size: int) -> None:
    given = values(rank, torch.float64, (4, 3, 2))
    whole = torch.cat([values(other, torch.float64, (4, 3, 2)) for other in range(size)])
    for affine, tracks, momentum in ((True, True, None), (False, True, 0.3), (True, False, 0.1)):
        options: dict[str, Any] = {"affine": affine, "track_running_stats": tracks, "momentum": momentum}
        ours = hvd.SyncBatchNorm(
            3,
            eps=1e-2,
            momentum=momentum,
            affine=affine,
            track_running_stats=tracks,
            process_set=hvd.global_process_set,
        ).double()
        theirs = nn.BatchNorm1d(3, eps=1e-2, **options).double()
        for _ in range(2):
            equal(ours(given), theirs(whole)[4 * rank : 4 * rank + 4])
        assert (ours.weight is None) is not affine
        if tracks:
            equal(ours.running_mean, theirs.running_mean)


@CHECKS.check
def joins_with_a_device(rank: int, size: int) -> None:
    """Zeros for tensors on the CPU are on the CPU, with any device named for tensors on CUDA."""
    if rank:
        equal(hvd.allreduce(torch.ones(2), op=hvd.Sum, name="rest"), torch.full((2,), size - 1.0))
    assert hvd.join(device=0) in range(size)


@CHECKS.check
def what_it_is_made_of(rank: int, size: int) -> None:
    assert hvd.gloo_built(verbose=True)
    assert not hvd.mpi_built(verbose=True)


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("name", CHECKS)
def test_of(name: str, size: int) -> None:
    CHECKS.passed(name, size)
