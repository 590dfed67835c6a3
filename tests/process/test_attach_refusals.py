"""`attach` refuses loops that would train ranks apart in silence; and it goes on after an error."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, Adam
from torch.utils.checkpoint import checkpoint
from torch.utils.data import TensorDataset

import polytempo as pt
from polytempo.core import Strategy
from polytempo.engines.processes.worker import Result
from polytempo.worlds import ProcessWorld
from process.crew import assert_as_alone, batches, close, flat, loop, mine, small, squared, together

pytestmark = pytest.mark.process

s = pt.strategies


# --- parameters without an exchange


def test_an_optimizer_that_trains_more_than_the_model_is_refused() -> None:
    net, other = small(), nn.Linear(2, 7)
    optimizer = SGD([*net.parameters(), *other.parameters()], lr=0.1)
    with pytest.raises(ValueError, match=r"2 tensors that do not belong to the model.*shape \[7, 2\].*nn.ModuleList"):
        pt.attach(net, optimizer)
    pt.attach(nn.ModuleList([net, other]), optimizer)


def test_a_trainer_starts_no_parameter_server() -> None:
    with pytest.raises(ValueError, match=r"downpour\(.*\) has a parameter server.*use pt.run\(job, strategy"):
        pt.Trainer(pt.jobs.find("digits"), s.downpour())


def thaw(net: nn.Sequential, optimizer: SGD) -> None:
    net[0].requires_grad_(True)


def add(net: nn.Sequential, optimizer: SGD) -> None:
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))]})


@pytest.mark.parametrize(
    ("change", "message"),
    [(thaw, "a frozen parameter needs gradients now"), (add, "the optimizer was given other parameters")],
)
@pytest.mark.parametrize("strategy", [s.sync_sgd(), s.local_sgd()], ids=str)
def test_what_begins_to_train_later_is_refused_at_the_step(change: Any, message: str, strategy: Strategy) -> None:
    def work(world: ProcessWorld) -> Result:
        net = small()
        net[0].requires_grad_(False)
        optimizer = SGD(net.parameters(), lr=0.1)
        handle = pt.attach(net, optimizer, strategy)
        loop(net, optimizer, mine(batches(1), world))
        change(net, optimizer)
        with pytest.raises(RuntimeError, match=rf"{message}.*call detach\(\) on the handle and attach again"):
            loop(net, optimizer, mine(batches(1), world))
        handle.detach()
        return None

    together(2, work)


# --- more than one exchange in a step

COUNTING = [s.delayed_sgd(), s.post_local_sgd(switch_step=9)]
NOT_LINEAR = [s.delayed_sgd(), s.adasum(), s.top_k_sgd(0.2)]


@pytest.mark.parametrize("strategy", NOT_LINEAR, ids=str)
def test_two_exchanges_in_a_step_are_refused_where_they_do_not_add_up(strategy: Strategy) -> None:
    def work(world: ProcessWorld) -> Result:
        net = small()
        optimizer = SGD(net.parameters(), lr=0.1)
        pt.attach(net, optimizer, strategy)
        data = list(mine(batches(3), world))
        loop(net, optimizer, data)  # a delayed strategy hands out something from the second step on
        optimizer.zero_grad()
        squared(net(data[0][0]), data[0][1]).backward()
        squared(net(data[1][0]), data[1][1]).backward()
        with pytest.raises(RuntimeError, match=r"put no_sync\(\) around .*use_reentrant=False"):
            optimizer.step()
        return None

    together(2, work)


@pytest.mark.parametrize("strategy", COUNTING, ids=str)
def test_a_skipped_step_is_none(strategy: Strategy) -> None:
    """A gradient scaler does it: backward, no step, gradients dropped, backward again."""

    def work(world: ProcessWorld) -> Result:
        net = small()
        optimizer = SGD(net.parameters(), lr=0.1)
        pt.attach(net, optimizer, strategy)
        for step, (inputs, targets) in enumerate(mine(batches(5), world)):
            optimizer.zero_grad()
            squared(net(inputs), targets).backward()
            if step != 2:
                optimizer.step()
        return flat(net)

    first, second = together(2, work)
    assert first == second


class Checkpointed(nn.Module):
    """Both layers are computed again in the backward pass, by a backward pass inside it."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = small()

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = checkpoint(self.inner[:2], inputs.requires_grad_(), use_reentrant=True)
        out: Tensor = checkpoint(self.inner[2], hidden, use_reentrant=True)
        return out


def test_reentrant_checkpointing() -> None:
    """Reentrant checkpointing makes several exchanges a step: a mean bears that, a strategy that counts them refuses
    it."""

    def work(world: ProcessWorld) -> Result:
        net = Checkpointed()
        optimizer = SGD(net.parameters(), lr=0.1)
        pt.attach(net, optimizer)
        loop(net, optimizer, mine(batches(3), world))
        counted = Checkpointed()
        optimizer = SGD(counted.parameters(), lr=0.1)
        pt.attach(counted, optimizer, s.delayed_sgd())
        with pytest.raises(RuntimeError, match="use_reentrant=False"):
            loop(counted, optimizer, mine(batches(3), world))
        return flat(net)

    assert_as_alone(work, 3, lr=0.1)


# --- errors in backward


def fail(_: Tensor) -> None:
    raise MemoryError("no room for this gradient")


def test_a_backward_pass_that_failed_can_be_done_again() -> None:
    def work(world: ProcessWorld) -> Result:
        net = small()
        optimizer = SGD(net.parameters(), lr=0.1)
        pt.attach(net, optimizer)
        for inputs, targets in mine(batches(3), world):
            hidden = net[:2](inputs)
            if world.rank == 1:
                hidden.register_hook(fail)
                with pytest.raises(MemoryError):
                    squared(net[2](hidden), targets).backward()
            optimizer.zero_grad()
            squared(net(inputs), targets).backward()
            optimizer.step()
        return flat(net)

    assert_as_alone(work, 3, lr=0.1)


def test_after_an_exchange_has_begun_it_cannot() -> None:
    def work(world: ProcessWorld) -> Result:
        net = small()
        optimizer = SGD(net.parameters(), lr=0.1)
        pt.attach(net, optimizer, bucket_bytes=1)
        inputs, targets = batches(1)[0]
        hidden = net[:2](inputs)
        hidden.register_hook(fail)
        with pytest.raises(MemoryError):
            squared(net[2](hidden), targets).backward()
        for again in (squared(net(inputs), targets).backward, optimizer.step):
            with pytest.raises(RuntimeError, match=r"ended with an error when \d of 4 exchanges had begun"):
                again()
        return None

    together(2, work)


# --- the optimizer's state, and shares


def test_a_scalar_parameter_keeps_its_own_count_of_steps() -> None:
    """Adam's `step` has the shape of a scalar parameter, but it is not a moment: the mean over ranks must not take
    it."""

    def work(world: ProcessWorld) -> Result:
        scale = nn.ParameterList([torch.tensor(1.0)])
        optimizer = Adam(scale.parameters(), lr=0.1)
        pt.attach(scale, optimizer, s.parameter_averaging(period=2))
        for step in range(4):
            optimizer.zero_grad()
            (scale[0] * (step + world.rank)).backward()
            optimizer.step()
            if world.rank == 1 and step == 0:
                optimizer.state[scale[0]]["step"] += 4
        state = optimizer.state[scale[0]]
        return [float(state["step"]), float(state["exp_avg"])]

    (first_step, first_moment), (second_step, second_moment) = together(2, work)
    assert (first_step, second_step) == (4.0, 8.0)
    assert first_moment == second_moment


def test_moments_of_another_dtype_are_left_to_the_rank() -> None:
    class Wide(SGD):
        def step(self, closure: Any = None) -> Any:
            for group in self.param_groups:
                for parameter in group["params"]:
                    self.state[parameter].setdefault("mean", torch.zeros_like(parameter, dtype=torch.float64))
            return super().step(closure)

    def work(world: ProcessWorld) -> Result:
        net = small(torch.float32)
        optimizer = Wide(net.parameters(), lr=0.1)
        handle = pt.attach(net, optimizer, s.parameter_averaging(period=2))
        loop(net, optimizer, mine(batches(2, torch.float32), world))
        assert len(handle.replica.parameters.states) == 1
        return flat(net)

    first, second = together(2, work)
    assert first == second


def test_two_models_on_one_batch_have_the_same_share() -> None:
    """3 samples among 2 ranks: 2 and 1."""
    inputs, targets = batches(1)[0]
    samples = TensorDataset(inputs[:3], targets[:3])

    def work(world: ProcessWorld) -> Result:
        nets = [small(), small()]
        optimizers = [SGD(net.parameters(), lr=0.1) for net in nets]
        for net, optimizer in zip(nets, optimizers, strict=True):
            pt.attach(net, optimizer)
        for batch in pt.shard(samples, batch_size=2, shuffle=False):
            for net, optimizer in zip(nets, optimizers, strict=True):
                loop(net, optimizer, [batch])
        assert world.shares.last is None
        return [flat(net) for net in nets]

    alone = small()
    loop(alone, SGD(alone.parameters(), lr=0.1), [(inputs[:3], targets[:3])])
    first, second = together(2, work)
    assert first == second
    assert first[0] == first[1]
    assert close(first[0], flat(alone), 1e-12)


# --- torch's own wrappers


def in_ddp(net: nn.Module) -> nn.Module:
    return DistributedDataParallel(net)


def in_part(net: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4, dtype=torch.float64), DistributedDataParallel(net))


def sharded(net: nn.Module) -> nn.Module:
    return cast(nn.Module, fully_shard(net, mesh=init_device_mesh("cpu", (2,))))


def test_models_that_torch_averages_or_shards_are_refused_and_so_is_ddp_around_an_attached_one() -> None:
    def work(world: ProcessWorld) -> Result:
        for wrap, said in ((in_ddp, "the model is wrapped by Dist"), (in_part, "'1' is wrapped"), (sharded, "by FSDP")):
            wrapped = wrap(small())
            for strategy in (s.sync_sgd(), s.local_sgd(), s.downpour()):
                with pytest.raises(ValueError, match=said):
                    pt.attach(wrapped, SGD(wrapped.parameters(), lr=0.1), strategy)
        net = small()
        handle = pt.attach(net, SGD(net.parameters(), lr=0.1))
        ddp = in_ddp(net)
        with pytest.raises(RuntimeError, match="is called by DistributedDataParallel"):
            ddp(batches(1)[0][0])
        net(batches(1)[0][0])
        handle.detach()
        ddp(batches(1)[0][0])
        return None

    together(2, work)
