"""A user's loops with a parameter server: the laws of loops and of the optimizer, and refusals."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer
from torch.utils.data import TensorDataset

import polytempo as pt
from laws import loops
from laws.loops import Batch, Trial, momentum, squared
from polytempo.core import Strategy
from polytempo.worlds import ProcessWorld, current, set_current
from served_loop import in_process

s = pt.strategies

pytestmark = pytest.mark.filterwarnings("ignore:.*lr_scheduler.step:UserWarning")

LOOPS = [
    loops.plain,
    loops.closure,
    loops.closure_that_says_the_loss,
    loops.other_loss,
    loops.other_loss_zeroed,
    loops.sharpness,
    loops.accumulated,
    loops.accumulated_zeroed,
    loops.accumulated_aloud,
    loops.scaled,
    loops.checkpointed,
    loops.penalised,
    loops.differentiated,
    loops.kept,
    loops.kept_as_copies,
    loops.compiled,
    loops.clipped,
    loops.scheduled,
]
STEPS_AT_THE_SERVER = [
    s.async_sgd(),
    s.async_sgd(shards=2, replicas=1),
    s.ssp(),
    s.softsync(),
    s.backup_workers(backups=0),
]


class ServedTrial(Trial):
    """Trains on batches that are dealt: the same ones as a trial without Polytempo."""

    def __init__(self, strategy: Strategy, make: Any = momentum, **options: Any) -> None:
        super().__init__(strategy, current(), make, **options)
        whole = list(super().batches())
        data = TensorDataset(*(torch.cat([batch[i] for batch in whole]) for i in range(2)))
        self.dealt = pt.shard(data, batch_size=8, shuffle=False, world=self.world)

    def batches(self, seed: int = 7, num_steps: int = loops.STEPS) -> Iterator[Batch]:
        return super().batches(seed, num_steps) if seed != 7 else ((x, y) for x, y in self.dealt)


@pytest.fixture(autouse=True)
def _served() -> Iterator[None]:
    set_current(ProcessWorld(0, (0,)))
    with in_process():
        yield
    set_current(None)


def adam(net: nn.Module) -> Optimizer:
    return Adam(net.parameters(), lr=0.01, weight_decay=0.1)


def adamw(net: nn.Module) -> Optimizer:
    return AdamW(net.parameters(), lr=0.01)


def ends_as(trial: ServedTrial, loop: Any) -> Tensor:
    loop(trial)
    trial.handle.detach()
    return trial.parameters()


@pytest.mark.parametrize("loop", LOOPS, ids=lambda loop: loop.__name__)
def test_a_loop_means_what_it_means_without_a_server(loop: Any) -> None:
    alone = Trial(None)
    loop(alone)
    served = ServedTrial(s.async_sgd(shards=2, replicas=1))
    served.handle, handle = None, served.handle
    if loop is loops.clipped:
        served.handle = handle
    loop(served)
    handle.detach()
    assert torch.allclose(served.parameters(), alone.parameters(), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("strategy", STEPS_AT_THE_SERVER, ids=str)
@pytest.mark.parametrize("make", [momentum, adam, adamw])
def test_the_optimizers_own_settings_mean_at_the_server_what_they_mean_here(strategy: Strategy, make: Any) -> None:
    alone = Trial(None, make=make)
    loops.scheduled(alone)
    served = ServedTrial(strategy, make)
    assert torch.allclose(ends_as(served, loops.scheduled), alone.parameters(), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("strategy", [s.downpour(push_every=2, pull_every=2, lr=0.01), s.easgd(period=2)], ids=str)
@pytest.mark.parametrize(
    "loop", [loops.plain, loops.closure, loops.accumulated, loops.clipped], ids=lambda loop: loop.__name__
)
def test_a_worker_that_steps_here_ends_with_the_servers_weights(strategy: Strategy, loop: Any) -> None:
    """And whether the loop looks at them on its way changes nothing."""
    ends, differed = [], list[bool]()
    for looks in (False, True):
        trial = ServedTrial(strategy)

        def stepped(*_: Any, trial: ServedTrial = trial) -> None:
            before = trial.parameters()
            with trial.handle.consensus():
                differed.append(not torch.equal(before, trial.parameters()))
            assert torch.equal(before, trial.parameters())

        hook = trial.optimizer.register_step_post_hook(stepped) if looks else None
        ends.append(ends_as(trial, loop))
        assert hook is None or trial.handle.step == loops.STEPS
        assert trial.handle.account["ledger"][0]["once"] == 8 * loops.STEPS
    assert torch.equal(*ends)
    assert any(differed)
    assert trial.optimizer.param_groups[0]["weight_decay"] == 0.01  # it was the gradients' for a moment


def test_epochs_follow_each_other_and_each_sample_counts_once() -> None:
    trial = ServedTrial(s.async_sgd(shards=2))
    for epoch in range(3):
        assert trial.dealt.epoch == epoch
        loops.plain(trial)
        assert trial.dealt.state_dict()["epoch"] == epoch + 1
        with torch.no_grad():
            assert len(list(trial.dealt)) == loops.STEPS  # a look at the data is not training
    trial.handle.detach()
    (row,) = trial.handle.account["ledger"]
    assert (row["last_epoch"], row["once"], row["twice"], row["never"]) == (2, 8 * loops.STEPS, 0, 0)
    loops.plain(trial)  # an ordinary loop now


def test_a_loop_that_stops_within_an_epoch_gives_its_batches_back() -> None:
    trial = ServedTrial(s.downpour(push_every=2, lr=0.01))
    for number, batch in enumerate(trial.dealt):
        trial.optimizer.zero_grad()
        trial.loss(batch).backward()
        trial.optimizer.step()
        if number == 2:
            with pytest.raises(ValueError, match="save the position between epochs"):
                trial.dealt.state_dict()
            break
    trial.handle.detach()
    (row,) = trial.handle.account["ledger"]
    assert (row["once"], row["never"]) == (3 * 8, 4 * 8)


def clip(trial: ServedTrial) -> None:
    with torch.no_grad():
        trial.net[0].weight.clamp_(-0.1, 0.1)


def load(trial: ServedTrial) -> None:
    trial.net.load_state_dict(trial.net.state_dict())


def thaw(trial: ServedTrial) -> None:
    trial.optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))]})


def more_momentum(trial: ServedTrial) -> None:
    trial.optimizer.param_groups[0]["momentum"] = 0.5


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (clip, "changed in place since the last step"),
        (load, "changed in place since the last step"),
        (thaw, "other parameters are trained now"),
        (more_momentum, "settings have changed.*only learning rates may"),
    ],
)
def test_what_the_server_would_not_hear_of_is_refused(change: Any, message: str) -> None:
    trial = ServedTrial(s.async_sgd())
    trial.optimizer.register_step_post_hook(lambda *_: change(trial))
    with pytest.raises(RuntimeError, match=message):
        loops.plain(trial)
    trial.handle.detach()


def test_a_step_needs_a_dealt_batch_and_state_is_the_shards() -> None:
    trial = ServedTrial(s.async_sgd())
    trial.loss(next(Trial(None).batches())).backward()
    with pytest.raises(RuntimeError, match=r"deals the batches: iterate over pt.shard\(loader\)"):
        trial.optimizer.step()
    for ask in (trial.handle.state_dict, lambda: trial.handle.load_state_dict({})):
        with pytest.raises(ValueError, match=r"is in its shards.*inside handle.consensus\(\)"):
            ask()
    trial.handle.detach()


def test_what_attach_cannot_serve_is_refused() -> None:
    net, world = nn.Sequential(nn.Linear(2, 2)), ProcessWorld(0, (0,))
    optimizer = SGD(net.parameters(), lr=0.1)
    with pytest.raises(ValueError, match="PT1105"):
        pt.attach(net, optimizer, s.flexrr(), world=world)
    with pytest.raises(ValueError, match=r'PT1108.*buffers="broadcast"'):
        pt.attach(net, optimizer, s.ssp(), world=world, buffers="broadcast")
    with pytest.raises(ValueError, match="knows SGD, Adam, AdamW and Adagrad"):
        pt.attach(net, torch.optim.RMSprop(net.parameters()), s.ssp(), world=world)
    optimizer.param_groups[0]["momentum"] = 0.9
    net(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    with pytest.raises(ValueError, match="has a state already"):
        pt.attach(net, optimizer, s.ssp(), world=world)
    handle = pt.attach(net, optimizer, s.easgd(), world=world)
    other = nn.Linear(2, 2)
    with pytest.raises(ValueError, match=r"another model is attached with a parameter server"):
        pt.attach(other, SGD(other.parameters(), lr=0.1), s.ssp(), world=world)
    handle.detach()


def test_running_statistics_meet_at_the_server() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 3))
    optimizer, world = SGD(net.parameters(), lr=0.05), ProcessWorld(0, (0,))
    handle = pt.attach(net, optimizer, s.easgd(period=1), world=world)
    data = TensorDataset(torch.randn(32, 4), torch.randn(32, 3))
    for x, y in pt.shard(data, batch_size=8, world=world):
        optimizer.zero_grad()
        loops.squared(net(x), y).backward()
        optimizer.step()
    own = net[1].running_mean.clone()
    with handle.consensus():
        assert torch.isfinite(net[1].running_mean).all()
    assert torch.equal(net[1].running_mean, own)
    handle.detach()


def test_a_nan_is_named_before_the_server_has_it() -> None:
    trial = ServedTrial(s.async_sgd(), allow_nan=False)
    trial.net[0].weight.register_hook(lambda gradient: gradient * torch.nan)
    with pytest.raises(pt.errors.NotFinite, match=r"0\.weight"):
        loops.plain(trial)
    trial.handle.detach()


@pytest.mark.parametrize("make", [momentum, adamw])
@pytest.mark.parametrize("loop", [loops.plain, loops.accumulated, loops.kept, loops.clipped, loops.scheduled])
def test_16_bit_parameters_mean_what_they_mean_without_a_server(loop: Any, make: Any) -> None:
    """The masters are the server's, which makes the loop's step."""
    alone = Trial(s.sync_sgd(), current(), make, precision="bf16")
    loop(alone)
    assert alone.handle is not None
    alone.handle.detach()
    served = ServedTrial(s.async_sgd(), make, precision="bf16")
    assert torch.allclose(ends_as(served, loop), alone.parameters(), rtol=1e-5)


@pytest.mark.parametrize(
    "strategy", [s.async_sgd(), s.downpour(push_every=2, pull_every=3), s.easgd(period=2)], ids=str
)
def test_who_has_which_bits_in_a_served_loop(strategy: Strategy) -> None:
    low, wide = torch.bfloat16, torch.float32
    trial = ServedTrial(strategy, precision="bf16")
    for batch in trial.batches():
        trial.optimizer.zero_grad()
        answer = trial.net(batch[0])
        squared(answer, batch[1]).backward()
        trial.optimizer.step()
        assert answer.dtype == wide
        assert [(p.dtype, p.grad.dtype) for p in trial.net.parameters() if p.grad is not None] == [(low, low)] * 4
    before = trial.parameters()
    with trial.handle.consensus():
        saved = trial.net.state_dict()
        assert torch.isfinite(trial.net(torch.ones(2, 4))).all()
    assert {tensor.dtype for tensor in saved.values()} == {wide}
    assert any(not torch.equal(tensor, tensor.to(low).to(wide)) for tensor in saved.values())
    assert torch.allclose(trial.parameters().to(wide), before.to(wide), rtol=0.1, atol=0.1)
    with pytest.raises(ValueError, match="was given a closure"):
        trial.optimizer.step(lambda: trial.loss((torch.ones(2, 4), torch.ones(2, 3))))
    trial.handle.detach()
    assert {p.dtype for p in trial.net.parameters()} == {wide}


def test_a_served_loop_takes_what_has_masters_alone() -> None:
    with pytest.raises(ValueError, match=r"each worker of async_sgd.* pushes by itself.*use bf16"):
        ServedTrial(s.async_sgd(), precision="fp16(loss_scale=8)")
    net = nn.Linear(2, 2).double()
    with pytest.raises(ValueError, match="parameter 'weight' is float64"):
        pt.attach(net, SGD(net.parameters(), lr=0.1), s.async_sgd(), precision="bf16")
