"""The strategies of elastic runs, and the laws of an exchange of parameters that is undone or comes early."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import polytempo as pt
from laws.catalogue import ROWS, Row, label
from laws.harness import HOST, OPTIMIZERS, Rank, Setting, flat, model, run
from polytempo import aggregation
from polytempo.core import Bundle, Port, Strategy, Transform, chain, is_idle
from polytempo.core.state import nodes
from polytempo.synchronization import every
from polytempo.synchronization.every import RoundState
from polytempo.training.elastic.elastic_state import handed_over, residuals_by_path
from polytempo.training.elastic.elastic_strategies import check_elastic
from polytempo.training.elastic.local_round import give_mean, keep_mean
from polytempo.training.model.requirements import fitted
from polytempo.worlds import VirtualWorld

AGREE = [
    "adasum",
    "bf16_sgd",
    "demo",
    "dgc",
    "dion",
    "distributed_lion",
    "distributed_muon",
    "int8_sgd",
    "one_bit_adam",
    "one_bit_sgd",
    "power_sgd",
    "qsgd",
    "robust_sgd",
    "sign_sgd",
    "sync_sgd",
    "terngrad",
    "threshold_sgd",
    "top_k_sgd",
]
"""Ranks agree on a gradient before the optimizer uses it (`adasum` with adaptive optimizers: on an update after it)."""
MEET = [
    *("diloco", "gossip", "islands", "local_sgd", "noloco", "parameter_averaging", "post_local_sgd"),
    *("quasi_global_momentum", "slowmo", "sparse_loco", "sparta"),
]
"""Ranks exchange parameters after steps of their own."""
REFUSED = {
    **dict.fromkeys(["hogwild", "shared_memory"], "PT1202"),
    **dict.fromkeys(
        [
            "async_diloco",
            "async_sgd",
            "backup_workers",
            "dc_asgd",
            "decoupled_diloco",
            "downpour",
            "easgd",
            "flexrr",
            "halos",
            "softsync",
            "ssp",
            "staleness_aware",
        ],
        "PT1201",
    ),
    **dict.fromkeys(
        ["ddg", "features_replay", "gpipe", "interleaved", "one_f_one_b", "pipedream", "pipedream_2bw"],
        "PT1203",
    ),
    **dict.fromkeys(["pipelined_backprop", "synthetic_gradients", "zero_bubble"], "PT1203"),
    **dict.fromkeys(["split", "hybrid"], "PT1204"),
    "acco": "PT1206",
    "co2": "PT1206",
    "codistillation": "PT1205",
    "des_loc": "PT1208",
    "ef21": "PT1212",
    "delayed_sgd": "PT1206",
    "zero_one_adam": "PT1209",
    "stochastic_gradient_push": "PT1207",
    "streaming_diloco": "PT1206",
}


@pytest.mark.parametrize("name", sorted(pt.strategies.__all__))
def test_each_strategy_is_taken_or_refused_by_name(name: str) -> None:
    strategy = getattr(pt.strategies, name)()
    if name in REFUSED:
        with pytest.raises(ValueError, match=rf"^{REFUSED[name]}: {name}"):
            check_elastic(strategy)
    else:
        check_elastic(strategy)  # a new strategy that is refused here goes into REFUSED, with the code
        assert name in AGREE + MEET, f"elastic runs take {name}: put it into AGREE or MEET, and into docs/elastic.md"


@pytest.mark.parametrize("name", sorted(pt.strategies.__all__))
def test_the_page_says_whether_a_strategy_is_taken(name: str) -> None:
    """Refused ones stand below the table, others in it."""
    page = (Path(__file__).parents[2] / "docs" / "elastic.md").read_text(encoding="utf-8")
    taken, _, refused = page.partition("## Which strategies")[2].partition("**Steps between")[0].partition("Refused, ")
    assert re.search(rf"`{name}\b", refused if name in REFUSED else taken), f"docs/elastic.md lacks {name} there"


@pytest.mark.parametrize(
    ("strategy", "why"),
    [
        (pt.strategies.gossip(overlap=True), "PT1206"),
        (pt.strategies.slowmo(inner=pt.strategies.gossip()), "PT1208"),
        (pt.strategies.streaming_diloco(delay=0), "PT1208"),
        (pt.strategies.sparta(outer=pt.strategies.diloco()), "PT1208"),
    ],
    ids=str,
)
def test_forms_of_others_that_are_refused(strategy: Strategy, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        check_elastic(strategy)


def test_what_cannot_meet_before_its_time_is_refused() -> None:
    own = Strategy("own", parameters=chain(every(3, aggregation.mean())), synchronized=False)
    with pytest.raises(ValueError, match="own exchanges parameters on some steps"):
        check_elastic(own)


# ---------------------------------------------------------------------- exchanges of parameters

SETTING = Setting("momentum")
NUM_RANKS, LAST = 3, 13


def parameters_of(row: Row) -> Transform:
    """The parameters' movement under the setting's optimizer."""
    return fitted(row.make(), OPTIMIZERS[SETTING.optimizer](model(SETTING.dtype).parameters())).parameters


def taken(row: Row) -> bool:
    """True if an elastic run takes the strategy."""
    try:
        check_elastic(row.make())
    except ValueError:
        return False
    return True


MEETING = [row for row in ROWS if taken(row) and not is_idle(parameters_of(row), NUM_RANKS)]
every_row = pytest.mark.parametrize("row", MEETING, ids=label)


class Broken(Exception):
    """A rank is lost at the commit point."""


def remembered(rank: Rank) -> dict[str, Any]:
    """All that an exchange of parameters could have changed."""
    tensors, scalars = rank.replica.state()
    groups = rank.replica.parameters.groups() if rank.replica.parameters is not None else []
    present = {name: tensor for group in groups for name, tensor in group.items()}
    found: Mapping[str, Tensor] = {**tensors, **present}
    return {name: tensor.clone() for name, tensor in found.items()} | scalars


def same(a: Mapping[str, Any], b: Mapping[str, Any]) -> bool:
    """The same names with the same bits."""
    return a.keys() == b.keys() and all(
        torch.equal(a[key], b[key]) if isinstance(a[key], Tensor) else a[key] == b[key] for key in a
    )


class Interrupted(Rank):
    """Commit points fail as often as ranks meet; the exchange is undone, and then finished after all."""

    def __init__(self, strategy: Strategy, rank: int) -> None:
        async def commit(port: Port) -> None:
            raise Broken

        super().__init__(strategy, rank, NUM_RANKS, SETTING, False, commit)

    async def steps(self, port: Port, first: int, last: int) -> None:
        """See the class."""
        parameters = self.replica.parameters
        assert parameters is not None
        self.broken = 0
        exchange = parameters.exchange

        async def twice(data: Port, weight: float | None) -> Any:
            before = remembered(self)
            try:
                return await exchange(data, weight)
            except Broken:
                self.broken += 1
                assert same(before, remembered(self))
                parameters.take()

        parameters.exchange = twice  # type: ignore[method-assign]
        await super().steps(port, first, last)


@every_row
def test_a_broken_exchange_leaves_no_trace_and_can_be_finished(row: Row) -> None:
    calm, _ = run(row.make(), NUM_RANKS, LAST, SETTING)
    ranks = [Interrupted(row.make(), rank) for rank in range(NUM_RANKS)]

    async def program(port: Port) -> None:
        await ranks[port.rank].steps(port, 0, LAST)

    VirtualWorld(HOST, NUM_RANKS).run(program)
    for rank, other in zip(ranks, calm, strict=True):
        assert rank.broken > 0
        assert all(torch.equal(a, b) for a, b in zip(rank.history, other.history, strict=True))
        assert same(remembered(rank), remembered(other))


@every_row
def test_ranks_meet_after_different_numbers_of_steps(row: Row) -> None:
    """Rank r makes r steps of its own after 9 steps; all meet at step 11, and go on to the end of the next round."""
    ranks = [Rank(row.make(), rank, NUM_RANKS, SETTING, False) for rank in range(NUM_RANKS)]
    before: list[Tensor] = [torch.empty(0)] * NUM_RANKS

    async def program(port: Port) -> None:
        rank = ranks[port.rank]
        parameters = rank.replica.parameters
        assert parameters is not None
        await rank.steps(port, 0, 9)
        for _ in range(port.rank):
            with torch.no_grad():
                for parameter in rank.model.parameters():
                    parameter += 0.1 * (port.rank + 1) * parameter.cos()
        before[port.rank] = flat(rank.model)
        await parameters.meet_at_once(port, 11)
        rank.replica.step = 11
        rank.history.append(flat(rank.model))
        await rank.steps(port, 11, 21)

    VirtualWorld(HOST, NUM_RANKS).run(program)
    after = [rank.history[9] for rank in ranks]
    meets = row.meets
    if meets is not None:
        assert all(torch.equal(each, after[0]) for each in after)
    if row.name not in (
        "diloco",
        "islands",
        "adasum",
        "slowmo",
        "sparse_loco",
        "noloco",
        "quasi_global_momentum",
    ) and "merge=median" not in str(row.make()):  # these go further than the mean, or not so far
        rounded = "codec" in str(row.make())
        expected = torch.stack(before).mean(0)
        torch.testing.assert_close(torch.stack(after).mean(0), expected, rtol=0, atol=1e-2 if rounded else 1e-12)
    scalars = [rank.replica.state().scalars for rank in ranks]
    assert all(each == scalars[0] for each in scalars) or "by_time" in str(row.make())  # ranks' own seconds
    layout = Bundle({"w": torch.zeros(2)})
    begin = 11 if any(True for _ in nodes(row.make().parameters.init(layout), RoundState)) else 0  # a rule's round
    for step in range(12, 22) if meets is not None else ():  # else the next round ends when it would have ended
        assert meets is not None
        now = [rank.history[step - 2] for rank in ranks]
        assert all(torch.equal(each, now[0]) for each in now) == meets(step - begin), step


def test_newcomers_get_the_mean_and_those_that_leave_leave_the_mean() -> None:
    def group(rank: int) -> dict[str, Tensor]:
        random = torch.Generator().manual_seed(rank)
        return {"w": torch.randn(3, 2, generator=random, dtype=torch.float64), "b": torch.full((4,), float(rank))}

    own = [list({"w": {"w": group(r)["w"]}, "b": {"b": group(r)["b"]}}.values()) for r in range(4)]
    at_first = [torch.cat([t.double().reshape(-1) for g in groups for t in g.values()]) for groups in own]

    def now(rank: int) -> Tensor:
        return torch.cat([t.double().reshape(-1) for g in own[rank] for t in g.values()])

    async def joining(port: Port) -> None:
        await give_mean(port, own[port.rank], 3)

    async def leaving(port: Port) -> None:
        await keep_mean(port, own[port.rank], leaves=port.rank == 1)

    VirtualWorld(HOST, 4).run(joining)
    assert all(torch.equal(now(rank), at_first[rank]) for rank in range(3))
    mean = torch.stack(at_first[:3]).mean(0)
    torch.testing.assert_close(now(3), mean)
    VirtualWorld(HOST, 4).run(leaving)
    torch.testing.assert_close(torch.stack([now(rank) for rank in (0, 2, 3)]).mean(0), mean)
    torch.testing.assert_close(now(0) - now(2), at_first[0] - at_first[2])


# ---------------------------------------------------------------------- residuals


def residuals(rank: Rank) -> dict[str, Tensor]:
    """A rank's residuals, by path."""
    held = residuals_by_path(rank.replica.states())
    return {path: tensor.double().clone() for path, tensor in held.items() if tensor is not None}


HOLDING = [row for row in ROWS if residuals_by_path(Rank(row.make(), 0, 3, SETTING, False).replica.states())]


@pytest.mark.parametrize("row", HOLDING, ids=label)
def test_residuals_are_handed_on_with_their_sum_and_newcomers_begin_with_none(row: Row) -> None:
    """One of 3 ranks leaves politely; then a newcomer takes its place with the state of the first."""
    ranks, _ = run(row.make(), 3, 6, SETTING)
    before = [residuals(rank) for rank in ranks]
    assert any(before)
    taken: list[Any] = [None] * 3

    async def leave(port: Port) -> None:
        mine = residuals_by_path(ranks[port.rank].replica.states())
        taken[port.rank] = await handed_over(port, mine, leaves=port.rank == 1)

    VirtualWorld(HOST, 3).run(leave)
    assert taken[1] is taken[2] is None
    after = [Rank(row.make(), place, 3, SETTING, False) for place in range(3)]
    for rank, old in zip(after, (0, 2, None), strict=True):
        source = ranks[old or 0]
        rank.model.load_state_dict(source.model.state_dict())
        rank.optimizer.load_state_dict(source.optimizer.state_dict())
        own = source.replica.state()
        rank.replica.restore(own, [] if old is None else [own, taken[0]] if old == 0 else [own])
    found = [residuals(rank) for rank in after]
    assert not found[2]
    for path in {path for each in before for path in each}:
        total, held = (sum(each[path] for each in several if path in each) for several in (before, found))
        torch.testing.assert_close(held, total, rtol=1e-12, atol=1e-12)

    async def go_on(port: Port) -> None:
        await after[port.rank].steps(port, 6, 12)

    VirtualWorld(HOST, 3).run(go_on)
    assert all(flat(rank.model).isfinite().all() for rank in after)
