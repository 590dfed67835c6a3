"""`pt.comm_hook` in torch's own DistributedDataParallel: on gloo and on "polytempo", two real processes."""

from __future__ import annotations

import gc
import os
import threading
import warnings
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch._dynamo
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD

import polytempo as pt
from polytempo.aggregation import low_rank, median
from polytempo.compression import all_gather, bf16, exact, feedback, fp16, natural, qsgd, reduce_scatter, through
from polytempo.core import Codec, NotFinite, PeerLost, stateless
from polytempo.engines.launch import launch
from polytempo.engines.worker import RankInfo, Result
from polytempo.interop.backend import create
from polytempo.interop.ddp_hook import CommHook, comm_hook
from polytempo.interop.transport import leave, transport_like
from polytempo.strategies import sync_sgd
from polytempo.worlds import ProcessWorld

LOADED = (torch._dynamo, pt.attach)
"""Slow to load: once here instead of once in every worker."""

pytestmark = pytest.mark.process

SIZE = 2
SMALL_BUCKETS = {"bucket_cap_mb": 0.01}
FED = feedback(natural())
"""Coarse: without feedback, and with it too, a step is far from the exact one."""

Story = Callable[[int], Sequence[Tensor]]
"""What a rank does in the default group; answers the tensors that must be the same on all ranks."""


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
        warnings.simplefilter("ignore")  # torch's own, about its own calls of what it has deprecated
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


# ---------------------------------------------------------------------- what it computes


def test_parameters_are_equal_while_ddp_cuts_its_buckets_anew() -> None:
    def story(rank: int) -> Sequence[Tensor]:
        found: list[Tensor] = []
        for codec, options in [
            (FED, {}),
            (FED, {"route": all_gather}),
            (feedback(qsgd(levels=64)), {"exact_below": 0}),
            (bf16(), {"route": pt.collectives.ring}),
            (FED, {"merge": median}),
        ]:
            hook, layouts = comm_hook(codec, **options), []

            found += train(ddp(recorded(hook, layouts), **SMALL_BUCKETS), rank)
            assert len(layouts) == 7, "one bucket in the first step, two in each of the others"
            assert sorted(layouts[0]) == sorted(layouts[1] + layouts[2])
        return found

    told(story)


@pytest.mark.parametrize(
    "codec", [FED, feedback(bf16()), qsgd(levels=4), exact()], ids=lambda codec: str(codec.facts.name)
)
def test_it_is_attach_with_the_same_codec(codec: Codec) -> None:
    """To the bit where nothing depends on buckets. Random numbers are those of the parameters' names."""

    def story(rank: int) -> Sequence[Tensor]:
        net, wrapped = Net(), Net()
        strategy = replace(sync_sgd(), gradients=through(codec, route=all_gather, exact_below=100))
        optimizer = SGD(net.parameters(), 0.1, momentum=0.5)
        handle = pt.attach(net, optimizer, strategy, world=ProcessWorld(rank, [0, 0]))
        for step in range(4):
            optimizer.zero_grad()
            net(inputs(rank, step)).pow(2).mean().backward()
            optimizer.step()
        handle.world.forget_groups()
        hook = comm_hook(codec, wrapped, route=all_gather, exact_below=100)
        ours = train(ddp(hook, wrapped, **SMALL_BUCKETS), rank)
        assert equal(ours, list(net.parameters()))
        return ours

    told(story)


def test_casts_end_as_torchs_own_hooks() -> None:
    def story(rank: int) -> Sequence[Tensor]:
        ours = train(ddp(comm_hook(fp16())), rank)
        close(ours, train(ddp(default_hooks.fp16_compress_hook), rank))
        exactly = train(ddp(None), rank)
        assert not equal(ours, exactly)
        close(train(ddp(comm_hook(exact())), rank), exactly)
        return ours

    told(story)


class Given(nn.Module):
    """A matrix (32, 48) and a vector of 2000, float64, whose gradients are what is put in."""

    def __init__(self) -> None:
        super().__init__()
        self.matrix = nn.Parameter(torch.zeros(32, 48, dtype=torch.float64))
        self.vector = nn.Parameter(torch.zeros(2000, dtype=torch.float64))

    def forward(self, matrix: Tensor, vector: Tensor) -> Tensor:
        return (self.matrix * matrix).sum() + (self.vector * vector).sum()


def given(rank: int, step: int) -> tuple[Tensor, Tensor]:
    """A matrix of rank 1, and a vector."""
    random = torch.Generator().manual_seed(10 * step + rank)
    left, right, vector = (torch.randn(n, dtype=torch.float64, generator=random) for n in (32, 48, 2000))
    return torch.outer(left, right), vector


def test_power_sgd_as_a_hook_is_exact_where_torchs_is() -> None:
    """The mean of two ranks' matrices of rank 1 has rank 2, which two columns hold: ours, and torch's hook's."""
    kept = []  # gloo's thread drops the callbacks of torch's hook, which hold the group: as the last, it joins itself

    def story(rank: int) -> Sequence[Tensor]:
        mean = summed([gradient / SIZE for gradient in given(rank, 0)])
        power = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=2, start_powerSGD_iter=2)
        answers: list[Tensor] = []
        for state, hook in [(None, comm_hook(low_rank(2))), (power, powerSGD_hook.powerSGD_hook)]:
            net = Given()
            wrapped = ddp(hook, net, state)
            for _ in range(4):
                net.zero_grad()
                wrapped(*given(rank, 0)).backward()
            answers += [parameter.grad.clone() for parameter in net.parameters() if parameter.grad is not None]
        kept.append(dist.group.WORLD)
        close(answers[:2], mean, 1e-7)
        close(answers[2:], mean, 1e-7)
        return answers

    told(story)


@pytest.mark.parametrize("route", [all_gather, reduce_scatter, None], ids=["all_gather", "reduce_scatter", "low_rank"])
def test_nothing_of_the_gradient_is_lost(route: Any) -> None:
    """Σ answers + the last residuals = Σ gradients, while buckets change after the first step."""

    def story(rank: int) -> Sequence[Tensor]:
        net = Given()
        hook = comm_hook(low_rank(1)) if route is None else comm_hook(FED, net, route=route)
        wrapped = ddp(hook, net, bucket_cap_mb=0.001)
        answered = [torch.zeros_like(parameter) for parameter in net.parameters()]
        should = [torch.zeros_like(parameter) for parameter in net.parameters()]
        for step in range(5):
            net.zero_grad()
            wrapped(*given(rank, step)).backward()
            for total, parameter in zip(answered, net.parameters(), strict=True):
                total += 0 if parameter.grad is None else parameter.grad
            for total, gradient in zip(should, summed(given(rank, step)), strict=True):
                total += gradient / SIZE
        tensors = hook.state_dict()["tensors"]
        lacking = [s - a for s, a in zip(should, answered, strict=True)]
        assert float(lacking[0].norm()) > 0.01 * float(should[0].norm()), "so much is late that it would be seen"
        residuals = [t for t in tensors.values() if t.shape == net.matrix.shape]
        close(summed(residuals), lacking[:1], 1e-9)
        return answered

    told(story)


# ---------------------------------------------------------------------- in DDP's own ways


def accumulating(hook: Any, rank: int) -> Sequence[Tensor]:
    net = ddp(hook)
    optimizer = SGD(net.parameters(), 0.1)
    for step in range(6):
        with net.no_sync() if step % 3 != 2 else nullcontext():
            net(inputs(rank, step)).pow(2).mean().backward()
        if step % 3 == 2:
            optimizer.step()
            optimizer.zero_grad()
    return list(net.parameters())


def partly_used(hook: Any, rank: int) -> Sequence[Tensor]:
    net = Net()
    net.other = nn.Linear(70, 4)
    return train(ddp(hook, net, find_unused_parameters=True, **SMALL_BUCKETS), rank, range(6))


def joined(hook: Any, rank: int) -> Sequence[Tensor]:
    net = ddp(hook, **SMALL_BUCKETS)
    with net.join():
        train(net, rank, range(3 + rank))
    return list(net.parameters())


def pictures(hook: Any, rank: int) -> Sequence[Tensor]:
    """channels_last: gradients do not lie as their shape says. Batch norm: DDP broadcasts buffers in between."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 5, 3), nn.BatchNorm2d(5), nn.Conv2d(5, 2, 3)).to(memory_format=torch.channels_last)
    wrapped = ddp(hook, net, gradient_as_bucket_view=True)
    for step in range(3):
        images = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(10 * step + rank))
        wrapped(images.to(memory_format=torch.channels_last)).pow(2).mean().backward()
        with torch.no_grad():
            for parameter in net.parameters():
                parameter -= 0.1 * parameter.grad  # type: ignore[operator]
                parameter.grad = None
    return list(net.parameters())


WAYS: dict[str, Callable[[Any, int], Sequence[Tensor]]] = {
    "no_sync": accumulating,
    "unused parameters": partly_used,
    "join": joined,
    "channels_last, batch norm": pictures,
    "views of buckets": lambda hook, rank: train(ddp(hook, gradient_as_bucket_view=True, **SMALL_BUCKETS), rank),
    "static graph": lambda hook, rank: train(ddp(hook, static_graph=True, **SMALL_BUCKETS), rank),
    "group as state": lambda hook, rank: train(ddp(hook, state=hook and dist.group.WORLD), rank),
}


def test_whatever_ddp_does_the_mean_is_the_mean() -> None:
    """With a codec that leaves nothing out DDP ends where it ends without a hook."""

    def story(rank: int) -> Sequence[Tensor]:
        found: list[Tensor] = []
        for way in WAYS.values():
            ours = [p.detach().clone() for p in way(comm_hook(exact(), exact_below=0, route=all_gather), rank)]
            close(ours, [p.detach() for p in way(None, rank)])
            found += ours
        return found

    told(story)


# ---------------------------------------------------------------------- saving


@pytest.mark.parametrize("named", [True, False])
def test_going_on_from_a_saved_state_is_never_having_stopped(named: bool) -> None:
    def hook(net: nn.Module) -> CommHook:
        return comm_hook(FED, net if named else None, route=all_gather)

    def story(rank: int) -> Sequence[Tensor]:
        nets = [Net(), Net(), Net()]
        once, first, second = (hook(net) for net in nets)
        wrapped = ddp(once, nets[0], **SMALL_BUCKETS)
        train(wrapped, rank, range(3))
        whole = train(wrapped, rank, range(3, 6))
        train(ddp(first, nets[1], **SMALL_BUCKETS), rank, range(3))
        state = first.state_dict()
        assert any(tensor.count_nonzero() for tensor in state["tensors"].values())
        nets[2].load_state_dict(nets[1].state_dict())
        second.load_state_dict(state)
        resumed = train(ddp(second, nets[2], **SMALL_BUCKETS), rank, range(3, 6))
        assert equal(whole, resumed)
        assert first.state_dict()["tensors"].keys() == once.state_dict()["tensors"].keys()
        nets[2].load_state_dict(nets[1].state_dict())
        forgotten = train(ddp(hook(nets[2]), nets[2], **SMALL_BUCKETS), rank, range(3, 6))
        assert not equal(whole, forgotten)
        return resumed

    told(story)


def test_a_state_of_another_codec_or_model_is_refused() -> None:
    def story(rank: int) -> Sequence[Tensor]:
        hook = comm_hook(FED)
        ended = train(ddp(hook), rank, range(1))
        with pytest.raises(ValueError, match=r"saved by comm_hook\(feedback\(.*\), but this is comm_hook\(bf16"):
            comm_hook(bf16()).load_state_dict(hook.state_dict())
        net = Net()
        other = comm_hook(FED, net)
        other.load_state_dict(hook.state_dict())
        with pytest.raises(ValueError, match=r"has 'first.weight' as None, but it is .* with model=… in one run"):
            train(ddp(other, net), rank, range(1))
        return ended

    told(story)


# ---------------------------------------------------------------------- errors, and the end


@pytest.mark.parametrize("native", [True, False])
def test_a_nan_ends_training_on_every_rank_with_its_name(native: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not native:
        monkeypatch.setattr(create, "why_not", lambda: "it is not to be")

    def story(rank: int) -> Sequence[Tensor]:
        net = Net()
        wrapped = ddp(comm_hook(FED, net), net, **SMALL_BUCKETS)
        train(wrapped, rank, range(2))
        batch = inputs(rank, 2) * (float("nan") if rank == 1 else 1.0)
        loss = wrapped(batch).pow(2).mean()
        if rank == 1:
            with pytest.raises(NotFinite, match=r"of (last|middle|first)\.(weight|bias) .*on rank 1 is nan") as caught:
                loss.backward()
            assert "DDP exchanged the gradients of " in caught.value.__notes__[0]
        else:
            with pytest.raises(PeerLost, match="rank 0, step 3: "):
                loss.backward()
        return [torch.ones(1)]

    told(story)


@pytest.mark.parametrize(
    ("backend", "hosts", "route"),
    [
        *[("gloo", "", route) for route in (None, all_gather, pt.collectives.ring)],
        *[("polytempo", "AABB", None), ("polytempo", "ABCD", all_gather)],
    ],
    ids=["gloo", "gloo, all_gather", "gloo, ring", "two hosts", "four hosts, all_gather"],
)
def test_ranks_far_from_the_one_that_fails_do_not_wait_for_it(backend: str, hosts: str, route: Any) -> None:
    """They have no connection that ends with it, but to ranks that fail in turn, and keep the error."""

    def story(rank: int) -> Sequence[Tensor]:
        store = dist.distributed_c10d._get_default_store()
        wrapped = ddp(comm_hook(feedback(bf16()), route=route))
        train(wrapped, rank, range(2))
        loss = wrapped(inputs(rank, 2) * (float("nan") if rank == 1 else 1.0)).pow(2).mean()
        with pytest.raises(NotFinite if rank == 1 else PeerLost) as kept:
            loss.backward()
        store.set(f"failed/{rank}", "")
        store.wait([f"failed/{each}" for each in range(4)])  # nobody ends before, which would close all it has
        assert kept.value.__traceback__ is not None
        return [torch.ones(1)]

    told(story, 4, [backend], hosts)


@pytest.mark.parametrize("native", [True, False])
def test_nobody_has_a_transport_before_all_have_met_in_it(native: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever has it may leave it at once, which gloo calls an error where a rank still connects."""
    kind = create.SharedMemoryGroup if native else dist.ProcessGroupGloo
    if not native:
        monkeypatch.setattr(create, "why_not", lambda: "it is not to be")

    def story(rank: int) -> Sequence[Tensor]:
        met: list[Any] = []
        barrier = kind.barrier
        with monkeypatch.context() as patch:
            patch.setattr(kind, "barrier", lambda group, *given: met.append(group) or barrier(group, *given))
            own = [transport_like(dist.group.WORLD)]
        assert met == own
        assert isinstance(met.pop(), kind)
        leave(own, ProcessWorld(rank, [0] * SIZE))
        return [torch.ones(1)]

    told(story, backends=["polytempo"])


def test_the_thread_ends_with_ddp_and_leaves_process_groups_as_they_were() -> None:
    def story(rank: int) -> Sequence[Tensor]:
        wrapped = ddp(comm_hook(FED))
        ended = train(wrapped, rank, range(2))
        threads = [thread for thread in threading.enumerate() if thread.name == "polytempo-comm-hook"]
        assert len(threads) == 1
        del wrapped
        gc.collect()
        threads[0].join(10)
        assert not threads[0].is_alive()
        assert len(dist.distributed_c10d._world.pg_map) == 1
        return ended

    told(story)


def test_what_cannot_work_is_refused_when_it_is_built() -> None:
    with pytest.raises(ValueError, match="merge, route and exact_below are for codecs"):
        comm_hook(low_rank(2), route=all_gather)
    with pytest.raises(ValueError, match=r"needs the whole gradient at once, and DDP has buckets; use pt.attach"):
        comm_hook(stateless(lambda port, bundle: port.barrier(), separable=False))  # type: ignore[arg-type,return-value]
    with pytest.raises(TypeError, match=r"got the strategy sync_sgd.*; strategies go with pt.attach"):
        comm_hook(sync_sgd())  # type: ignore[arg-type]
    for given, remedy in ((bf16, r"got <function bf16>; write bf16\(\)"), (7, "got 7"), (low_rank, "got a transform")):
        with pytest.raises(TypeError, match=remedy):
            comm_hook(given)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="cannot be summed, so route=ring is impossible"):
        comm_hook(natural(), route=pt.collectives.ring)
    assert comm_hook(feedback(bf16()), route=all_gather).__name__ == "comm_hook(feedback(bf16()), route=all_gather)"
    assert pt.comm_hook is comm_hook


def test_what_a_hook_is_not_for_is_said() -> None:
    def story(rank: int) -> Sequence[Tensor]:
        with pytest.raises(TypeError, match="state must be None or a process group, got dict"):
            train(ddp(comm_hook(bf16()), state={}), rank, range(1))
        wrapped = ddp(comm_hook(bf16()), nn.EmbeddingBag(50, 8, sparse=True, mode="sum"))
        with pytest.raises(ValueError, match="gradients must be dense"):
            wrapped(torch.tensor([[1, 2]])).sum().backward()
        hook = comm_hook(bf16())
        ended = train(ddp(hook), rank, range(1))
        with pytest.raises(ValueError, match="the model given to comm_hook has not"):
            train(ddp(comm_hook(bf16(), nn.Linear(2, 2))), rank, range(1))
        return ended

    told(story)
