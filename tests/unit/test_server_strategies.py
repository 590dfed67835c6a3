"""Strategies with a parameter server: their text, their services, and their refusals."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import pytest

import polytempo as pt
from polytempo import strategies as s
from polytempo.core import Strategy, identity
from polytempo.core.rule import Arrival, Rule, Situation, Staleness, UpdateRule
from polytempo.spec.text.catalogue import parse_strategy
from polytempo.spec.text.declaration import declared


class Row(NamedTuple):
    """A strategy's name with its defaults, and its service."""

    name: str
    rule: str
    deals: str = "freely"
    optimizer: UpdateRule | None = None
    modifiers: tuple[str, ...] = ()
    steps_locally: bool = False


ROWS = [
    Row("async_sgd(shards=1, replicas=0, rate=None)", "on_arrival(scale=constant)"),
    Row(
        "downpour(push_every=5, pull_every=5, shards=1, replicas=0, optimizer='adagrad', lr=None, warm_start=0, "
        "overlap=True)",
        "on_arrival(scale=constant)",
        optimizer=UpdateRule("adagrad", eps=0.0),
        steps_locally=True,
    ),
    Row(
        "softsync(n=1, shards=1, replicas=0, scale='constant', rate=None)",
        "softsync(n=1, scale=constant, workers=None)",
    ),
    Row("staleness_aware(n=None, shards=1, replicas=0)", "on_arrival(scale=inverse)"),
    Row("ssp(bound=3, shards=1, replicas=0, rate=None)", "within(bound=3, scale=constant)", deals="evenly"),
    Row(
        "async_diloco(period=10, outer_lr=0.7, outer_momentum=0.0, shards=1, replicas=0)",
        "in_shares(scale=constant)",
        optimizer=UpdateRule("sgd", 0.7),
        steps_locally=True,
    ),
    Row(
        "decoupled_diloco(period=10, quorum=2, outer_lr=0.7, outer_momentum=0.0, shards=1, replicas=0)",
        "quorum(least=2)",
        optimizer=UpdateRule("sgd", 0.7),
        steps_locally=True,
    ),
    Row(
        "halos(period=8, region=4, every=32, share=0.25, outer_lr=0.8, outer_momentum=0.9, momentum_every=16, "
        "global_lr=0.6, global_momentum=0.5, global_momentum_every=2, shards=1, replicas=0)",
        "regional(size=4, every=32, share=0.25)",
        optimizer=UpdateRule("sgd", 0.8, momentum=0.9, nesterov=True, momentum_every=16),
        steps_locally=True,
    ),
    Row(
        "easgd(period=4, alpha=None, beta=0.9, shards=1, replicas=0)",
        "elastic_share(beta=0.9)",
        optimizer=UpdateRule("sgd"),
        steps_locally=True,
    ),
    Row(
        "flexrr(helpers=4, behind=0.2, first_offer=0.025, later_offers=0.05, grain=0.0125, bound=0, shards=1, "
        "replicas=0)",
        "covered(slices=80, bound=0)",
        deals="evenly",
    ),
    Row("backup_workers(backups=1, shards=1, replicas=0)", "all_but(backups=1)", deals="freely"),
    Row(
        "dc_asgd(strength=0.04, shards=1, replicas=0, rate=None)",
        "on_arrival(scale=constant)",
        modifiers=("compensate(strength=0.04)",),
    ),
]
NAMES = [row.name.partition("(")[0] for row in ROWS]

NAMED = ("inverse", "constant")
SCALED = ("async_diloco", "async_sgd", "dc_asgd", "downpour", "softsync", "ssp", "staleness_aware")
"""Strategies with an argument `scale`, a function of the staleness."""

every_row = pytest.mark.parametrize("row", ROWS, ids=NAMES)
every_name = pytest.mark.parametrize("name", NAMES)


@every_row
def test_what_a_strategy_asks_of_its_server(row: Row) -> None:
    strategy = parse_strategy(row.name.partition("(")[0])
    assert strategy.server is not None
    found = strategy.server
    assert (strategy.name, found.rule.name, found.deals) == (row.name, row.rule, row.deals)
    assert (found.optimizer, tuple(each.name for each in found.modifiers)) == (row.optimizer, row.modifiers)
    assert (found.shards, found.replicas, found.warm_start) == (1, 0, 0)
    assert not strategy.synchronized
    assert strategy.one_copy is None
    assert strategy.parameters != identity()


def test_the_list_above_has_every_strategy_with_a_server() -> None:
    assert sorted(NAMES) == sorted(name for name in s.__all__ if getattr(s, name)().server is not None)


@every_name
def test_shards_and_replicas_are_for_all(name: str) -> None:
    server = parse_strategy(f"{name}(shards=3, replicas=1)").server
    assert server is not None
    assert (server.shards, server.replicas) == (3, 1)


@pytest.mark.parametrize(
    "written",
    [
        "downpour(shards=2, push_every=5, pull_every=5)",
        "downpour(optimizer=sgd, lr=1, warm_start=20, overlap=false)",
        "softsync(n=4, scale=inverse)",
        "staleness_aware(n=4)",
        *[
            f"{name}(scale={scale})"
            for name in SCALED
            for scale in (*NAMED, "power(2)", "power(p=0.5)", "gate(0.1, 8)")
        ],
        "async_diloco(outer_momentum=0.9, momentum_every=4, delay=3)",
        "decoupled_diloco(delay=1)",
        "async_diloco(outer_optimizer=adam, scale=gate(0.2, 8))",
        "decoupled_diloco(outer_optimizer=heavy_ball(momentum=0.2))",
        "decoupled_diloco(outer_momentum=0.9, grace_s=1.0, momentum_every=2)",
        "easgd(period=10, alpha=0.1)",
        "halos(4, 2, 8, share=0.5, outer_momentum=0, delay=3)",
        "backup_workers(backups=2, replicas=2)",
        "flexrr(helpers=2, grain=0.025, bound=3)",
        "dc_asgd(strength=2.0)",
    ],
)
def test_as_the_command_line_writes_them(written: str) -> None:
    strategy = parse_strategy(written)
    assert parse_strategy(strategy.name).name == strategy.name


@pytest.mark.parametrize("make", [s.async_diloco, s.decoupled_diloco])
def test_delayed_momentum_is_counted_in_updates(make: Callable[..., Strategy]) -> None:
    without, late = (make(outer_momentum=momentum, momentum_every=4).server for momentum in (0.0, 0.5))
    assert without is not None
    assert late is not None
    assert without.optimizer == UpdateRule("sgd", 0.7)
    assert late.optimizer == UpdateRule("sgd", 0.7, momentum=0.5, nesterov=True, momentum_every=4)
    with pytest.raises(ValueError, match="momentum_every is a number of updates, at least 1"):
        make(momentum_every=0)
    with pytest.raises(ValueError, match="global_momentum_every is a number of updates, at least 1"):
        s.halos(global_momentum_every=0)


@pytest.mark.parametrize("name", SCALED)
@pytest.mark.parametrize(
    ("scale", "text", "shown"),
    [(pt.power(2), "power(2)", "power(p=2.0)"), (pt.gate(0.1, limit=8), "gate(0.1, 8)", "gate(decay=0.1, limit=8)")],
)
def test_python_and_text_name_the_same_scale(name: str, scale: Staleness, text: str, shown: str) -> None:
    made = getattr(s, name)(scale=scale)
    assert str(parse_strategy(f"{name}(scale={text})")) == str(made)
    assert f"scale={shown}" in _rule(made)
    declared().strategy(f"{name}(scale={text})")  # as the command line checks it, without torch


def test_a_scale_that_is_a_number_stays_one() -> None:
    assert "inner=sign_sgd(feedback=False, exact_below=1024, scale=0.5)" in str(
        parse_strategy("gpipe(stages=2, inner=sign_sgd(scale=0.5))")
    )


def test_python_gets_an_error_for_a_scale_that_is_no_function() -> None:
    with pytest.raises(TypeError, match=r"write scale=power\(2\)"):
        s.async_sgd(scale=2)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"one of constant, inverse, power\(p\), gate\(decay, limit\), got 'linear'"):
        s.softsync(scale="linear")


def test_what_is_written_reaches_the_server() -> None:
    found = s.downpour(optimizer="sgd", lr=0.5, warm_start=20).server
    assert found is not None
    assert (found.optimizer, found.warm_start) == (UpdateRule("sgd", 0.5), 20)
    job = s.downpour(optimizer="job").server
    assert job is not None
    assert job.optimizer is None
    assert [_rule(each) for each in (s.softsync(n=4, scale="inverse"), s.staleness_aware(n=4), s.easgd(alpha=0.1))] == [
        "softsync(n=4, scale=inverse, workers=None)",
        "softsync(n=4, scale=inverse, workers=None)",
        "elastic(alpha=0.1)",
    ]


@pytest.mark.parametrize(
    ("written", "rates"),
    [
        ("async_sgd", [1, 1 / 2, 1 / 8]),
        ("async_sgd(rate=1)", [1, 1, 1]),
        ("dc_asgd", [1, 1 / 2, 1 / 8]),
        ("ssp(rate=0.5)", [0.5, 0.5, 0.5]),
        ("softsync(n=1)", [1, 1, 1]),
        ("softsync(n=4)", [1, 1 / 2, 2 / 8]),
        ("softsync(n=4, scale=inverse)", [1, 1, 1]),
        ("async_sgd(scale=inverse)", [1, 1, 1]),
        ("async_sgd(scale=power(2))", [1, 1, 1]),
        ("async_sgd(scale=power(2), rate=0.5)", [0.5, 0.5, 0.5]),
        ("ssp(scale=power(0.5))", [1, pytest.approx(2**-0.5), pytest.approx(8**-0.5)]),
        ("softsync(n=4, scale=power(0.5))", [1, pytest.approx(2**-0.5), 1 / 2]),
    ],
)
def test_the_jobs_learning_rate_is_shared_among_the_workers_unless_told_otherwise(
    written: str, rates: list[float]
) -> None:
    server = parse_strategy(written).server
    assert server is not None
    assert server.rate is not None
    assert [server.rate(workers) for workers in (1, 2, 8)] == rates


@pytest.mark.parametrize("written", ["staleness_aware", "downpour", "backup_workers", "easgd"])
def test_others_take_it_as_it_is(written: str) -> None:
    server = parse_strategy(written).server
    assert server is not None
    assert server.rate is None


def _rule(strategy: Strategy) -> str:
    assert strategy.server is not None
    return strategy.server.rule.name


@pytest.mark.parametrize(
    ("written", "says"),
    [
        *[(f"{name}(shards=0)", "at least 1 shard, got shards=0") for name in NAMES],
        *[(f"{name}(shards=65)", "at most 64 shards, each a process, got shards=65") for name in NAMES],
        *[(f"{name}(replicas=3)", "0 to 2 further copies, got replicas=3") for name in NAMES],
        *[(f"{name}(rate=0)", "above 0, got 0") for name in ("async_sgd", "dc_asgd", "softsync", "ssp")],
        ("async_sgd(replicas=-1)", "0 to 2 further copies, got replicas=-1"),
        ("downpour(push_every=0)", "push needs a period of at least 1 step, got every=0"),
        ("downpour(pull_every=0)", "pull needs a period of at least 1 step, got every=0"),
        ("downpour(warm_start=-1)", "steps that one worker takes alone, got -1"),
        ("downpour(optimizer=rmsprop)", "optimizer must be one of adagrad, sgd, adam, adamw, job, got 'rmsprop'"),
        ("downpour(lr=0)", "above 0, got lr=0"),
        ("downpour(optimizer=job, lr=0.1)", "leave out lr"),
        ("softsync(n=0)", "n >= 1, got 0"),
        *[
            (f"{name}(scale={scale})", said)
            for name in SCALED
            for scale, said in [
                ("linear", "there is no scale 'linear'.*; there are: constant, gate, inverse, power"),
                ("power(0)", "power needs a finite p > 0, got 0.0"),
                ("power(-1)", "power needs a finite p > 0, got -1.0"),
                ("power(inf)", "power needs a finite p > 0, got inf"),
                ("power", "missing a required argument: 'p'"),
                ("gate(0.1, 0)", "gate needs limit >= 1 update, got 0"),
                ("gate(0.1, 1.5)", "expected an int, not 1.5"),
                ("2", "scale must be one of these names: constant, gate, inverse, power"),
            ]
        ],
        ("staleness_aware(n=0)", "n >= 1, got 0"),
        ("ssp(bound=-1)", "bound >= 0 steps, got -1"),
        ("flexrr(bound=-1)", "slices >= 1 and bound >= 0, got slices=80 and bound=-1"),
        (
            "flexrr(first_offer=0.01)",
            "so grain <= first_offer <= later_offers; got grain=0.0125, first_offer=0.01, later_offers=0.05",
        ),
        ("flexrr(helpers=0)", r"helpers >= 1, got 0; for the same steps without help use backup_workers\(backups=0\)"),
        ("flexrr(behind=0)", "behind is a part of a worker's batch, above 0 and at most 1, got 0"),
        ("flexrr(grain=0)", "grain is a part of a worker's batch, above 0 and at most 1, got 0"),
        ("easgd(period=0)", "exchange needs a period of at least 1 step, got every=0"),
        ("easgd(alpha=1.5)", "0 < alpha < 1, got 1.5"),
        ("easgd(beta=0)", "0 < beta < 1, got 0"),
        ("async_diloco(outer_lr=0.5, outer_optimizer=adam)", "give one or the other"),
        ("decoupled_diloco(outer_momentum=0.5, outer_optimizer=adam)", "give one or the other"),
        ("async_diloco(momentum_every=2, outer_optimizer=adam)", "momentum_every=2 belong .*; give one or the other"),
        (
            "decoupled_diloco(momentum_every=2, outer_optimizer=adam)",
            "momentum_every=2 belong .*; give one or the other",
        ),
        ("async_diloco(outer_optimizer=schedule_free)", r"no outer step schedule_free\(.*; take adam\(\)"),
        ("decoupled_diloco(outer_optimizer=heavy_ball(clip=1.0))", r"take .* heavy_ball\(\) without clip"),
        ("backup_workers(backups=-1)", "backups >= 0 workers, got -1"),
        ("dc_asgd(strength=-1)", "strength >= 0, got -1"),
    ],
)
def test_what_cannot_work_is_refused_when_it_is_written(written: str, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        parse_strategy(written)


# ---------------------------------------------------------------------- rules that look at the number of members


def verdicts(rule: Rule, pushes: list[tuple[int, int]], members: tuple[int, ...]) -> list[str]:
    """The rule's verdict at each push (worker, basis), with the version counting its updates."""
    state, version, out = rule.init(), 0, []
    for worker in members:
        state, _ = rule.receive(state, Arrival("joined", worker), Situation(0, members))
    for worker, basis in pushes:
        state, actions = rule.receive(state, Arrival("push", worker, 1, basis, 1), Situation(version, members))
        version += sum(type(action).__name__ == "Update" for action in actions)
        out.append(" ".join(type(action).__name__ for action in actions))
    return out


def test_all_but_one_of_three_waits_for_two() -> None:
    server = s.backup_workers(backups=1).server
    assert server is not None
    pushes = [(2, 0), (0, 0), (1, 0), (1, 1), (0, 1)]
    assert verdicts(server.rule, pushes, (0, 1, 2)) == [
        "",
        "Add Add Update Answer Answer",
        "Drop Answer",  # late: on version 0, and the server has version 1
        "",
        "Add Add Update Answer Answer",
    ]


@pytest.mark.parametrize("members", [(0,), (0, 1)])
def test_at_least_one_is_waited_for(members: tuple[int, ...]) -> None:
    server = s.backup_workers(backups=5).server
    assert server is not None
    assert verdicts(server.rule, [(0, 0)], members) == ["Add Update Answer"]


@pytest.mark.parametrize("start", [pt.run, pt.simulate])
def test_a_run_needs_a_worker_to_wait_for(start: Callable[..., object]) -> None:
    """Workers that die later are another matter: the rule then waits for one."""
    says = r"backup_workers\(backups=5, .*\) needs at least 6 workers, .* there are 2; use workers=6 or more"
    with pytest.raises(ValueError, match=says):
        start(pt.jobs.find("digits"), s.backup_workers(backups=5), workers=2, steps=1)


@pytest.mark.parametrize(("members", "alpha"), [((0,), 0.9), ((0, 1), 0.45), ((0, 1, 2, 3), 0.225)])
def test_the_elastic_strength_is_shared_among_the_members(members: tuple[int, ...], alpha: float) -> None:
    server = s.easgd().server
    assert server is not None
    rule = server.rule
    _, actions = rule.receive(rule.init(), Arrival("push", 0), Situation(0, members))
    assert actions[0] == (0, alpha)
