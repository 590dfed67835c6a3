"""Horovod's API on a device: collectives, the optimizer and elastic states have the CPU's bits."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

import polytempo.horovod.torch as hvd
from polytempo import horovod
from polytempo.core.calls.refusals import Incompatible
from polytempo.device import num_devices
from polytempo.engines.local_engine import launch

pytest.importorskip("device.build", reason="the fixture `device` is made by the harness beside this file")
pytestmark = pytest.mark.process

RANKS = {"a device each": 2, "more ranks than devices": 3}


@pytest.fixture(params=RANKS.values(), ids=RANKS)
def num_ranks(request: pytest.FixtureRequest) -> int:
    return int(request.param)


def both(device: str, num_ranks: int, work: Callable[[torch.device], list[Tensor]]) -> None:
    """`work` on the device equals `work` on the CPU, and its tensors are there."""

    def on_both() -> list[str]:
        hvd.init()
        card = torch.device(device, hvd.local_rank() % num_devices())
        torch.accelerator.set_device_index(card.index)
        there, here = work(card), work(torch.device("cpu"))
        found = ["not on the device" for tensor in there if tensor.device != card]
        exact = device == "pretend"
        same = [
            torch.equal(a.cpu(), b) if exact else torch.allclose(a.cpu(), b, rtol=1e-4)
            for a, b in zip(there, here, strict=True)
        ]
        return [*found, *(f"{place} differs" for place, equal in enumerate(same) if not equal)]

    assert horovod.run(on_both, np=num_ranks) == [[]] * num_ranks


def numbers(where: torch.device, size: int = 6) -> Tensor:
    return (torch.arange(1.0, size + 1) * (hvd.rank() + 1) / 7).to(where)


def test_collectives(device: str, num_ranks: int) -> None:
    def work(where: torch.device) -> list[Tensor]:
        kind = where.type
        changed = numbers(where)
        hvd.allreduce_(changed, name=f"in place {kind}")
        later = hvd.allreduce_async(numbers(where), op=hvd.Sum, name=f"later {kind}")
        answers = [
            changed,
            hvd.synchronize(later),
            hvd.allreduce(numbers(where), op=hvd.Max, name=f"max {kind}"),
            hvd.allreduce(numbers(where), compression=hvd.Compression.fp16, name=f"fp16 {kind}"),
            hvd.allgather(numbers(where)[: hvd.rank() + 1], name=f"gather {kind}"),
            hvd.broadcast(numbers(where), root_rank=1, name=f"broadcast {kind}"),
            hvd.reducescatter(numbers(where), op=hvd.Sum, name=f"scatter {kind}"),
            hvd.alltoall(numbers(where, 2 * hvd.size()), name=f"all to all {kind}"),
        ]
        return [*answers, *hvd.grouped_allreduce([numbers(where), numbers(where) + 1], name=f"group {kind}")]

    both(device, num_ranks, work)


def model(where: torch.device) -> nn.Sequential:
    torch.manual_seed(hvd.rank())
    return nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 1)).to(where)


def trained(net: nn.Module, optimizer: Any, where: torch.device, steps: range) -> None:
    for step in steps:
        optimizer.zero_grad()
        mse_loss(net(numbers(where) + step), torch.ones(1, device=where)).backward()
        optimizer.step()


def optimizer_of(net: nn.Module) -> Any:
    return torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)


def parameters(net: nn.Module) -> list[Tensor]:
    return [parameter.detach().clone() for parameter in net.parameters()]


@pytest.mark.parametrize("options", [{}, {"compression": hvd.Compression.fp16}, {"op": hvd.Adasum}], ids=str)
def test_the_optimizer(device: str, options: dict[str, Any]) -> None:
    def work(where: torch.device) -> list[Tensor]:
        net = model(where)
        plain = optimizer_of(net)
        hvd.broadcast_parameters(net.state_dict(), root_rank=0)
        trained(net, plain, where, range(1 + hvd.rank()))  # states differ
        hvd.broadcast_parameters(net.state_dict(), root_rank=0)
        hvd.broadcast_optimizer_state(plain, root_rank=0)
        optimizer = hvd.DistributedOptimizer(plain, net.named_parameters(), **options)
        trained(net, optimizer, where, range(3))
        return parameters(net)

    both(device, 2, work)


def test_an_elastic_state(device: str, num_ranks: int) -> None:
    """A state goes back to its commit, and a newcomer's becomes rank 0's; all on the device."""

    def work(where: torch.device) -> list[Tensor]:
        net = model(where)
        optimizer = hvd.DistributedOptimizer(optimizer_of(net), net.named_parameters())
        state: Any = hvd.elastic.TorchState(net, optimizer, epoch=hvd.rank())
        state.sync()
        trained(net, optimizer, where, range(2))
        state.commit()
        committed = parameters(net)
        trained(net, optimizer, where, range(2, 4))
        state.restore()
        restored = parameters(net)
        if hvd.rank() == 1:  # the newcomer
            with torch.no_grad():
                for parameter in net.parameters():
                    parameter.zero_()
        state.sync()
        assert state.epoch == 0
        momenta = [entry["momentum_buffer"] for entry in optimizer.state.values()]
        assert all(tensor.device == where for tensor in momenta)
        trained(net, optimizer, where, range(2, 4))
        return [*committed, *restored, *parameters(net), *momenta]

    both(device, num_ranks, work)


WRITTEN = """
import torch
import polytempo.horovod.torch as hvd

def on(device):
    hvd.init()
    net = torch.nn.Linear(2, 1, device=device)
    hvd.allreduce(net(torch.ones(1, 2, device=device)).sum(), name="sum").backward()
    return net.weight.grad.tolist()
"""


def test_a_process_that_has_used_the_device_forks_no_ranks(
    device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks ended with torch's errors about forks. A function with a name runs in new interpreters."""
    (tmp_path / "written_ranks.py").write_text(WRITTEN)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)

    def launched(use: Callable[[], Any], code: str) -> list[Any]:
        use()
        with pytest.raises(Incompatible, match=code):
            horovod.run(lambda: 1, np=2)
        return horovod.run(importlib.import_module("written_ranks").on, (device,), np=2)

    uses = {
        "PT1906": lambda: torch.ones(1, device=device).sum().item(),
        "PT1907": lambda: torch.ones(1, requires_grad=True).sum().backward(),
    }
    for code, use in uses.items():
        [found] = launch(lambda _, use=use, code=code: launched(use, code), 1, threads=1)
        assert found == [[[1.0, 1.0]]] * 2
