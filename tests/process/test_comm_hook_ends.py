"""`pt.interop.comm_hook` at an end: training ends by an error, or DDP ends; and refusals."""

from __future__ import annotations

import gc
import threading
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import polytempo as pt
from polytempo.aggregation import low_rank
from polytempo.compression import all_gather, bf16, feedback, natural
from polytempo.core import NotFinite, PeerLost, Promise, stateless
from polytempo.interop.backend import create
from polytempo.interop.ddp_hook import comm_hook, leave, transport_like
from polytempo.strategies import sync_sgd
from polytempo.worlds import ProcessWorld
from process.hooked import FED, SIZE, SMALL_BUCKETS, Net, ddp, inputs, told, train

pytestmark = pytest.mark.process


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
    """Only their connections to failing ranks end, and they keep the error."""

    def story(rank: int) -> Sequence[Tensor]:
        store = dist.distributed_c10d._get_default_store()
        wrapped = ddp(comm_hook(feedback(bf16()), route=route))
        train(wrapped, rank, range(2))
        loss = wrapped(inputs(rank, 2) * (float("nan") if rank == 1 else 1.0)).pow(2).mean()
        with pytest.raises(NotFinite if rank == 1 else PeerLost) as kept:
            loss.backward()
        store.set(f"failed/{rank}", "")
        store.wait([f"failed/{each}" for each in range(4)])  # a rank that ends closes its connections
        assert kept.value.__traceback__ is not None
        return [torch.ones(1)]

    told(story, 4, [backend], hosts)


@pytest.mark.parametrize("native", [True, False])
def test_nobody_has_a_transport_before_all_have_met_in_it(native: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank may leave it immediately, which gloo calls an error where another rank still connects."""
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
    with pytest.raises(ValueError, match=r"needs the whole gradient, and DDP has buckets; use pt.attach"):
        comm_hook(stateless(lambda port, bundle: port.barrier(), promises=Promise(0)))  # type: ignore[arg-type,return-value]
    with pytest.raises(TypeError, match=r"got the strategy sync_sgd.*; strategies go with pt.attach"):
        comm_hook(sync_sgd())  # type: ignore[arg-type]
    for given, remedy in ((bf16, r"got <function bf16>; write bf16\(\)"), (7, "got 7"), (low_rank, "got a transform")):
        with pytest.raises(TypeError, match=remedy):
            comm_hook(given)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="cannot be summed, so route=ring is impossible"):
        comm_hook(natural(), route=pt.collectives.ring)
    assert comm_hook(feedback(bf16()), route=all_gather).__name__ == "comm_hook(feedback(bf16()), route=all_gather)"
    assert pt.interop.comm_hook is comm_hook


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
