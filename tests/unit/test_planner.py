"""The parts of a planner: the space, the law of samples, the front, the choice; literal tables and laws."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
import torch
from torch.nn import functional
from torch.utils.data import TensorDataset

import polytempo as pt
from polytempo.cluster import Cluster, CollectiveLink, Link
from polytempo.cluster.cluster_file import read_cluster, read_measured, read_price, read_spread
from polytempo.planner.forecast import RunForecast, Uncertainty, forecast
from polytempo.planner.front import PlanLimits, chance, front, ranked, reversal, runner_up
from polytempo.planner.run_price import Pricer, RunPrice, faster_network
from polytempo.planner.samples_law import SamplesLaw, SamplesTrial, deviation, drawn_laws, fitted
from polytempo.planner.search import Trials
from polytempo.planner.search_space import SYNCHRONOUS, PlannedRun, SearchSpace, family_of, usual_strategies

SEEDS = range(20)


def found(
    seconds: float, hosts: int, memory_bytes: int = 1, family: str = "a", drawn: tuple[float, ...] = ()
) -> RunForecast:
    """A forecast with time and money alone."""
    run = PlannedRun(f"{family}()", hosts, round(1e6 * seconds), hosts, family)
    return RunForecast(run, RunPrice(1.0, 1.0, 0.0), hosts, memory_bytes, 1.0, seconds, seconds, seconds, drawn)


# ---- the space ----


@pytest.mark.parametrize(
    ("strategy", "family"),
    [
        ("sync_sgd()", SYNCHRONOUS),
        ("sync_sgd(route=ring)", SYNCHRONOUS),
        ("one_f_one_b(stages=2)", SYNCHRONOUS),
        ("split(parts=2)", SYNCHRONOUS),
        ("one_f_one_b(stages=2, inner=top_k_sgd(0.1))", None),
        ("local_sgd(period=8)", None),
        ("one_bit_sgd()", None),
        ("async_sgd(shards=4)", "async_sgd(shards=1, replicas=0, rate=None)"),
    ],
)
def test_what_stands_for_a_strategys_samples(strategy: str, family: str | None) -> None:
    made = pt.parse_strategy(strategy)
    assert family_of(made) == (made.name if family is None else family)


def test_a_space_is_every_combination_that_can_be_made() -> None:
    runs, left = SearchSpace(("sync_sgd()", "gossip()", "one_f_one_b(stages=2)"), (1, 3, 4), (8, 16)).runs()
    assert [(run.strategy.partition("(")[0], run.workers, run.batch_size, run.global_batch) for run in runs] == [
        *(("sync_sgd", n, b, n * b) for n in (1, 3, 4) for b in (8, 16)),
        *(("gossip", n, b, n * b) for n in (3, 4) for b in (8, 16)),
        *(("one_f_one_b", 4, b, 2 * b) for b in (8, 16)),
    ]
    assert [each.what for each in left] == ["one_f_one_b(stages=2, micro_batches=4), 3 workers"]


def test_the_usual_space_has_two_hundred_runs() -> None:
    runs, left = SearchSpace(usual_strategies(), (1, 2, 4, 8, 16), (8, 16, 32, 64)).runs()
    assert (len(runs) >= 200, left) == (True, [])
    assert len(set(runs)) == len(runs)


def test_each_period_has_its_local_strategies() -> None:
    """An answer that is a step late needs a period of two."""
    calls = ("local_sgd", "diloco", "streaming_diloco", "sparse_loco", "noloco", "async_diloco")
    usual = usual_strategies(codecs=(), periods=(1, 6))
    assert [call for call in calls if f"{call}(period=6)" in usual] == list(calls)
    assert {call for call in calls if f"{call}(period=1)" in usual} == {*calls} - {"streaming_diloco"}


def test_strategies_without_an_option_are_tried_once() -> None:
    once = ["sync_sgd()", "sync_sgd(route=halving_doubling)", "acco()", "gossip()", "sparta()"]
    assert [call for call in usual_strategies(periods=(4, 16, 64)) if call in once] == once


def test_an_unknown_codec_is_named() -> None:
    with pytest.raises(ValueError, match=r"codec 'zip' is not tried by plans; there are: bf16, int8"):
        usual_strategies(codecs=("bf16", "zip"))


# ---- the law of samples ----


@pytest.mark.parametrize("noise_scale", [2, 32, 512])
def test_a_law_is_found_again(noise_scale: float) -> None:
    """The tolerance is the grid's step of 𝓑, a factor of the fourth root of 2 either way."""
    law = SamplesLaw(100.0 * noise_scale, 100.0)
    assert law.noise_scale == noise_scale
    again = fitted([(batch, law.samples(batch)) for batch in (8, 64, 512)])
    for batch in (8, 64, 512, 2048):
        assert again.samples(batch) == pytest.approx(law.samples(batch), rel=0.2)


def test_one_batch_is_taken_for_all() -> None:
    assert fitted([(32, 100.0), (32, 400.0)]) == SamplesLaw(pytest.approx(200.0), 0.0)
    assert fitted([(32, 100.0)]).noise_scale == math.inf


def test_larger_batches_never_need_fewer_samples() -> None:
    for seed in SEEDS:
        random = Random(seed)
        law = fitted([(random.randint(1, 512), random.uniform(10, 1e5)) for _ in range(random.randint(1, 6))])
        samples = [law.samples(batch) for batch in (1, 10, 100, 1000)]
        assert samples == sorted(samples), seed
        assert min(law) >= 0, seed


def test_no_point_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one run that reached the target"):
        fitted([])


def trials(*samples: tuple[int, int]) -> list[SamplesTrial]:
    return [SamplesTrial("a", 1, batch, batch, 0, end, end - 100, reached=True) for batch, end in samples]


def test_runs_on_their_law_leave_the_guess() -> None:
    """15 % as two of six degrees of freedom: sqrt(2 · 0.15² / 6)."""
    exact = trials((100, 1050), (200, 1050), (300, 1050), (400, 1050), (500, 1050))
    assert deviation([exact]) == pytest.approx(math.sqrt(2 * 0.15**2 / 6))
    assert deviation([]) == pytest.approx(0.15)


def test_drawn_laws_lie_around_the_fitted_one() -> None:
    given = trials((32, 1000), (32, 1100), (256, 3000), (256, 3100))
    drawn = sorted(law.samples(256) for law in drawn_laws(given, 0.1, 200, Random(0)))
    assert drawn[10] < 3000 < drawn[-10]
    assert drawn_laws(given, 0.1, 3, Random(1)) == drawn_laws(given, 0.1, 3, Random(1))


# ---- forecasts ----


def test_a_forecast_that_is_known_by_hand() -> None:
    """1,000 + 10 · 64 samples, up to the next score at 2,000, at 100 a second."""
    run = PlannedRun("sync_sgd(route=native)", 2, 32, 2)
    one = forecast(
        run,
        RunPrice(100.0, 0.64, 0.5),
        [SamplesLaw(1000.0, 10.0)] * 20,
        noise=0.0,
        between_scores=500,
        uncertain=Uncertainty(),
        hosts=2,
        memory_bytes=7,
        seed=0,
    )
    assert (one.seconds, one.low_s, one.high_s, one.samples) == (20.0, 20.0, 20.0, 2000.0)
    assert one.host_s == 40.0
    assert one.money(0.9) == pytest.approx(0.01)


def test_an_uncertain_cluster_widens_the_interval() -> None:
    def width(uncertain: Uncertainty) -> float:
        one = forecast(
            PlannedRun("sync_sgd(route=native)", 2, 32, 2),
            RunPrice(100.0, 0.64, 0.5),
            [SamplesLaw(1000.0, 10.0)] * 100,
            noise=0.0,
            between_scores=1,
            uncertain=uncertain,
            hosts=2,
            memory_bytes=7,
            seed=0,
        )
        return one.high_s - one.low_s

    assert width(Uncertainty()) == 0 < width(Uncertainty(0.1, 0.0)) < width(Uncertainty(0.3, 0.3))
    assert width(Uncertainty(0.1, 0.1)) < width(Uncertainty(0.1, 0.1, whole=0.3))


# ---- the front and the choice ----


def test_no_run_of_the_front_is_beaten_and_every_other_is() -> None:
    for seed in SEEDS:
        random = Random(seed)
        runs = [found(random.uniform(1, 100), random.randint(1, 16)) for _ in range(40)]
        kept = front(runs)
        for one in runs:
            beaten = any(
                other.seconds <= one.seconds and other.host_s <= one.host_s and other is not one for other in runs
            )
            assert beaten != (one in kept), seed


def test_a_larger_budget_never_gives_a_slower_winner() -> None:
    for seed in SEEDS:
        random = Random(seed)
        runs = [found(random.uniform(1, 100), random.randint(1, 16)) for _ in range(40)]
        times = []
        for budget in (0.01, 0.02, 0.05, 0.1, 0.5):
            order = ranked(runs, PlanLimits(budget=budget, price_per_host_hour=1.0))
            times.append(order[0].seconds if order else math.inf)
        assert times == sorted(times, reverse=True), seed


def test_a_later_deadline_never_gives_a_dearer_winner() -> None:
    for seed in SEEDS:
        random = Random(seed)
        runs = [found(random.uniform(1, 100), random.randint(1, 16)) for _ in range(40)]
        costs = []
        for deadline_s in (2.0, 10.0, 40.0, 90.0):
            order = ranked(runs, PlanLimits(deadline_s=deadline_s))
            assert all(each.seconds <= deadline_s for each in order)
            costs.append(order[0].host_s if order else math.inf)
        assert costs == sorted(costs, reverse=True), seed


def test_the_memory_limit_is_kept() -> None:
    runs = [found(1.0, 1, memory_bytes=100), found(2.0, 1, memory_bytes=10)]
    assert ranked(runs, PlanLimits(memory_bytes=50)) == [runs[1]]


def test_the_runner_up_is_of_another_family() -> None:
    runs = [found(1.0, 1, family="a"), found(2.0, 1, family="a"), found(3.0, 1, family="b")]
    order = ranked(runs, PlanLimits())
    assert runner_up(order) is runs[2]
    assert runner_up(order[:2]) is None


def test_the_chance_is_the_share_of_the_draws() -> None:
    first, second = found(1.0, 4, drawn=(1.0, 2.0, 9.0, 4.0)), found(2.0, 2, drawn=(2.0, 3.0, 4.0, 5.0))
    assert chance(first, second, PlanLimits()) == 0.75
    assert chance(first, second, PlanLimits(deadline_s=9.0)) == 0.25, "4, 8, 36, 16 against 4, 6, 8, 10 host seconds"


def test_what_would_change_the_choice_is_told_of_what_was_chosen_by() -> None:
    """The cheapest run is chosen with a deadline alone, though a dearer one is faster."""
    pricer, one_bit = Pricer(job(), None, CLUSTER), pt.parse_strategy("one_bit_sgd()").name
    cheap, fast = found(10.0, 1)._replace(run=PlannedRun(SYNCHRONOUS, 1, 8)), found(4.0, 4)
    fast = fast._replace(run=PlannedRun(one_bit, 4, 8, 4, one_bit))
    for limits, order, more in (
        (PlanLimits(), (fast, cheap), 10 / 4),
        (PlanLimits(deadline_s=20.0), (cheap, fast), 16 / 10),
        (PlanLimits(deadline_s=20.0, budget=1.0), (fast, cheap), 10 / 4),
    ):
        assert tuple(ranked([cheap, fast], limits)) == order
        turned = reversal(*order, pricer, limits)
        assert turned.more_samples == pytest.approx(more)
    by_price = reversal(cheap, fast, pricer, PlanLimits(deadline_s=20.0))
    assert by_price.slower_bytes_per_s is None, "on slower links the dearer run is dearer still"


# ---- prices ----


def job() -> pt.Job:
    """64 samples of noise for one linear layer of 8 x 2."""
    noise = torch.randn(64, 8, generator=torch.Generator().manual_seed(0))
    data = pt.Data(TensorDataset(noise, (noise[:, 0] > 0).long()), None)
    return pt.Job(
        name="tiny",
        model=lambda: torch.nn.Linear(8, 2),
        data=lambda path: data,
        loss=functional.cross_entropy,
        optimizer=lambda parameters, lr: torch.optim.SGD(parameters, lr=lr),
    )


CLUSTER = Cluster(Link(1e-3, 1e6), flops_per_s=1e6)


def test_a_price_is_that_of_the_simulation() -> None:
    """One worker, 10⁶ operations a second: 4 · 16 a sample (the layer, and its weights' gradient), 4 a parameter."""
    price = Pricer(job(), None, CLUSTER).price(PlannedRun(SYNCHRONOUS, 1, 8))
    assert price.step_s == pytest.approx((8 * 4 * 16 + 4 * 18) / 1e6)
    assert price.samples_per_s == pytest.approx(8 / price.step_s)
    assert price.communication_share == pytest.approx(0.0, abs=1e-9)


def test_a_period_is_priced_whole() -> None:
    """Local SGD that averages every 16 steps costs a sixteenth of an exchange a step, however few steps are priced."""
    pricer = Pricer(job(), None, CLUSTER)
    run = PlannedRun("local_sgd(period=16, route=native)", 2, 8, 2)
    alone = pricer.price(PlannedRun(SYNCHRONOUS, 1, 8)).step_s
    once = pricer.price(PlannedRun(SYNCHRONOUS, 2, 8, 2)).step_s - alone
    assert pricer.price(run).step_s - alone == pytest.approx(once / 16, rel=0.1)


def test_faster_links_never_make_a_step_slower() -> None:
    pricer = Pricer(job(), None, CLUSTER)
    for strategy in ("sync_sgd(route=native)", "one_bit_sgd()", "gossip()", "async_sgd()"):
        run = PlannedRun(pt.parse_strategy(strategy).name, 4, 8, 4)
        steps = [pricer.price(run, network_factor=factor).step_s for factor in (0.25, 1.0, 4.0)]
        assert steps == sorted(steps, reverse=True), strategy


def test_only_links_between_hosts_are_made_faster() -> None:
    between, within = CollectiveLink(2e6, (0,), (1e-3,)), CollectiveLink(3, (0,), (1,))
    given = Cluster(Link(1e-3, 1e6), collectives=(("network all_reduce", between), ("memory all_reduce", within)))
    faster = faster_network(given, 2.0)
    assert (faster.network, faster.memory) == (Link(1e-3, 2e6), given.memory)
    expected = ("network all_reduce", replace(between, bytes_per_s=4e6)), ("memory all_reduce", within)
    assert faster.collectives == expected


def test_a_server_is_a_host_of_its_own() -> None:
    pricer = Pricer(job(), None, CLUSTER)
    assert pricer.hosts(PlannedRun(SYNCHRONOUS, 4, 8, 4)) == 4
    assert pricer.hosts(PlannedRun(pt.parse_strategy("async_sgd(shards=2)").name, 4, 8, 4)) == 6


def test_where_cores_are_counted_a_server_is_on_a_workers_host() -> None:
    """The simulation places it there, so it costs nothing more."""
    pricer = Pricer(job(), None, replace(CLUSTER, cores=2))
    assert pricer.hosts(PlannedRun(pt.parse_strategy("async_sgd(shards=2)").name, 4, 8, 4)) == 4


def test_larger_batches_need_more_memory() -> None:
    pricer = Pricer(job(), None, CLUSTER)
    small, large = (pricer.memory_bytes(PlannedRun(SYNCHRONOUS, 2, batch, 2)) for batch in (8, 4096))
    assert small < large


def test_a_stage_needs_less_memory_than_the_whole_model() -> None:
    pricer = Pricer(pt.jobs.find("digits"), None, CLUSTER)
    stage = pt.parse_strategy("one_f_one_b(stages=2)").name
    assert pricer.memory_bytes(PlannedRun(stage, 2, 8, 1)) < pricer.memory_bytes(PlannedRun(SYNCHRONOUS, 1, 8, 1))


# ---- the file of a cluster ----


def test_price_and_spread_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "cluster.toml"
    path.write_text("[price]\nhost_hour = 1.5\n[spread]\nworkers = 0.2\nmessages = 0.5\n", encoding="utf-8")
    assert (read_price(path), read_spread(path)) == (1.5, {"workers": 0.2, "messages": 0.5})
    path.write_text("", encoding="utf-8")
    assert (read_price(path), read_spread(path)) == (None, {})
    path.write_text("[price]\nhost_hour = 'much'\n", encoding="utf-8")
    with pytest.raises(ValueError, match=r"price.host_hour = 'much' must be a number"):
        read_price(path)
    path.write_text("[price]\nhost_hour = 0\n", encoding="utf-8")
    with pytest.raises(ValueError, match=r"price.host_hour = 0 must be a number"):
        read_price(path)
    path.write_text("[spread]\nworkers = 'wide'\n", encoding="utf-8")
    with pytest.raises(ValueError, match=r"cluster.toml: spread = .*wide.* must be a number"):
        read_spread(path)


def test_a_file_that_is_no_toml_is_named(tmp_path: Path) -> None:
    path = tmp_path / "cluster.toml"
    for text, said in (("a = ", "is not TOML"), ("a = " + 5000 * "[", "is nested too deeply")):
        path.write_text(text, encoding="utf-8")
        for read in (read_price, read_spread, read_measured, read_cluster):
            with pytest.raises(ValueError, match=rf"^{path} {said}"):
                read(path)
    path.write_bytes(b"\xff")
    with pytest.raises(ValueError, match=rf"^{path} is not text in UTF-8"):
        read_price(path)


def test_how_many_workers_measured(tmp_path: Path) -> None:
    path = tmp_path / "cluster.toml"
    path.write_text("[[measured.hosts]]\nworkers = 2\n[[measured.hosts]]\nworkers = 3\n", encoding="utf-8")
    assert read_measured(path) == (2, 5)
    path.write_text("", encoding="utf-8")
    assert read_measured(path) is None
    path.write_text("[[measured.hosts]]\nworkers = 'two'\n", encoding="utf-8")
    with pytest.raises(ValueError, match=r"measured.hosts\[0\].workers = 'two' must be a whole number"):
        read_measured(path)


# ---- trials ----


def test_a_run_that_diverges_has_not_reached_the_target() -> None:
    digits = pt.jobs.find("digits")
    tried = Trials(replace(digits, lr=1e30), None, CLUSTER, {"accuracy": 0.99}, 0)
    trial = tried.run(SYNCHRONOUS, 1, 64, 0, most_samples=1.0)
    assert (trial.reached, trial.samples, trial.before) == (False, tried.num_samples, tried.num_samples)
    assert trial.failed is not None
    assert "learning rate" in trial.failed


def test_what_a_job_does_wrong_in_a_trial_is_said() -> None:
    """The job is at fault, so no strategy may be given up for it."""

    def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("a loss that is broken")

    tried = Trials(replace(pt.jobs.find("digits"), loss=loss), None, CLUSTER, {"accuracy": 0.99}, 0)
    with pytest.raises(pt.errors.JobFailed, match="a loss that is broken"):
        tried.run(SYNCHRONOUS, 1, 64, 0, most_samples=1.0)
