"""Properties of the pretend device: memory apart from the host's, late copies, strict batches, the CPU's numbers."""

from __future__ import annotations

import ctypes
import math
import os
import resource
import signal
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from device.crew import together
from polytempo.worlds import ProcessWorld

pytestmark = pytest.mark.process

CARD, OTHER = "pretend:0", "pretend:1"
NAMED = "cpu:gloo,pretend:pccl"


@pytest.fixture(autouse=True)
def _pretend_alone(device: str) -> None:
    if device != "pretend":
        pytest.skip("these are properties of the pretend device")


def alone(work: Callable[[], Any]) -> Any:
    """The value of `work()` in a process of its own."""
    return together("pretend", 1, lambda world, card: work())[0]


def ones(*sizes: int, device: str = "cpu") -> Tensor:
    return torch.ones(sizes, device=device)


MIXED: dict[str, Callable[[], Any]] = {
    "add": lambda: ones(3, device=CARD) + ones(3),
    "add to the host's": lambda: ones(3) + ones(3, device=CARD),
    "add two cards": lambda: ones(3, device=CARD) + ones(3, device=OTHER),
    "add in place": lambda: ones(3, device=CARD).add_(ones(3)),
    "add in place to the host's": lambda: ones(3).add_(ones(3, device=CARD)),
    "out=": lambda: torch.add(ones(3), ones(3), out=ones(3, device=CARD)),
    "cat": lambda: torch.cat([ones(3), ones(3, device=CARD)]),
    "stack": lambda: torch.stack([ones(3, device=CARD), ones(3)]),
    "where": lambda: torch.where(ones(3, device=CARD) > 0, ones(3, device=CARD), ones(3)),
    "equal": lambda: torch.equal(ones(3), ones(3, device=CARD)),
    "dot": lambda: torch.dot(ones(3, device=CARD), ones(3)),
    "matmul": lambda: ones(2, 3) @ ones(3, 2, device=CARD),
    "linear": lambda: F.linear(ones(3, device=CARD), ones(2, 3)),
    "conv2d": lambda: F.conv2d(ones(1, 1, 4, 4), ones(1, 1, 3, 3, device=CARD)),
    "batch_norm": lambda: F.batch_norm(ones(2, 3, device=CARD), ones(3), ones(3), training=True),
    "cross_entropy": lambda: F.cross_entropy(ones(2, 3, device=CARD), torch.tensor([0, 1])),
    "embedding": lambda: F.embedding(torch.tensor([0]), ones(2, 3, device=CARD)),
    "index_select": lambda: torch.index_select(ones(3, device=CARD), 0, torch.tensor([0])),
    "the host's by an index of the card": lambda: ones(3)[torch.tensor([0], device=CARD)],
    "scatter_": lambda: ones(3, device=CARD).scatter_(0, torch.tensor([0]), 1.0),
    "_foreach_add_": lambda: torch._foreach_add_([ones(3, device=CARD)], [ones(3)]),
    "generator": lambda: ones(3, device=CARD).normal_(generator=torch.Generator()),
    "numpy": lambda: ones(3, device=CARD).numpy(),
}


def test_devices_do_not_mix() -> None:
    def accepted() -> list[str]:
        found = []
        for name, mixed in MIXED.items():
            try:
                mixed()
            except (RuntimeError, TypeError) as error:
                if "device" in str(error):
                    continue
            found.append(name)
        return found

    assert alone(accepted) == []


def test_scalars_and_indices_of_the_host_may_mix_as_on_cuda() -> None:
    def work() -> list[float]:
        a = torch.arange(3.0, device=CARD)
        return [(a + torch.tensor(2.0)).sum().item(), a[torch.tensor([2, 1])].sum().item()]

    assert alone(work) == [9.0, 3.0]


def test_a_read_of_its_memory_by_the_host_is_a_crash() -> None:
    def work() -> int:
        tensor = ones(3, device=CARD)
        child = os.fork()
        if child == 0:
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            signal.signal(signal.SIGSEGV, signal.SIG_DFL)
            ctypes.string_at(tensor.data_ptr(), 4)
            os._exit(0)
        return os.WTERMSIG(os.waitpid(child, 0)[1])

    assert alone(work) == signal.SIGSEGV


def test_a_fork_of_a_process_that_has_used_it_cannot() -> None:
    def work() -> str:
        tensor = ones(3, device=CARD)
        read, write = os.pipe()
        if os.fork() == 0:
            try:
                tensor + 1
                os.write(write, b"used")
            except RuntimeError as error:
                os.write(write, str(error).encode())
            os._exit(0)
        os.wait()
        return os.read(read, 200).decode()

    assert "forked subprocess" in alone(work)


def test_memory_that_was_never_written_is_nan() -> None:
    assert alone(lambda: bool(torch.empty(5, device=CARD).isnan().all()))


def test_a_download_is_nan_until_the_host_has_waited() -> None:
    def work() -> list[Any]:
        source, target = ones(2, device=CARD), torch.zeros(2).pin_memory()
        target.copy_(source, non_blocking=True)
        before = bool(target.isnan().all())
        event = torch.Event(CARD)
        event.record()
        event.synchronize()
        return [before, target.tolist()]

    assert alone(work) == [True, [1.0, 1.0]]


def test_an_upload_takes_what_the_buffer_holds_when_it_is_made() -> None:
    def work() -> list[float]:
        buffer = torch.ones(2).pin_memory()
        tensor = buffer.to(CARD, non_blocking=True)
        buffer.fill_(5)  # too early
        return tensor.tolist()

    assert alone(work) == [5.0, 5.0]


def test_an_upload_that_another_thread_makes_is_waited_for() -> None:
    def work() -> list[float]:
        ends: list[bool] = []

        def other() -> None:
            tensor = ones(2, device=CARD)
            while not ends:
                tensor.add_(1)

        thread = threading.Thread(target=other)
        thread.start()
        try:
            buffer, tensor = torch.ones(2_000_000).pin_memory(), ones(2_000_000, device=CARD)
            found = []
            for _ in range(50):
                tensor.fill_(math.nan)
                tensor.copy_(buffer, non_blocking=True)
                found.append(tensor[-2:].sum().item())
            return found
        finally:
            ends.append(True)
            thread.join()

    assert alone(work) == [2.0] * 50


def network(kind: str) -> nn.Module:
    torch.manual_seed(0)
    if kind == "layers":
        return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.LayerNorm(16), nn.Linear(16, 3))
    convolution = [nn.Unflatten(1, (1, 2, 4)), nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.MaxPool2d(2)]
    return nn.Sequential(*convolution, nn.Flatten(), nn.Linear(8, 3))


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "momentum": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, nesterov=True, foreach=True),
    "fused": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, fused=True),
    "adamw": lambda p: torch.optim.AdamW(p, 0.01, foreach=True),
    "adamw fused": lambda p: torch.optim.AdamW(p, 0.01, fused=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, 0.1),
}


@pytest.mark.parametrize("kind", ["layers", "convolutions"])
def test_training_has_the_bits_of_the_cpu(kind: str) -> None:
    def trained(optimizer: str, device: str) -> dict[str, Tensor]:
        net = network(kind).to(device)
        steps = OPTIMIZERS[optimizer](net.parameters())
        torch.manual_seed(1)
        x, y = torch.randn(32, 8).to(device), torch.randint(3, (32,)).to(device)
        for _ in range(4):
            steps.zero_grad()
            F.cross_entropy(net(x), y).backward()
            nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            steps.step()
        assert {p.device for p in net.state_dict().values()} == {torch.device(device)}
        return {name: tensor.cpu() for name, tensor in net.state_dict().items()}

    def work() -> list[str]:
        wrong = []
        for optimizer in OPTIMIZERS:
            here, there = trained(optimizer, "cpu"), trained(optimizer, CARD)
            wrong += [f"{optimizer} {name}" for name in here if not torch.equal(here[name], there[name])]
        return wrong

    assert alone(work) == []


def test_a_generator_draws_what_the_cpu_does_and_its_state_is_its_own() -> None:
    def work() -> list[bool]:
        theirs = torch.rand(5, generator=torch.Generator().manual_seed(3))
        ours = torch.rand(5, generator=torch.Generator(CARD).manual_seed(3), device=CARD)
        host, state = torch.get_rng_state(), torch.get_device_module("pretend").get_rng_state()
        first = F.dropout(ones(50, device=CARD))
        torch.get_device_module("pretend").set_rng_state(state)
        again = F.dropout(ones(50, device=CARD))
        return [
            torch.equal(theirs, ours.cpu()),
            torch.equal(first.cpu(), again.cpu()),
            torch.equal(host, torch.get_rng_state()),
        ]

    assert alone(work) == [True] * 3


def test_its_group_sums_gathers_and_sends_in_batches_alone() -> None:
    def work(world: ProcessWorld, card: torch.device) -> list[Any]:
        tensor, other = torch.full((2,), world.rank + 1.0, device=card), torch.empty(2, device=card)
        dist.all_reduce(tensor)
        whole = [torch.empty(2, device=card) for _ in range(2)]
        dist.all_gather(whole, tensor + world.rank)
        peer = 1 - world.rank
        ops = [dist.P2POp(dist.isend, tensor * world.rank, peer), dist.P2POp(dist.irecv, other, peer)]
        for each in dist.batch_isend_irecv(ops):
            each.wait()
        try:
            dist.isend(tensor, peer)
            strict = ""
        except RuntimeError as error:
            strict = str(error)
        return [tensor.tolist(), [each.tolist() for each in whole], other.tolist(), "outside of a batch" in strict]

    gathered = [[3.0, 3.0], [4.0, 4.0]]
    assert together("pretend", 2, work, backend=NAMED) == [
        [[3.0, 3.0], gathered, [3.0, 3.0], True],
        [[3.0, 3.0], gathered, [0.0, 0.0], True],
    ]


def test_torchs_own_data_parallel_trains_on_it() -> None:
    def work(world: ProcessWorld, card: torch.device) -> list[bool]:
        def trained(where: torch.device) -> Tensor:
            net = DistributedDataParallel(network("layers").to(where))
            steps = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9)
            torch.manual_seed(world.rank)
            for _ in range(3):
                steps.zero_grad()
                net(torch.randn(4, 8).to(where)).square().mean().backward()
                steps.step()
            return torch.cat([p.detach().flatten().cpu() for p in net.parameters()])

        return [torch.equal(trained(torch.device("cpu")), trained(card))]

    assert together("pretend", 2, work, backend=NAMED) == [[True], [True]]
