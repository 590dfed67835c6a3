"""Laws that every strategy of the catalogue obeys, under the virtual clock."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from laws.catalogue import GROUPED, HELPED, PARTED, ROUTES, ROWS, SERVED, STAGED, Row, label
from laws.definitions import (
    acco,
    adam_steps,
    co2,
    delayed,
    dion,
    lion,
    muon,
    nesterov_steps,
    one_bit_adam,
    outer,
    quasi_global,
    schedule_free_steps,
    signum,
    slowmo,
    streaming,
    zero_one_adam,
)
from laws.harness import HOST, OPTIMIZERS, Rank, Setting, plain_torch, run
from polytempo import strategies
from polytempo.aggregation import complete, exponential_graph
from polytempo.core import Port, Strategy
from polytempo.core.state import saved
from polytempo.training.checkpoint.optimizer_state import optimizer_restore, optimizer_saved
from polytempo.worlds import VirtualWorld

every_row = pytest.mark.parametrize("row", ROWS, ids=label)
every_route = pytest.mark.parametrize("route", ROUTES, ids=lambda route: route.__name__)


class Ran(NamedTuple):
    """The ranks of a run, and its world's record."""

    ranks: list[Rank]
    trace_hash: str
    seconds: float
    unreceived: int


@cache
def ran(row: Row, num_ranks: int, num_steps: int, setting: Setting = Setting()) -> Ran:
    """A run that several laws look at, and none changes."""
    ranks, outcome = run(row.make(), num_ranks, num_steps, setting)
    return Ran(ranks, outcome.trace.hash, outcome.seconds, outcome.unreceived)


def delayed_by_name(strategy: Strategy, setting: Setting) -> list[Tensor]:
    """The delay is read from the strategy's name."""
    match = re.search(r"delay=(\d+)", str(strategy))
    assert match is not None
    return delayed(12, int(match[1]), setting)


ALONE: dict[str, Callable[[Strategy, Setting], list[Tensor]]] = {
    "torch": lambda strategy, setting: plain_torch(12, setting),
    "acco": lambda strategy, setting: acco(12, setting),
    "co2": lambda strategy, setting: co2(12, setting),
    "delayed": delayed_by_name,
    "anchored": lambda strategy, setting: outer(12, 4, nesterov_steps(1.0, 0.0), setting),
    "diloco": lambda strategy, setting: outer(12, 5, nesterov_steps(0.7, 0.5), setting),
    "outer_adam": lambda strategy, setting: outer(12, 3, adam_steps(), setting),
    "outer_schedule_free": lambda strategy, setting: outer(12, 2, schedule_free_steps(), setting),
    "signum": lambda strategy, setting: signum(12, 0.9, setting),
    "signs": lambda strategy, setting: lion(12, None, setting),
    "lion": lambda strategy, setting: lion(12, (0.9, 0.99), setting),
    "dion": lambda strategy, setting: dion(12, setting),
    "muon": lambda strategy, setting: muon(12, setting),
    "one_bit_adam": lambda strategy, setting: one_bit_adam(12, 5, setting),
    "quasi_global": lambda strategy, setting: quasi_global(12, 0.9, 0.9, setting),
    "streaming": lambda strategy, setting: streaming(12, str(strategy), setting),
    "zero_one_adam": lambda strategy, setting: zero_one_adam(12, setting),
}
"""A row's `alone` -> the weights after each of 12 steps of one rank."""


def slowmo_by_name(strategy: Strategy, setting: Setting) -> list[Tensor]:
    """The period is read from the strategy's name; the inner strategy does nothing alone."""
    match = re.search(r"period=(\d+)", str(strategy))
    assert match is not None
    return slowmo(12, int(match[1]), 1.0, 0.5, setting)


ALONE["slowmo"] = slowmo_by_name


def test_every_strategy_has_a_row() -> None:
    rows = {row.name for row in [*ROWS, *SERVED, *HELPED, *STAGED, *PARTED, *GROUPED]}
    assert rows == set(strategies.__all__), (
        f"give tests/laws/catalogue.py a row for {sorted(rows ^ set(strategies.__all__))}, or export it in "
        "strategies/__init__.py (CONTRIBUTING.md, Adding a strategy)"
    )
    assert {row.make().server is None for row in ROWS} == {True}
    assert {row.make().server is None for row in [*SERVED, *HELPED]} == {False}
    assert {row.make().schedule is None for row in ROWS} == {True}
    assert {row.make().schedule is None for row in STAGED} == {False}
    assert {row.make().parted is None for row in PARTED} == {False}
    assert {row.make().groups > 1 for row in GROUPED} == {True}


@every_row
def test_one_rank_equals_its_definition_bitwise(row: Row) -> None:
    for optimizer in ("sgd", "momentum", "adam"):
        setting = Setting(optimizer, torch.float32)
        strategy = row.make()
        assert row.alone in ALONE, f"the row says alone={row.alone!r}; ALONE has {', '.join(ALONE)}: add a line there"
        expected = ALONE[row.alone](strategy, setting)
        (rank,), _ = run(strategy, 1, 12, setting)
        differ = [step for step, (a, b) in enumerate(zip(rank.history, expected, strict=True), 1) if not a.equal(b)]
        assert not differ, f"with {optimizer} the weights are not those of alone={row.alone!r} after steps {differ}"


@every_route
@pytest.mark.parametrize(
    ("num_ranks", "optimizer"), [(2, "momentum"), (3, "sgd"), (3, "adam"), (5, "momentum"), (8, "momentum")]
)
def test_synchronous_ranks_equal_one_rank_on_the_joined_batch(route: object, num_ranks: int, optimizer: str) -> None:
    strategy = strategies.sync_sgd(route=route)  # type: ignore[arg-type]
    for dtype, tolerance in ((torch.float64, 1e-12), (torch.float32, 1e-5)):
        setting = Setting(optimizer, dtype)
        expected = plain_torch(8, setting)[-1]
        for uneven in (False, True):
            ranks, _ = run(strategy, num_ranks, 8, setting, uneven=uneven)
            distance = (ranks[0].history[-1] - expected).norm() / expected.norm()
            assert distance <= tolerance, f"{dtype}, uneven={uneven}: {distance:.2e}"


@every_row
@pytest.mark.parametrize("num_ranks", [2, 3, 4, 5])
def test_ranks_hold_equal_parameters_after_every_synchronising_step(row: Row, num_ranks: int) -> None:
    if num_ranks < 3 and any(name in label(row) for name in ("trimmed", "krum", "bulyan")):
        with pytest.raises(ValueError, match="ranks"):
            run(row.make(), num_ranks, 1)
        return
    ranks = ran(row, num_ranks, 12).ranks
    for step in range(1, 13):
        equal = all(torch.equal(rank.history[step - 1], ranks[0].history[step - 1]) for rank in ranks)
        if row.meets is not None and row.meets(step):
            assert equal, f"step {step}"
        if row.make().synchronized:
            assert equal, f"synchronized is promised, step {step}"


@every_row
def test_every_send_is_received_and_the_trace_repeats(row: Row) -> None:
    first, second = ran(row, 4, 12), run(row.make(), 4, 12)[1]
    assert first.unreceived == 0
    assert first.trace_hash == second.trace.hash
    assert first.seconds == second.seconds


@every_row
def test_save_load_continue_equals_never_having_stopped(row: Row) -> None:
    num_ranks, cut, end = 3, 7, 13
    straight, _ = run(row.make(), num_ranks, end)
    begun = ran(row, num_ranks, cut).ranks
    resumed = [Rank(row.make(), rank, num_ranks, Setting(), uneven=False) for rank in range(num_ranks)]
    for old, new in zip(begun, resumed, strict=True):
        new.model.load_state_dict({k: v.clone() for k, v in old.model.state_dict().items()})
        optimizer_restore(new.optimizer, optimizer_saved(old.optimizer))
        new.replica.restore(old.replica.state())

    async def program(port: Port) -> None:
        await resumed[port.rank].steps(port, cut, end)

    VirtualWorld(HOST, num_ranks).run(program)
    for old, new in zip(straight, resumed, strict=True):
        assert torch.equal(old.history[-1], new.history[-1])


@every_row
def test_state_is_saved_by_parameter_whatever_the_buckets(row: Row) -> None:
    whole, cut = ran(row, 3, 7).ranks, ran(row, 3, 7, Setting(bucket_bytes=64)).ranks
    one, many = whole[0].replica.state(), cut[0].replica.state()
    assert one.scalars == many.scalars
    assert {k: v.shape for k, v in one.tensors.items()} == {k: v.shape for k, v in many.tensors.items()}


@pytest.mark.parametrize("row", [row for row in ROWS if not row.by_place], ids=label)
def test_buckets_change_nothing_but_rounding(row: Row) -> None:
    whole, cut = ran(row, 3, 7).ranks, ran(row, 3, 7, Setting(bucket_bytes=64)).ranks
    for a, b in zip(whole, cut, strict=True):
        assert torch.allclose(a.history[-1], b.history[-1], rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("optimizer", ["sgd", "momentum"])
@pytest.mark.parametrize("name", ["local_sgd", "parameter_averaging"])
def test_averaging_every_step_equals_synchronous_sgd(name: str, optimizer: str) -> None:
    averaging = getattr(strategies, name)(period=1)
    averaged, _ = run(averaging, 4, 20, Setting(optimizer))
    expected = plain_torch(20, Setting(optimizer))[-1]
    assert (averaged[0].history[-1] - expected).norm() / expected.norm() <= 1e-12


@pytest.mark.parametrize("name", ["local_sgd", "parameter_averaging"])
def test_averaging_every_step_differs_from_synchronous_adam(name: str) -> None:
    averaged, _ = run(getattr(strategies, name)(period=1), 4, 20, Setting("adam"))
    expected = plain_torch(20, Setting("adam"))[-1]
    assert (averaged[0].history[-1] - expected).norm() / expected.norm() > 1e-3


@pytest.mark.parametrize("optimizer", ["sgd", "momentum", "adam"])
def test_diloco_with_a_plain_outer_step_equals_averaging(optimizer: str) -> None:
    outer, _ = run(strategies.diloco(period=4, outer_lr=1.0, outer_momentum=0.0), 3, 13, Setting(optimizer))
    plain, _ = run(strategies.local_sgd(period=4), 3, 13, Setting(optimizer))
    for a, b in zip(outer, plain, strict=True):
        assert torch.allclose(a.history[-1], b.history[-1], rtol=1e-12, atol=1e-13)


def test_slowmo_with_period_1_is_synchronous_sgd_with_momentum() -> None:
    """Plain SGD, with α = 1 and without weight decay: J. Wang et al., 2020, section 2."""
    setting = Setting("momentum")
    expected = plain_torch(20, setting)[-1]
    OPTIMIZERS["plain"] = lambda parameters: torch.optim.SGD(parameters, lr=0.05)
    try:
        slow, _ = run(strategies.slowmo(period=1, slow_momentum=0.9), 4, 20, Setting("plain"))
    finally:
        del OPTIMIZERS["plain"]
    assert (slow[0].history[-1] - expected).norm() / expected.norm() <= 1e-12


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_slowmo_without_momentum_is_local_sgd(optimizer: str) -> None:
    slow, _ = run(strategies.slowmo(period=4, slow_momentum=0.0), 3, 13, Setting(optimizer))
    plain, _ = run(strategies.local_sgd(period=4), 3, 13, Setting(optimizer))
    for a, b in zip(slow, plain, strict=True):
        assert torch.allclose(a.history[-1], b.history[-1], rtol=1e-12, atol=1e-13)


def test_pushes_by_a_doubly_stochastic_graph_are_gossip() -> None:
    pushed, _ = run(strategies.stochastic_gradient_push(exponential_graph), 4, 12)
    mixed, _ = run(strategies.gossip(exponential_graph), 4, 12)
    for a, b in zip(pushed, mixed, strict=True):
        assert torch.allclose(a.history[-1], b.history[-1], rtol=1e-12, atol=1e-14)


def test_gossip_on_the_complete_graph_equals_averaging() -> None:
    mixed, _ = run(strategies.gossip(complete), 4, 10)
    averaged, _ = run(strategies.local_sgd(period=1), 4, 10)
    assert torch.allclose(mixed[0].history[-1], averaged[0].history[-1], rtol=1e-12, atol=1e-14)


def test_saved_refuses_what_is_no_state() -> None:
    with pytest.raises(TypeError, match="parameters/0: a state may hold tensors"):
        saved((object(),), "parameters")
