"""One strategy, two worlds, the same bits: real processes and the virtual clock on digits, 3 ranks, 20 steps."""

from __future__ import annotations

from typing import Any

import pytest

from laws.catalogue import GROUPED, HELPED, ROWS, SERVED, Row, label
from polytempo import collectives, run, strategies
from polytempo.cluster import ethernet, one_host
from polytempo.core import Strategy
from polytempo.engines.join.init import init
from polytempo.engines.local_engine import launch
from polytempo.engines.processes.worker import RankInfo, Result
from polytempo.jobs import find
from polytempo.runs.simulated.simulate import simulate
from polytempo.runs.simulated.simulate_served import simulate_served
from polytempo.spec.run_options import RunOptions
from polytempo.spec.run_spec import RunSpec
from polytempo.training.trainer import Trainer

pytestmark = pytest.mark.process

OWN_ROUTES = [row for row in ROWS if "native" not in label(row) and row.make().one_copy is None] + [
    Row("diloco", lambda: strategies.diloco(period=5, route=collectives.ring)),
    Row("parameter_averaging", lambda: strategies.parameter_averaging(period=3, route=collectives.halving_doubling)),
    Row("post_local_sgd", lambda: strategies.post_local_sgd(6, 4, route=collectives.star)),
    Row(
        "islands",
        lambda: strategies.islands(strategies.sync_sgd(collectives.tree), strategies.diloco(5, route=collectives.ring)),
    ),
    Row("delayed_sgd", lambda: strategies.delayed_sgd(delay=1, route=collectives.tree)),
    Row("slowmo", lambda: strategies.slowmo(period=5, route=collectives.ring)),
]


def on_processes(strategy: Strategy, workers: int, **options: Any) -> list[dict[str, Any]]:
    """The last words of each real rank."""
    job = find("digits")

    def work(rank_info: RankInfo) -> dict[str, Any]:
        return Trainer(job, strategy, world=init(quiet=True), **options).fit().as_json()

    return launch(work, workers, threads=1)


def test_every_strategy_is_here() -> None:
    """Strategies that write to one copy of the weights are left out: the processes' own pace decides their result.

    Strategies with a parameter server have processes of their own: below. Strategies that cut the model: tests/laws.
    Strategies with groups: process/test_codistillation. Strategies with layers in parts: process/test_parted_runs.
    """
    one_copy = {row.name for row in ROWS if row.make().one_copy is not None}
    served = {row.name for row in [*SERVED, *HELPED] if row.make().server is not None}
    staged = {name for name in strategies.__all__ if getattr(strategies, name)().schedule is not None}
    parted = {name for name in strategies.__all__ if getattr(strategies, name)().parted is not None}
    elsewhere = one_copy | served | staged | parted | {row.name for row in GROUPED}
    missing = {row.name for row in OWN_ROUTES} ^ (set(strategies.__all__) - elsewhere)
    assert not missing, f"{sorted(missing)}: only routes of our own agree; give OWN_ROUTES a row with route=…"


@pytest.fixture(scope="module")
def trained() -> list[list[dict[str, Any]]]:
    """The results of three processes for each row's training, one after the other."""
    job = find("digits")

    def work(rank_info: RankInfo) -> Result:
        world = init(quiet=True)
        return [Trainer(job, row.make(), world=world, steps=20).fit().as_json() for row in OWN_ROUTES]

    return launch(work, 3, threads=1)


@pytest.mark.parametrize("row", OWN_ROUTES, ids=label)
def test_both_worlds_reach_the_same_bits(row: Row, trained: list[list[dict[str, Any]]]) -> None:
    real = [rank[OWN_ROUTES.index(row)] for rank in trained]
    virtual = simulate(find("digits"), row.make(), 3, one_host(), steps=20, threads=1).as_json()
    for rank in real:
        for figure in ("parameters_sha256", "loss", "accuracy", "steps", "samples", "bytes_sent_per_rank"):
            assert rank[figure] == virtual[figure], figure


def test_a_parameter_server_that_waits_for_all_reaches_the_same_bits() -> None:
    """Only their pushes are the same in any order of arrival."""
    strategy, options = strategies.backup_workers(backups=0, shards=2), RunOptions(steps=4, threads=1)
    real = run(find("digits"), strategy, 3, steps=4, threads=1)
    virtual = simulate_served(RunSpec.of(find("digits"), strategy, 3, options), ethernet(), native=True)
    assert (real.steps, real.samples) == (virtual.steps, virtual.samples)
    assert real.parameters_sha256 == virtual.parameters_sha256


def test_a_delegated_route_agrees_to_rounding() -> None:
    real = on_processes(strategies.sync_sgd(), 3, steps=20)
    virtual = simulate(find("digits"), strategies.sync_sgd(), 3, one_host(), steps=20, threads=1)
    assert real[0]["loss"] == pytest.approx(virtual.loss, rel=1e-5)


def test_one_seed_one_trace() -> None:
    first, second, other = (
        simulate(find("digits"), strategies.local_sgd(period=4), 5, steps=12, seed=seed) for seed in (1, 1, 2)
    )
    assert first.trace_hash == second.trace_hash
    assert first == second
    assert other.parameters_sha256 != first.parameters_sha256


def test_a_repeated_real_run_does_the_same_operations() -> None:
    first, second = (on_processes(strategies.gossip(), 2, steps=12) for _ in range(2))
    assert first[0]["trace_hash"] == second[0]["trace_hash"]
    assert first[0]["parameters_sha256"] == second[0]["parameters_sha256"]


def test_any_number_of_workers_reaches_the_same_bits_in_both_worlds() -> None:
    """`invariant` and one global batch; 5 workers have 1 or 2 slices each."""
    strategy = strategies.sync_sgd(route=collectives.invariant(slices=8))
    virtual = [simulate(find("digits"), strategy, n, steps=9, global_batch_size=40) for n in (1, 2, 3, 4, 5, 8)]
    real = [on_processes(strategy, n, steps=9, global_batch_size=40)[0] for n in (1, 2, 3, 4, 8)]
    assert len({each.parameters_sha256 for each in virtual} | {each["parameters_sha256"] for each in real}) == 1
