"""Hogwild! with atomic additions: workers add to one component at the same time, and nothing is lost."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, Optimizer

import polytempo as pt
from native.test_sparse import SMALL, problem_of, shared_tensor
from polytempo.native.kernels import sparse
from polytempo.native.kernels.sparse import ATOMIC, FREE, Access, RowPart, logistic_epoch, scatter_add_
from polytempo.one_host.hogwild import TurnHooks
from polytempo.one_host.sparse_linear import Settings, window_of
from polytempo.runs.programs.hogwild_linear import fit_logistic
from polytempo.worlds import ProcessWorld
from process.crew import together

NUM_ADDITIONS = 50_000


# ---------------------------------------------------------------------------------------------- the law


@pytest.mark.process
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_no_addition_to_one_component_is_lost(num_ranks: int, dtype: torch.dtype) -> None:
    table, rows = shared_tensor(2, 1, dtype=dtype), torch.ones(NUM_ADDITIONS, dtype=torch.int64)

    def work(world: ProcessWorld) -> None:
        world.drive(_barrier(world))
        scatter_add_(table, rows, torch.ones(NUM_ADDITIONS, 1, dtype=dtype), 1.0, atomic=True)

    together(num_ranks, work)
    assert table.flatten().tolist() == [0, num_ranks * NUM_ADDITIONS]


async def _barrier(world: ProcessWorld) -> None:
    await world.port.barrier()


class Slopes(nn.Module):
    """A loss that is the negative sum of a dense parameter and of one row of a table: all gradients are -1."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dense = nn.Parameter(torch.zeros(5, 3, dtype=dtype))
        self.table = nn.Embedding.from_pretrained(torch.zeros(4, 3, dtype=dtype), freeze=False, sparse=True)

    def forward(self) -> Tensor:
        return -self.dense.sum() - self.table(torch.tensor([2])).sum()


STEPPED: list[tuple[str, Callable[[Any], Optimizer], float]] = [
    ("plain SGD", lambda parameters: SGD(parameters, lr=1.0), 12.0),
    (
        "momentum",
        lambda parameters: SGD(parameters, lr=1.0, momentum=0.5),
        24 - 2 + 2.0**-11,
    ),  # Σ 2 - 2^(1 - t), t ≤ 12
]
NUM_STEPS = 12


@pytest.mark.process
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize(("make", "moved"), [row[1:] for row in STEPPED], ids=[row[0] for row in STEPPED])
def test_no_update_of_a_step_is_lost(make: Callable[[Any], Optimizer], moved: float, dtype: torch.dtype) -> None:
    """Each rank's sum of updates is known, and exact in binary: the one copy is their sum, in spite of races."""

    def work(world: ProcessWorld) -> list[float]:
        model = Slopes(dtype)
        optimizer = make(model.parameters())
        handle = pt.attach(model, optimizer, pt.strategies.hogwild("atomic"), world=world)
        for _ in range(NUM_STEPS):
            optimizer.zero_grad()
            model().backward()
            optimizer.step()
        handle.detach()
        return [*model.dense.detach().flatten().tolist(), *model.table.weight.detach().flatten().tolist()]

    still = [0.0] * 3
    for found in together(3, work):
        assert found == [3 * moved] * 15 + still * 2 + [3 * moved] * 3 + still


# ---------------------------------------------------------------------------------------------- one process


def test_alone_an_atomic_addition_has_the_bits_of_a_load_and_a_store() -> None:
    random = torch.Generator().manual_seed(3)
    for dtype in (torch.float32, torch.float64):
        free = torch.randn(6, 7, generator=random).to(dtype)
        atomic, rows = free.clone(), torch.randint(6, (40,), generator=random)
        values = torch.randn(40, 7, generator=random).to(dtype)
        scatter_add_(free, rows, values, -0.3)
        scatter_add_(atomic, rows, values, -0.3, atomic=True)
        assert torch.equal(free, atomic)


def test_nan_and_infinity_are_added_too() -> None:
    table = torch.tensor([[float("nan"), float("inf"), 1.0, 1.0]])
    added = torch.tensor([[1.0, 1.0, float("nan"), float("inf")]])
    scatter_add_(table, torch.tensor([0]), added, 1.0, atomic=True)
    assert table.isnan().tolist() == [[True, False, True, False]]
    assert table.isinf().tolist() == [[False, True, False, True]]


@pytest.mark.parametrize("window", [1, 7, 64])
@pytest.mark.parametrize("l2", [0.0, 0.001])
def test_alone_an_atomic_pass_has_the_bits_of_a_free_one(window: int, l2: float) -> None:
    order = np.random.default_rng(0).permutation(SMALL.num_rows)
    free, atomic = problem_of(SMALL, l2), problem_of(SMALL, l2)
    for problem, update in ((free, FREE), (atomic, ATOMIC)):
        logistic_epoch(problem, order, RowPart(0, 400), 0.5, Access(update, window))
    assert free.weights.tobytes() == atomic.weights.tobytes()


@pytest.mark.parametrize("make", [lambda p: SGD(p, lr=0.1, weight_decay=0.01), lambda p: Adam(p, lr=0.1)])
def test_alone_a_step_on_private_copies_is_torchs_step(make: Callable[[Any], Optimizer]) -> None:
    found = []
    for hooked in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Conv2d(2, 3, 2).to(memory_format=torch.channels_last), nn.Flatten(), nn.Linear(12, 1))
        optimizer = make(model.parameters())
        hooks = TurnHooks(ProcessWorld(0, [0]), optimizer, "atomic").watch() if hooked else None
        homes = [parameter.data_ptr() for parameter in model.parameters()]

        def closure(model: nn.Module = model, optimizer: Optimizer = optimizer) -> Tensor:
            optimizer.zero_grad()
            loss = model(torch.ones(1, 2, 3, 3)).square().sum()
            loss.backward()
            return torch.as_tensor(loss)

        for _ in range(4):
            optimizer.step(closure)  # type: ignore[arg-type]
        assert [parameter.data_ptr() for parameter in model.parameters()] == homes
        if hooks is not None:
            hooks.remove()
        found.append(torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()]))
    torch.testing.assert_close(*found, rtol=1e-5, atol=1e-6)


def test_only_float32_and_float64_are_added_to() -> None:
    optimizer = SGD([nn.Parameter(torch.zeros(1, dtype=torch.float16))], lr=0.1)
    with pytest.raises(ValueError, match=r"not to torch\.float16; use 'locked'"):
        TurnHooks(ProcessWorld(0, [0]), optimizer, "atomic")


# ---------------------------------------------------------------------------------------------- logistic regression


def test_atomic_updates_have_a_window_as_free_ones_have() -> None:
    assert window_of(SMALL, Settings(update="atomic")) == window_of(SMALL, Settings(update="free")) > 1
    assert window_of(SMALL, Settings(update="atomic", window=3)) == 3


def test_without_the_native_core_tensors_are_refused_and_rows_take_the_lock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sparse, "load", lambda: None)
    with pytest.raises(ValueError, match="atomic additions need the native core"):
        scatter_add_(torch.zeros(1, 1), torch.zeros(1, dtype=torch.int64), torch.ones(1, 1), 1.0, atomic=True)
    problem, entered = problem_of(SMALL), []

    class Lock:
        def __enter__(self) -> None:
            entered.append(True)

        def __exit__(self, *_: object) -> None:
            pass

    logistic_epoch(problem, np.arange(400), RowPart(0, 400), 0.5, Access(ATOMIC, lock=Lock()))
    assert len(entered) == 400


@pytest.mark.process
@pytest.mark.parametrize("window", [1, None])
def test_workers_reach_the_serial_loss_within_two_percent(window: int | None) -> None:
    alone = fit_logistic(SMALL, workers=1, l2=1e-4, epochs=10)
    fit = fit_logistic(SMALL, workers=3, update="atomic", window=window, l2=1e-4, epochs=10)
    assert fit.losses[-1] == pytest.approx(alone.losses[-1], rel=0.02)
