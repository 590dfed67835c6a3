"""Users' loops around `attach`: refusals at their place, and the model of `Handle.consensus`."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import SGD, Optimizer
from torch.utils.data import TensorDataset

import polytempo as pt
from polytempo.core import NotFinite, Promise, Strategy
from polytempo.engines.processes.worker import Result
from polytempo.worlds import ProcessWorld
from process.crew import assert_as_alone, batches, close, flat, loop, mine, small, squared, together

pytestmark = pytest.mark.process

s = pt.strategies


def scaled(net: nn.Module, optimizer: Optimizer, scaler: GradScaler, data: object, spoilt: int = -1) -> None:
    """A loop with loss scaling; the loss of step `spoilt` is infinite."""
    for step, (inputs, targets) in enumerate(data):  # type: ignore[arg-type,var-annotated]
        optimizer.zero_grad()
        scaler.scale(squared(net(inputs), targets) * (torch.inf if step == spoilt else 1.0)).backward()
        scaler.step(optimizer)
        scaler.update()


def halving() -> GradScaler:
    return GradScaler("cpu", init_scale=256.0, growth_interval=1)


# --- loss scales

MUST_KNOW = [s.top_k_sgd(0.2), s.local_sgd(period=2), s.delayed_sgd(), s.shared_memory(), s.hogwild("in_turn")]


@pytest.mark.parametrize("strategy", MUST_KNOW, ids=str)
def test_a_scaler_that_attach_does_not_know_is_refused_at_the_step(strategy: Strategy) -> None:
    def work(world: ProcessWorld) -> Result:
        net = small(torch.float32)
        optimizer = SGD(net.parameters(), lr=0.1)
        handle = pt.attach(net, optimizer, strategy)
        data = mine(batches(2, torch.float32), world)
        if "delayed" in str(strategy):
            loop(net, optimizer, [next(data)])  # a scaler stops at the first step, which has no gradient at all
        with pytest.raises(RuntimeError, match=r"must know of a GradScaler.*scaler=scaler"):
            scaled(net, optimizer, halving(), data)
        handle.detach()
        return None

    together(2, work)


@pytest.mark.parametrize("strategy", [s.sync_sgd(), s.hogwild()], ids=str)
def test_a_mean_and_ranks_that_go_their_own_way_need_not_know(strategy: Strategy) -> None:
    def work(world: ProcessWorld) -> Result:
        net = small(torch.float32)
        optimizer = SGD(net.parameters(), lr=0.1)
        handle = pt.attach(net, optimizer, strategy)
        scaler = halving()
        scaled(net, optimizer, scaler, mine(batches(4, torch.float32), world), spoilt=2 * world.rank)
        handle.detach()
        return [scaler.get_scale(), all(torch.isfinite(p).all() for p in net.parameters())]

    skipped = 2 if strategy.synchronized else 1
    assert together(2, work) == [[256.0 * 2 ** (4 - 2 * skipped), True]] * 2


def test_an_infinity_that_a_codec_refuses_names_the_remedy() -> None:
    def work(world: ProcessWorld) -> Result:
        net = small(torch.float32)
        optimizer = SGD(net.parameters(), lr=0.1)
        pt.attach(net, optimizer, s.top_k_sgd(0.2, exact_below=0))
        with pytest.raises(NotFinite, match=r"pt\.attach\(…, scaler=scaler\)"):
            scaled(net, optimizer, halving(), mine(batches(1, torch.float32), world), spoilt=0)
        return None

    together(2, work)


def test_the_last_pass_of_a_step_must_be_heard_where_ranks_agree_on_infinities() -> None:
    def work(world: ProcessWorld) -> Result:
        net = small(torch.float32)
        optimizer, scaler = SGD(net.parameters(), lr=0.1), halving()
        handle = pt.attach(net, optimizer, s.local_sgd(), scaler=scaler)
        inputs, targets = next(mine(batches(1, torch.float32), world))
        with handle.no_sync():
            scaler.scale(squared(net(inputs), targets)).backward()
        with pytest.raises(RuntimeError, match=r"outside of no_sync\(\)"):
            scaler.step(optimizer)
        return None

    together(2, work)


def test_ranks_agree_on_their_scalers() -> None:
    def work(world: ProcessWorld) -> Result:
        net = small(torch.float32)
        scaler = GradScaler("cpu", init_scale=2.0 ** (8 + world.rank))
        with pytest.raises(pt.errors.Mismatch, match="scaler"):
            pt.attach(net, SGD(net.parameters(), lr=0.1), s.local_sgd(), scaler=scaler)
        return None

    together(2, work)


def test_a_fused_optimizer_skips_steps_itself() -> None:
    def work(world: ProcessWorld) -> Result:
        ends = {}
        for strategy in (s.sync_sgd(), s.top_k_sgd(0.2), s.local_sgd(period=2), s.delayed_sgd()):
            for fused in (True, False):
                net = small(torch.float32)
                optimizer, scaler = SGD(net.parameters(), lr=0.1, momentum=0.9, fused=fused), halving()
                handle = pt.attach(net, optimizer, strategy, scaler=scaler)
                spoilt = 2 if world.rank else -1
                scaled(net, optimizer, scaler, mine(batches(6, torch.float32), world), spoilt)
                ends[f"{strategy}, {'fused' if fused else 'not'}"] = [*flat(net), handle.step]
        net = small(torch.float32)
        optimizer, scaler = SGD(net.parameters(), lr=0.1, fused=True), halving()
        handle = pt.attach(net, optimizer, s.shared_memory(), scaler=scaler)
        with pytest.raises(RuntimeError, match="fused=False"):
            scaled(net, optimizer, scaler, mine(batches(1, torch.float32), world))
        handle.detach()
        return ends

    for ends in together(2, work):
        for name in [name for name in ends if name.endswith("fused")]:
            other = ends[name.removesuffix("fused") + "not"]
            assert ends[name][-1] == other[-1] == 5
            assert close(ends[name][:-1], other[:-1], 1e-6), name


# --- ranks that have left join() cannot follow


def test_join_refuses_a_scaler_and_gradients_that_no_step_uses() -> None:
    def work(world: ProcessWorld) -> Result:
        net = small(torch.float32)
        handle = pt.attach(net, SGD(net.parameters(), lr=0.1), s.sync_sgd(), scaler=halving())
        with pytest.raises(ValueError, match=r"join\(\)"), handle.join():
            pass
        handle.detach()
        net = small()
        optimizer = SGD(net.parameters(), lr=0.1)
        handle = pt.attach(net, optimizer)
        inputs, targets = next(mine(batches(1), world))
        squared(net(inputs), targets).backward()
        handle._members.joining = True
        optimizer.zero_grad()
        with pytest.raises(RuntimeError, match=r"inside join\(\) .* count every exchange as a step"):
            squared(net(inputs), targets).backward()
        return None

    together(2, work)


# --- gradients


def test_a_second_step_on_the_same_gradients_is_refused_where_they_are_no_mean() -> None:
    def work(world: ProcessWorld) -> Result:
        ends = []
        for strategy in (s.sync_sgd(), s.top_k_sgd(0.2)):
            net = small()
            optimizer = SGD(net.parameters(), lr=0.1)
            pt.attach(net, optimizer, strategy)
            loop(net, optimizer, mine(batches(1), world))
            if Promise.LINEAR in strategy.gradients.promises:
                optimizer.step()
            else:
                with pytest.raises(RuntimeError, match=r"drop gradients by zero_grad\(\) before the next step"):
                    optimizer.step()
            ends.append(flat(net))
        return ends

    first, second = together(2, work)
    assert first == second
    alone = small()
    optimizer = SGD(alone.parameters(), lr=0.1)
    loop(alone, optimizer, batches(1))
    optimizer.step()
    assert close(first[0], flat(alone), 1e-12)


def test_a_rank_that_a_loss_does_not_reach_takes_part_after_gradients_were_dropped() -> None:
    def work(world: ProcessWorld) -> Result:
        net = small()
        optimizer = SGD(net.parameters(), lr=0.1)
        pt.attach(net, optimizer)
        inputs, targets = batches(1)[0]
        (9 * squared(net(inputs), targets)).backward()
        optimizer.zero_grad()
        if world.rank == 0:
            squared(net(inputs), targets).backward()
        optimizer.step()
        return flat(net)

    assert_as_alone(work, 1, lr=0.05)


# --- the model


class Normed(nn.Module):
    """A model with running statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)
        self.out = nn.Linear(4, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        out: Tensor = self.out(self.norm(inputs))
        return out


def test_the_agreed_model_is_lent_and_the_own_given_back() -> None:
    def work(world: ProcessWorld) -> Result:
        torch.manual_seed(1)
        net = Normed().double()
        optimizer = SGD(net.parameters(), lr=0.1, momentum=0.9)
        handle = pt.attach(net, optimizer, s.local_sgd(period=8))
        loop(net, optimizer, mine(batches(5), world))
        own = [tensor.tolist() for tensor in [*net.parameters(), *net.buffers()]]
        with handle.consensus():
            lent = [tensor.tolist() for tensor in [*net.parameters(), *net.buffers()]]
            with pytest.raises(RuntimeError, match=r"leave it before optimizer\.step\(\)"):
                optimizer.step()
        assert own == [tensor.tolist() for tensor in [*net.parameters(), *net.buffers()]]
        return [own, lent]

    (own, lent), (other, also) = together(2, work)
    assert lent == also
    assert own != other
    for a, b, mean in zip(own[:-1], other[:-1], lent[:-1], strict=True):
        middle = (torch.tensor(a, dtype=torch.float64) + torch.tensor(b, dtype=torch.float64)) / 2
        assert torch.allclose(middle, torch.tensor(mean, dtype=torch.float64), rtol=1e-12, atol=0)


def test_where_all_hold_the_same_model_nothing_is_lent() -> None:
    net = small()
    handle = pt.attach(net, SGD(net.parameters(), lr=0.1))
    with handle.consensus():
        handle.replica.optimizer.step()


def test_other_parameters_than_the_optimizers_are_refused() -> None:
    net = small()
    optimizer = SGD(net.parameters(), lr=0.1)  # which keeps the handle
    pt.attach(net, optimizer)
    with pytest.raises(RuntimeError, match=r"assign=True.*leave out assign"):
        net.load_state_dict(small().state_dict(), assign=True)


COPIES: dict[str, Callable[[nn.Module], nn.Module]] = {
    "deepcopy": copy.deepcopy,
    "saved": lambda net: torch.load(_saved(net), weights_only=False),
}


def _saved(net: nn.Module) -> io.BytesIO:
    file = io.BytesIO()
    torch.save(net, file)
    file.seek(0)
    return file


@pytest.mark.parametrize("name", COPIES)
def test_a_copy_of_an_attached_model_is_an_ordinary_one(name: str) -> None:
    def work(world: ProcessWorld) -> Result:
        net = small()
        optimizer = SGD(net.parameters(), lr=0.1)
        handle = pt.attach(net, optimizer, s.diloco(period=2))
        other = COPIES[name](net)
        other.load_state_dict({key: value + 1 for key, value in other.state_dict().items()}, assign=True)
        loop(net, optimizer, mine(batches(2), world))
        theirs = SGD(other.parameters(), lr=0.1)
        loop(other, theirs, mine(batches(1), world))
        assert handle.step == 2
        return [flat(net), flat(other)]

    first, second = together(2, work)
    assert first[0] == second[0]
    assert first[1] != second[1]


@pytest.mark.parametrize("form", ["tuple", "dict", "list of modules"])
def test_a_batch_is_recognised_wherever_the_model_is_given_it(form: str) -> None:
    """3 samples among 2 ranks, 2 and 1, taken before the step on the 4 before them."""
    random = torch.Generator().manual_seed(5)
    samples = TensorDataset(torch.randn(7, 4, generator=random), torch.randn(7, 3, generator=random))

    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.linear = nn.Linear(4, 3)

        def forward(self, *, named: dict[str, Tensor]) -> Tensor:
            out: Tensor = self.linear(named["inputs"])
            return out

    def output(net: nn.Module, inputs: Tensor) -> Tensor:
        if form == "dict":
            return net(named={"inputs": inputs})
        return net[0](inputs) if isinstance(net, nn.ModuleList) else net(inputs)

    def made() -> nn.Module:
        if form == "dict":
            return Named()
        torch.manual_seed(0)
        return nn.ModuleList([nn.Linear(4, 3)]) if form == "list of modules" else nn.Linear(4, 3)

    def train(net: nn.Module, parts: list[tuple[Tensor, Tensor]]) -> list[float]:
        optimizer = SGD(net.parameters(), lr=0.1)
        if torch.distributed.is_initialized():
            pt.attach(net, optimizer)
            parts = list(pt.shard(samples, batch_size=2, shuffle=False))
        for inputs, targets in parts:
            optimizer.zero_grad()
            squared(output(net, inputs), targets).backward()
            optimizer.step()
        return flat(net)

    first, second = together(2, lambda world: train(made(), []))
    whole = list(zip(samples.tensors[0].split(4), samples.tensors[1].split(4), strict=True))
    assert first == second
    assert close(first, train(made(), whole), 1e-6)


def test_a_whole_graph_is_compiled() -> None:
    def work(world: ProcessWorld) -> Result:
        net = small()
        optimizer = SGD(net.parameters(), lr=0.1)
        pt.attach(net, optimizer)
        loop(torch.compile(net, backend="eager", fullgraph=True), optimizer, mine(batches(2), world))  # type: ignore[arg-type]
        return flat(net)

    assert_as_alone(work, 2, lr=0.1)
