"""`pt.interop.comm_hook` in torch's own DistributedDataParallel: on gloo and on "polytempo", two real processes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.optim import SGD

import polytempo as pt
from polytempo.aggregation import low_rank, median
from polytempo.compression import all_gather, bf16, exact, feedback, fp16, qsgd, reduce_scatter, through
from polytempo.core import Codec
from polytempo.interop.ddp_hook import CommHook, comm_hook
from polytempo.strategies import sync_sgd
from polytempo.worlds import ProcessWorld
from process.hooked import FED, SIZE, SMALL_BUCKETS, Net, close, ddp, equal, inputs, recorded, summed, told, train

pytestmark = pytest.mark.process


# ---------------------------------------------------------------------- its results


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
    """Equal to the bit where nothing depends on buckets. Random numbers follow the parameters' names."""

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
    """A matrix (32, 48) and a vector of 2000, float64, with given gradients."""

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
    """channels_last: gradients are not laid out by their shape. Batch norm: DDP broadcasts buffers in between."""
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
    """DDP with a lossless codec ends as without a hook."""

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
