"""The optimizer keeps its meaning with a parameter server too: no rate is lost, doubled or cancelled."""

from __future__ import annotations

import pytest
import torch

from laws.catalogue import ONE_WORKER, SERVED, Row, label
from laws.clock import (
    DECAY,
    EPOCHS,
    OPTIMIZERS,
    SAMPLES,
    Promise,
    Setting,
    async_diloco_alone,
    dealt,
    downpour_alone,
    easgd_alone,
    halos_alone,
    inverse,
    repeated,
    simulated,
)
from laws.definitions import adam_steps
from polytempo import strategies
from polytempo.cluster import Crash
from polytempo.core import Strategy
from polytempo.server.rules.staleness import power
from some_cases import some_of

WORKERS = 4


def shared(workers: int) -> float:
    """ρ = 1/λ: each gradient is an update."""
    return 1 / workers


PROMISES = {
    "async_sgd": Promise(factor=shared),
    "backup_workers": Promise(by_samples=True),
    "dc_asgd": Promise(factor=shared, compensation=0.04),
    "downpour": Promise(decays_at_worker=True),
    "softsync": Promise(),
    "ssp": Promise(factor=shared),
    "staleness_aware": Promise(scale=inverse),
}
"""The docstrings' promises; easgd's server makes no step, and async_diloco's makes none by gradients."""

SCALES = {"'inverse'": inverse, "power(p=2.0)": lambda tau: inverse(tau) ** 2}
"""Other factors by staleness; the job's rate is taken as it is with them."""

SEVERAL = [
    Row("softsync", lambda: strategies.softsync(n=1, scale="inverse")),
    Row("softsync", lambda: strategies.softsync(n=2, scale=power(2))),
    Row("staleness_aware", lambda: strategies.staleness_aware(n=2, shards=2)),
]
"""Updates of several gradients, each with a staleness of its own."""

every_row = pytest.mark.parametrize("row", SERVED, ids=label)
every_optimizer = pytest.mark.parametrize("optimizer", OPTIMIZERS)


def promise_of(row: Row, strategy: Strategy) -> Promise:
    promise = PROMISES[row.name]
    assert strategy.server is not None
    named = strategy.server.optimizer
    if "scale='linear'" in str(strategy):
        promise = promise._replace(factor=lambda workers: workers - 1)
    if (scale := next((known for name, known in SCALES.items() if f"scale={name}" in str(strategy)), None)) is not None:
        promise = promise._replace(scale=scale, factor=lambda workers: 1.0)
    return promise._replace(adagrad=named is not None and named.kind == "adagrad")


def settings(optimizer: str) -> list[Setting]:
    return [
        Setting("slope", optimizer, scheduled=True),
        Setting("slope", optimizer, DECAY, scheduled=True),
        Setting("decay", optimizer, DECAY),
    ]


def number_of(row: Row, optimizer: str) -> int:
    """So that each row and each optimizer meet all settings, also where a case looks at some of them."""
    return [*SERVED, *SEVERAL].index(row) + list(OPTIMIZERS).index(optimizer)


@pytest.mark.parametrize("row", ONE_WORKER, ids=label)
@every_optimizer
def test_one_worker_steps_as_the_docstring_says(row: Row, optimizer: str) -> None:
    strategy = row.make()
    for setting in some_of(settings(optimizer), number_of(row, optimizer)):
        if row.alone == "downpour" and optimizer == "adamw" and setting.decay:
            with pytest.raises(ValueError, match=r"by \[0.5\], and its shards apply adagrad, which would drop that"):
                simulated(strategy, setting, 1)
            continue
        batches = dealt(strategy, setting, 1)
        run = simulated(strategy, setting, 1)
        if row.alone == "downpour":
            expected = downpour_alone(row.pushes_every, setting, batches)
        elif row.alone == "async_diloco":
            lr, momentum = (0.9, 0.3) if "outer_lr=0.9" in str(strategy) else (0.7, 0.0)
            late, delay = (2 if f"{each}=2" in str(strategy) else 0 for each in ("momentum_every", "delay"))
            outer = adam_steps() if "adam(" in str(strategy) else None
            expected = async_diloco_alone(row.pushes_every, lr, momentum, setting, batches, late or 1, delay, outer)
        elif row.alone == "halos":
            delay = 2 if "delay=2" in str(strategy) else 0
            expected = halos_alone(row.pushes_every, str(strategy), setting, batches, delay)
        elif row.alone == "easgd":
            expected = easgd_alone(row.pushes_every, 0.9, setting, batches)
        else:
            alone = [[update] for update in run.updates[0]]
            assert [gradient.tickets for ((gradient,),) in alone] == [(ticket,) for ticket in batches.tickets]
            plain = Promise(adagrad=False)  # torch's optimizer on batch after batch, for each strategy
            expected = repeated(run.updates[0], plain, setting, batches)
        torch.testing.assert_close(run.weights, torch.full_like(run.weights, expected), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("row", [*SERVED, *SEVERAL], ids=label)
@every_optimizer
def test_the_server_steps_as_the_docstring_says_however_stale_gradients_are(row: Row, optimizer: str) -> None:
    """One slow worker, uneven batches, and a schedule that ends at 0."""
    strategy = row.make()
    if row.name not in PROMISES:
        return  # the server makes no step by gradients
    promise = promise_of(row, strategy)
    known = settings(optimizer)[: 1 if promise.adagrad else 2]  # with decay it pushes gradients of its own weights
    for setting in some_of(known, number_of(row, optimizer), of=len(known)):
        run = simulated(strategy, setting, WORKERS)
        check(run.updates, run.weights, promise, setting, strategy)
        assert run.samples == EPOCHS * SAMPLES


@pytest.mark.parametrize("optimizer", ["sgd", "momentum", "nesterov"])
@pytest.mark.parametrize("shards", [1, 2])
def test_adaptive_compensation_is_the_paper_s(optimizer: str, shards: int) -> None:
    strategy = strategies.dc_asgd(strength=2.0, mean_square=0.95, shards=shards)
    promise = Promise(factor=shared, compensation=2.0, mean_square=0.95)
    for setting in settings(optimizer)[:2]:
        run = simulated(strategy, setting, WORKERS)
        check(run.updates, run.weights, promise, setting, strategy)
        plain = repeated(run.updates[0], promise._replace(mean_square=None), setting, dealt(strategy, setting, WORKERS))
        assert (run.weights - plain).abs().max() > 1e-6


def test_adaptive_compensation_is_for_sgd() -> None:
    with pytest.raises(
        ValueError, match=r"compensate\(.*\) keeps squares of gradients beside SGD, .* is AdamW.*; use SGD"
    ):
        simulated(strategies.dc_asgd(mean_square=0.95), settings("adamw")[0], WORKERS)


@every_row
@pytest.mark.parametrize("step", [0, 1, 4])
def test_a_worker_that_dies_changes_no_rate(row: Row, step: int) -> None:
    """The dead worker's batches are dealt again, later, with the rate of their place in the run."""
    strategy = row.make()
    if row.name not in PROMISES:
        return  # the dead worker's exploration is lost, as its parameters are its own
    setting = Setting("clock", scheduled=True)
    run = simulated(strategy, setting, WORKERS, Crash(rank=1, step=step))
    check(run.updates, run.weights, promise_of(row, strategy), setting, strategy)
    tickets = sorted(t for update in run.updates[0] for gradient in update for t in gradient.tickets)
    assert len(set(tickets)) == len(tickets)
    if not row.drops and "softsync" not in row.name:  # its last sum waits for one more gradient
        assert tickets == list(dealt(strategy, setting, WORKERS).tickets)


ASYNCHRONOUS = [
    strategies.async_sgd(shards=2),
    strategies.ssp(shards=2),
    strategies.downpour(optimizer="sgd", shards=2),
    strategies.downpour(3, 2, optimizer="job", shards=2),
]


@pytest.mark.parametrize("strategy", ASYNCHRONOUS, ids=str)
@pytest.mark.parametrize("crashes", [(), (Crash(rank=0, step=2),), (Crash(rank=3, step=1), Crash(rank=1, step=6))])
@pytest.mark.parametrize("reshape", [{}, {1: 3, 2: 1}])
def test_the_clock_is_exact_under_any_crash_and_reshape(
    strategy: Strategy, crashes: tuple[Crash, ...], reshape: dict[int, int]
) -> None:
    """w = 1 - ρ Σ η over all tickets, each once, with the schedule's η at its place in the run."""
    setting = Setting("clock", scheduled=True)
    batches = dealt(strategy, setting, WORKERS)
    factor = 1.0 if strategy.name.startswith("downpour") else 1 / WORKERS
    expected = 1 - factor * sum(map(batches.rate, batches.tickets))
    found = simulated(strategy, setting, WORKERS, *crashes, reshape=reshape).weights
    torch.testing.assert_close(found, torch.full_like(found, expected), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("bound", "crashes"), [(0, ()), (2, ()), (2, (Crash(rank=1, step=2),))])
def test_slices_bear_the_rate_of_their_batch_whoever_does_them(bound: int, crashes: tuple[Crash, ...]) -> None:
    """A step of all has η; with a bound each batch is an update of ρ η. One worker needs help all the time."""
    setting = Setting("clock", scheduled=True)
    strategy = strategies.flexrr(bound=bound, grain=0.25, first_offer=0.25, later_offers=0.5)
    batches = dealt(strategy, setting, WORKERS)
    expected = 1 - sum(map(batches.rate, batches.tickets)) / WORKERS  # batches of a step have one rate
    found = simulated(strategy, setting, WORKERS, *crashes).weights
    torch.testing.assert_close(found, torch.full_like(found, expected), rtol=1e-12, atol=1e-12)


def test_backup_workers_without_backups_is_synchronous_sgd_on_uneven_batches() -> None:
    """37 samples by 4 workers in batches of 4: the last batches of an epoch differ."""
    setting = Setting("slope", scheduled=True)
    strategy = strategies.backup_workers(backups=0)
    run = simulated(strategy, setting, WORKERS)
    assert len({gradient.samples for update in run.updates[0] for gradient in update}) > 1
    batches = dealt(strategy, setting, WORKERS)
    expected = 1.0
    for first in range(0, len(batches.tickets), WORKERS):
        step = range(first, first + WORKERS)
        total = sum(batches.samples(ticket) * batches.gradient(ticket) for ticket in step)
        expected -= batches.rate(first) * total / sum(map(batches.samples, step))
    torch.testing.assert_close(run.weights, torch.full_like(run.weights, expected), rtol=1e-12, atol=1e-12)


def check(updates: list, weights: torch.Tensor, promise: Promise, setting: Setting, strategy: Strategy) -> None:
    """Each shard has its part of the weights, and saw gradients in its own order."""
    batches = dealt(strategy, setting, WORKERS)
    for part, mine in zip(weights.chunk(len(updates)), updates, strict=True):
        expected = repeated(mine, promise, setting, batches)
        torch.testing.assert_close(part, torch.full_like(part, expected), rtol=1e-11, atol=1e-11)
