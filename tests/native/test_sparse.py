"""Sparse updates of shared weights: against their twins, and by real workers on one copy."""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from polytempo.core import TimedOut
from polytempo.data import SparseRows, libsvm_rows
from polytempo.data.rows import random_rows
from polytempo.native.kernels import sparse
from polytempo.native.kernels.sparse import (
    ATOMIC,
    FREE,
    IN_TURN,
    LOCKED,
    Access,
    Problem,
    RowPart,
    logistic_epoch,
    scatter_add_,
)
from polytempo.one_host.hogwild import TurnHooks
from polytempo.one_host.sparse_linear import Settings, logistic_loss, part_of, scaled_decay, window_of
from polytempo.runs.programs.hogwild_linear import LinearFit, fit_logistic
from polytempo.worlds import ProcessWorld
from process.crew import together
from some_cases import examples

SMALL = random_rows(400, 120, density=0.05, seed=1)
MEDIUM = random_rows(4_000, 1_000, density=0.01, seed=2)


@pytest.fixture(params=["native", "twin"])
def either(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Once with the native core, once as where there is none."""
    if request.param == "twin":
        monkeypatch.setattr(sparse, "load", lambda: None)
    else:
        assert sparse.load() is not None
    return str(request.param)


# ---------------------------------------------------------------------------------------------- scatter-add


SCATTERED: list[tuple[str, list[int], list[float], list[float]]] = [
    ("nothing", [], [], [0, 0, 0]),
    ("one row", [1], [2], [0, 1, 0]),
    ("a row twice", [2, 2], [2, 4], [0, 0, 3]),
    ("rows in any order, often", [2, 0, 2, 0, 2], [2, 4, 6, 8, 10], [6, 0, 9]),
]


@pytest.mark.parametrize(("rows", "values", "expected"), [r[1:] for r in SCATTERED], ids=[r[0] for r in SCATTERED])
def test_every_duplicate_is_added(either: str, rows: list[int], values: list[float], expected: list[float]) -> None:
    table = torch.zeros(3, 2)
    scatter_add_(table, torch.tensor(rows, dtype=torch.long), torch.tensor(values).unsqueeze(1).expand(-1, 2), 0.5)
    assert table.tolist() == [[value, value] for value in expected]


@given(st.integers(1, 9), st.integers(1, 17), st.integers(0, 40), st.integers(0, 2**32 - 1))
def test_scatter_add_equals_index_add_to_the_bit(num_rows: int, width: int, count: int, seed: int) -> None:
    random = torch.Generator().manual_seed(seed)
    table = torch.randn(num_rows, width, generator=random)
    rows = torch.randint(num_rows, (count,), generator=random)
    values = torch.randn(count, width, generator=random)
    expected = table.clone()
    for row, value in zip(rows.tolist(), values, strict=True):
        expected[row] += torch.tensor(-0.3) * value
    scatter_add_(table, rows, values, -0.3)
    assert torch.equal(table, expected)


def test_a_row_that_is_not_there_changes_nothing(either: str) -> None:
    for rows in ([0, 3], [-1]):
        table = torch.zeros(3, 1)
        if either == "native":
            with pytest.raises(IndexError, match="rows run from 0 to 2"):
                scatter_add_(table, torch.tensor(rows), torch.ones(len(rows), 1), 1.0)
            assert not table.any()


# ---------------------------------------------------------------------------------------------- one pass


def problem_of(rows: SparseRows, l2: float = 0.0) -> Problem:
    columns = rows.num_columns
    return Problem(
        *rows[:4],
        scaled_decay(rows, l2),
        np.zeros(columns, np.float32),
        np.zeros(columns, np.uint32),
        np.zeros(1, np.uint64),
    )


@settings(max_examples=examples(20))
@given(st.integers(0, 2**16), st.sampled_from([0.0, 0.01]), st.sampled_from([FREE, ATOMIC, LOCKED, IN_TURN]))
def test_a_pass_equals_its_twin(seed: int, l2: float, update: int) -> None:
    rows = random_rows(30, 20, density=0.2, seed=seed)
    order = np.random.default_rng(seed).permutation(30)
    native, twin = problem_of(rows, l2), problem_of(rows, l2)
    assert logistic_epoch(native, order, RowPart(0, 30), 0.5, Access(update)) == 30
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sparse, "load", lambda: None)
        assert logistic_epoch(twin, order, RowPart(0, 30), 0.5, Access(update)) == 30
    np.testing.assert_allclose(native.weights, twin.weights, rtol=2e-5, atol=1e-6)
    assert not native.locks.any()


@pytest.mark.parametrize("window", [2, 7, 64, 1000])
def test_alone_a_window_changes_no_bit(window: int) -> None:
    order = np.random.default_rng(0).permutation(SMALL.num_rows)
    direct, held = problem_of(SMALL, 0.001), problem_of(SMALL, 0.001)
    logistic_epoch(direct, order, RowPart(0, 400), 0.5)
    logistic_epoch(held, order, RowPart(0, 400), 0.5, Access(window=window))
    assert direct.weights.tobytes() == held.weights.tobytes()


@pytest.mark.parametrize("update", [FREE, ATOMIC, LOCKED, IN_TURN])
def test_alone_every_update_is_the_same_serial_descent(update: int) -> None:
    order = np.random.default_rng(0).permutation(SMALL.num_rows)
    free, other = problem_of(SMALL), problem_of(SMALL)
    logistic_epoch(free, order, RowPart(0, 400), 0.5)
    logistic_epoch(other, order, RowPart(0, 400), 0.5, Access(update))
    assert free.weights.tobytes() == other.weights.tobytes()


@pytest.mark.parametrize(
    ("update", "taken"), [(LOCKED, "locks"), (IN_TURN, "turn")], ids=["a lock that nobody opens", "a turn that is past"]
)
def test_a_wait_has_a_deadline(update: int, taken: str) -> None:
    problem = problem_of(SMALL)
    getattr(problem, taken)[:] = 1
    order = np.arange(SMALL.num_rows)
    with pytest.raises(TimedOut, match=r"rank 1: timed out: an update of shared weights did not finish within 0.05 s"):
        logistic_epoch(problem, order, RowPart(0, 400), 0.5, Access(update, timeout_s=0.05), rank=1)


def test_who_waits_too_long_for_a_column_unlocks_those_before_it() -> None:
    problem = problem_of(SMALL)
    columns = SMALL.columns[SMALL.starts[0] : SMALL.starts[1]]
    problem.locks[columns[-1]] = 1
    with pytest.raises(TimedOut):
        logistic_epoch(problem, np.arange(1), RowPart(0, 1), 0.5, Access(LOCKED, timeout_s=0.01))
    assert len(columns) > 1
    assert problem.locks.nonzero()[0].tolist() == [columns[-1]]


def test_a_feature_decays_by_how_often_it_is_met() -> None:
    starts, columns = np.array([0, 2, 3], np.int64), np.array([0, 1, 0], np.int32)
    rows = SparseRows(starts, columns, np.ones(3, np.float32), np.ones(2, np.float32), 3)
    scaled = scaled_decay(rows, 0.1)
    assert scaled is not None
    np.testing.assert_allclose(scaled, [0.1 * 2 / 2, 0.1 * 2 / 1, 0.1 * 2], rtol=1e-6)
    assert logistic_loss(rows, np.array([1, 0, 0], np.float32), 0.5) == pytest.approx(0.3132617 + 0.25)


# ---------------------------------------------------------------------------------------------- real workers


def first_rows(rows: SparseRows, count: int) -> SparseRows:
    end = int(rows.starts[count])
    labels = rows.labels[:count]
    return SparseRows(rows.starts[: count + 1], rows.columns[:end], rows.values[:end], labels, rows.num_columns)


def serial(rows: SparseRows, **more: Any) -> LinearFit:
    return fit_logistic(rows, workers=1, **more)


def test_one_worker_does_serial_descent() -> None:
    fit = serial(SMALL, epochs=3, lr=0.4, seed=7)
    by_hand = problem_of(SMALL)
    for epoch in range(3):
        order = np.random.default_rng((7, epoch)).permutation(400)
        logistic_epoch(by_hand, order, RowPart(0, 400), 0.4 * 0.9**epoch)
    assert fit.weights.tobytes() == by_hand.weights.tobytes()
    assert fit.updates == 1200
    assert fit.losses[-1] == pytest.approx(logistic_loss(SMALL, fit.weights))
    assert fit.losses[-1] < fit.losses[0] < np.log(2)


@pytest.mark.process
@pytest.mark.parametrize(
    ("workers", "more"),
    [
        (2, {"update": "free"}),
        (2, {"update": "free", "window": 1}),
        (4, {"update": "free", "window": 16}),
        (2, {"update": "locked"}),
        (2, {"update": "in_turn"}),
        (3, {"update": "in_turn"}),
    ],
    ids=str,
)
def test_workers_reach_the_serial_loss_within_two_percent(workers: int, more: dict[str, Any]) -> None:
    in_turn = more["update"] == "in_turn"  # every sample waits for another worker, which on busy cores takes long
    rows, epochs = (MEDIUM, 20) if workers == 2 and not in_turn else (SMALL, 5 if in_turn else 20)
    alone = serial(rows, l2=1e-4, epochs=epochs)
    fit = fit_logistic(rows, workers=workers, l2=1e-4, epochs=epochs, **more)
    assert fit.losses[-1] == pytest.approx(alone.losses[-1], rel=0.02)
    assert fit.updates == epochs * rows.num_rows
    assert len(fit.losses) == len(fit.seconds) == epochs


@pytest.mark.process
@pytest.mark.parametrize("update", ["free", "atomic", "locked", "in_turn"])
def test_real_data(update: str, data_root: Path) -> None:
    rows = libsvm_rows(data_root / "a9a" / "a9a")
    if update == "in_turn":
        rows = first_rows(rows, 2_000)
    alone, fit = serial(rows, lr=0.01, epochs=5), fit_logistic(rows, update=update, lr=0.01, epochs=5)
    assert fit.losses[-1] == pytest.approx(alone.losses[-1], rel=0.02)


@pytest.mark.process
@pytest.mark.parametrize("update", ["free", "atomic", "locked", "in_turn"])
def test_workers_without_the_native_core(update: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sparse, "load", lambda: None)
    alone, fit = (fit_logistic(SMALL, workers=n, update=update, epochs=5) for n in (1, 2))
    assert fit.losses[-1] == pytest.approx(alone.losses[-1], rel=0.02)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"labels": np.zeros(0, np.float32)}, "0 labels need at least one row"),
        ({"starts": SMALL.starts[::-1].copy()}, "starts must rise from 0 to the 2400 entries"),
        ({"values": SMALL.values[:-1]}, "2400 columns need as many values, got 2399"),
        ({"num_columns": 50}, "columns must be from 0 to 49"),
        ({"columns": np.zeros_like(SMALL.columns)}, "columns must rise within a row"),
        ({"values": SMALL.values.astype(np.float64)}, "values must be a contiguous array of float32, got float64"),
        ({"labels": 2 * SMALL.labels}, "labels must be -1 or 1"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_rows_that_native_code_must_not_see(change: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        fit_logistic(SMALL._replace(**change))


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"update": "often"}, "update must be one of free, atomic, locked, in_turn, got 'often'"),
        ({"workers": 0}, "workers must be a positive whole number, got 0"),
        ({"l2": -1.0}, "l2 must be finite and not negative, got -1.0"),
        ({"window": 4, "update": "locked"}, "only free and atomic updates have one"),
    ],
)
def test_settings_that_cannot_be(change: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        replace(Settings(), **change)


def test_who_learns_from_which_positions() -> None:
    assert [part_of(r, 10, Settings(workers=3)) for r in range(3)] == [RowPart(0, 3), RowPart(3, 6), RowPart(6, 10)]
    in_turn = Settings(workers=3, update="in_turn")
    assert [part_of(r, 10, in_turn) for r in range(3)] == [RowPart(0, 10, 3), RowPart(1, 10, 3), RowPart(2, 10, 3)]
    assert [window_of(MEDIUM, Settings(workers=n)) for n in (1, 2, 4)] == [1, 250, 125]
    assert window_of(MEDIUM, Settings(window=9)) == 9
    assert window_of(MEDIUM, Settings(update="locked")) == 1
    dense = random_rows(4_000, 50, density=1.0)._replace(values=np.ones(200_000, np.float32))
    assert window_of(dense, Settings(workers=2, lr=0.1)) == 320 // (2 * 0.1 * 50)


# ---------------------------------------------------------------------------------------------- torch on one copy


def shared_tensor(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Zeros that processes forked later see together."""
    count = torch.Size(shape).numel()
    return torch.frombuffer(mmap.mmap(-1, count * dtype.itemsize), dtype=dtype, count=count).view(shape)


class Bag(nn.Module):
    """A table of rows, a few of them read by each sample, and a dense layer on top."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.EmbeddingBag(50, 4, mode="sum", sparse=True)
        self.top = nn.Linear(4, 1)

    def forward(self, rows: Tensor) -> Tensor:
        """Shape (batch, rows a sample) to (batch,)."""
        return torch.as_tensor(self.top(self.table(rows)).squeeze(1))


def bag_on_one_copy() -> Bag:
    torch.manual_seed(0)
    bag = Bag()
    for parameter in bag.parameters():
        shared = shared_tensor(*parameter.shape)
        parameter.data = shared.copy_(parameter.detach())
    return bag


def bag_samples() -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(1)
    truth = torch.randn(50, generator=random)
    rows = torch.randint(50, (256, 3), generator=random)
    return rows, truth[rows].sum(1)


def learn(bag: Bag, part: slice, hooks: Callable[[torch.optim.Optimizer], object], num_steps: int) -> None:
    optimizer = torch.optim.SGD(bag.parameters(), lr=0.1)
    hooked = hooks(optimizer)
    rows, targets = (t[part] for t in bag_samples())
    for step in range(num_steps):
        batch = slice(step * 8 % len(rows), step * 8 % len(rows) + 8)
        optimizer.zero_grad()
        nn.functional.mse_loss(bag(rows[batch]), targets[batch]).backward()
        optimizer.step()
        assert bag.table.weight.grad is not None
    if isinstance(hooked, TurnHooks):
        hooked.remove()


def final_loss(bag: Bag) -> float:
    rows, targets = bag_samples()
    return float(nn.functional.mse_loss(bag(rows), targets).detach())


@pytest.mark.process
@pytest.mark.parametrize("turn", ["free", "atomic", "locked", "in_turn"])
def test_workers_train_one_copy_of_a_torch_model(turn: Any) -> None:
    reference, bag = bag_on_one_copy(), bag_on_one_copy()
    learn(reference, slice(None), lambda optimizer: None, 480)
    before = final_loss(bag)

    def work(world: ProcessWorld) -> float:
        part = slice(128 * world.rank, 128 * world.rank + 128)
        learn(bag, part, lambda optimizer: TurnHooks(world, optimizer, turn).watch(), 240)
        world.drive(_barrier(world))
        return final_loss(bag)

    losses = together(2, work)
    assert losses[0] == losses[1] == final_loss(bag)
    assert losses[0] == pytest.approx(final_loss(reference), abs=0.02 * before)
    assert losses[0] < 0.05 * before


async def _barrier(world: ProcessWorld) -> None:
    await world.port.barrier()


def test_alone_the_hooks_change_no_more_than_rounding() -> None:
    plain, hooked = bag_on_one_copy(), bag_on_one_copy()
    learn(plain, slice(None), lambda optimizer: None, 20)
    learn(hooked, slice(None), lambda optimizer: TurnHooks(ProcessWorld(0, [0]), optimizer, "free").watch(), 20)
    for a, b in zip(plain.parameters(), hooked.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.process
def test_ranks_take_turns_in_their_order() -> None:
    log, place = shared_tensor(30, dtype=torch.int64), shared_tensor(1, dtype=torch.int64)

    def work(world: ProcessWorld) -> None:
        parameter = nn.Parameter(torch.zeros(1))
        optimizer = torch.optim.SGD([parameter], lr=0.1)

        def note(*_: Any) -> None:
            log[int(place)] = world.rank
            place.add_(1)

        optimizer.register_step_post_hook(note)  # before the hook that hands the turn on
        hooks = TurnHooks(world, optimizer, "in_turn").watch()
        for _ in range(10):
            parameter.grad = torch.ones(1)
            optimizer.step()
        hooks.remove()

    together(3, work)
    assert log.tolist() == [0, 1, 2] * 10


@pytest.mark.process
def test_only_one_rank_of_a_host_is_alone() -> None:
    count = shared_tensor(1, dtype=torch.int64)

    def work(world: ProcessWorld) -> None:
        async def add() -> None:
            for _ in range(100):
                await world.port.alone(increment, 0.0)
            await world.port.barrier()

        def increment() -> None:
            seen = int(count)
            os.sched_yield()  # give another the chance to be wrong
            count[0] = seen + 1

        world.drive(add())

    together(3, work)
    assert count.tolist() == [300]


@pytest.mark.process
def test_waiting_to_be_alone_has_a_deadline() -> None:
    def work(world: ProcessWorld) -> str:
        async def late() -> str:
            await world.port.barrier()
            if world.rank == 0:
                with world.alone():
                    await world.port.barrier()
                    await world.port.barrier()
                return "held"
            await world.port.barrier()
            try:
                await world.port.within(0.05).alone(lambda: None, 0.0)
            except TimedOut as error:
                return str(error)
            finally:
                await world.port.barrier()
            return "entered"

        return world.drive(late())

    assert together(2, work) == ["held", "rank 1, step 0: timed out: alone did not finish within 0.05 s"]
