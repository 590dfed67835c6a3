"""Claims of papers of 2021 to 2026 on digits and on quadratics, as docs/claims has them: quality, bytes and time."""

from __future__ import annotations

import re
import runpy
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from statistics import mean
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim import AdamW

import polytempo as pt
from laws.harness import HOST
from polytempo.compression import bins, exact, feedback
from polytempo.core import Bundle, Port, Strategy
from polytempo.core.state import settled
from polytempo.jobs.digits import job
from polytempo.strategies import diloco
from polytempo.worlds import VirtualWorld

SEEDS, WORKERS, STEPS = (0, 1, 2), 4, 96


@cache
def trained(strategy: str, seeds: Sequence[int] = SEEDS) -> list[Any]:
    return [pt.simulate(job, strategy, workers=WORKERS, steps=STEPS, seed=seed) for seed in seeds]


def loss(strategy: str) -> float:
    return mean(found.loss for found in trained(strategy))


def accuracy(strategy: str) -> float:
    return mean(found.accuracy for found in trained(strategy))


@pytest.mark.parametrize("strategy", ["streaming_diloco(8)", "decoupled_diloco(8)", "async_diloco(8)"])
def test_descendants_of_diloco_learn_as_diloco_does(strategy: str) -> None:
    assert accuracy(strategy) > 0.97 < accuracy("diloco(8)")
    assert abs(loss(strategy) - loss("diloco(8)")) < 0.01


def test_sparse_loco_reaches_a_loss_with_a_sixth_of_dilocos_bytes() -> None:
    def sent(strategy: str, seed: int) -> float:
        found = pt.simulate(job, strategy, workers=WORKERS, steps=200, seed=seed, until={"loss": 0.1}, eval_every=8)
        assert found.loss < 0.1
        return found.bytes_sent_per_rank

    for seed in (0, 1):
        assert 6 * sent("sparse_loco(8)", seed) < sent("diloco(8)", seed)


@pytest.mark.parametrize("wrong", ["outer_lr=2.8", "outer_momentum=0.9"])
def test_asynchronous_movements_do_not_take_the_constants_of_a_meeting(wrong: str) -> None:
    """A whole outer rate of 0.7 for each of four pushes; or a momentum of 0.9, where late movements act as one."""
    (found,) = trained(f"async_diloco(8, {wrong})", (0,))
    assert found.loss > 1
    assert max(each.loss for each in trained("async_diloco(8)")) < 0.1


def test_delayed_momentum_steadies_asynchronous_movements() -> None:
    """The rate of each push, and the momentum, of the authors' code."""
    rate, momentum = 0.07, 0.9
    constants = f"8, {4 * rate}, {momentum}"
    assert max(each.loss for each in trained(f"async_diloco({constants}, momentum_every=4)")) < 0.3
    assert min(each.loss for each in trained(f"async_diloco({constants})")) > 0.7


def test_noloco_learns_as_diloco_and_sends_to_one_worker() -> None:
    assert accuracy("noloco(8)") > 0.97
    assert abs(loss("noloco(8)") - loss("diloco(8)")) < 0.02
    sent = {
        workers: pt.simulate(job, "noloco(8)", workers=workers, steps=16, meta=True).bytes_sent_per_rank
        for workers in (4, 64)
    }
    assert sent[4] == sent[64] > 0


def test_momenta_that_stay_with_workers_save_bytes_and_need_more_than_96_steps_of_digits() -> None:
    """DeMo's largest frequencies, and Dion by two directions of each matrix; all directions are Muon's step."""
    sent = {name: trained(name)[0].bytes_sent_per_rank for name in ("sync_sgd", "demo", "dion(2)", "distributed_muon")}
    assert 19 < sent["sync_sgd"] / sent["demo"] < 20
    assert sent["dion(2)"] < 0.2 * sent["distributed_muon"]
    assert 2 * loss("sync_sgd") < loss("demo") < 0.3
    assert loss("dion(2)") > 1
    assert loss("distributed_muon") < 0.15 < loss("dion(32)") < 0.2


def test_votes_of_one_bit_learn_digits_with_a_10th_of_the_bytes() -> None:
    sent = {name: trained(name)[0].bytes_sent_per_rank for name in ("sync_sgd", "distributed_lion")}
    assert 10 * sent["distributed_lion"] < sent["sync_sgd"]
    assert 0.9 < accuracy("distributed_lion") < accuracy("sync_sgd")


def test_acco_hides_an_exchange_that_takes_most_of_a_pass() -> None:
    """An exchange takes 0.78 of a pass. 16 workers take 1.1 times as long as one, and by synchronous SGD 1.7 times."""
    link = replace(pt.cluster.ethernet(gbit_per_s=1), flops_per_s=5e8)

    def longer(strategy: str) -> float:
        alone, together = (
            pt.simulate(job, strategy, workers=n, steps=16, meta=True, cluster=link).seconds for n in (1, 16)
        )
        return together / alone

    assert longer("acco") < 1.1
    assert longer("sync_sgd") > 1.7


def test_co2_hides_an_exchange_that_takes_most_of_a_round() -> None:
    """An exchange takes 0.98 of a round. 16 workers take 1.02 times as long as one, and of SlowMo 1.9 times."""

    def seconds(strategy: str, workers: int) -> float:
        link = pt.cluster.ethernet(gbit_per_s=1)
        return pt.simulate(job, strategy, workers=workers, steps=1600, meta=True, cluster=link).seconds

    assert seconds("co2(16)", 16) / seconds("co2(16)", 1) < 1.02
    assert seconds("slowmo(16)", 16) / seconds("slowmo(16)", 1) > 1.9


def test_one_worker_of_diloco_is_no_better_here() -> None:
    """Momentum and a larger rate make it worse, because SGD has a momentum of 0.9 inside."""

    def of_one(strategy: str) -> float:
        return mean(pt.simulate(job, strategy, workers=1, steps=STEPS, seed=seed).loss for seed in SEEDS)

    assert of_one("diloco(8)") > of_one("sync_sgd")
    assert of_one("diloco(8, 0.9, 0.9)") > 1


def test_des_loc_sends_less_than_averages_of_all_state_at_equal_loss() -> None:
    """1/8 + 1/16 + 1/32 of the bytes of a step, where averages of all state take 3/8."""
    adam = replace(job, optimizer=lambda parameters, lr: AdamW(parameters, lr=lr), lr=2e-3)
    apart, together = (
        pt.simulate(adam, strategy, workers=WORKERS, steps=STEPS)
        for strategy in ("des_loc(8, 16, 32)", "parameter_averaging(8)")
    )
    assert apart.bytes_sent_per_rank < 0.6 * together.bytes_sent_per_rank
    assert apart.loss == pytest.approx(together.loss, abs=0.01)


# ---------------------------------------------------------------------- workers that differ


def test_muon_inside_has_a_lower_loss_than_adamw_with_and_without_codes(capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(Path(__file__).parents[2] / "examples/muloco.py"))
    lines = capsys.readouterr().out.splitlines()
    losses = [float(re.search(r"loss ([\d.]+)", line)[1]) for line in lines]  # type: ignore[index]
    for factor, muon, adamw in zip((0.7, 0.8, 0.9), losses[:3], losses[3:], strict=True):
        assert muon < factor * adamw


def test_two_bits_of_a_movement_end_where_all_of_it_does() -> None:
    """After 12 meetings of Muon's movements."""
    inner = runpy.run_path(str(Path(__file__).parents[2] / "examples/muloco.py"))["with_muon"]
    whole, coded = (
        pt.simulate(inner, diloco(12, outer_lr=0.8, codec=codec), workers=4, batch_size=16, lr=0.03, steps=144)
        for codec in (exact(), feedback(bins(2)))
    )
    assert coded.bytes_sent_per_rank < whole.bytes_sent_per_rank / 3
    assert coded.loss == pytest.approx(whole.loss, abs=0.02)


def test_quasi_global_momentum_is_closer_on_a_ring_of_different_data() -> None:
    """½ |x - bᵢ|² on worker i of 8; the distance of models to the common minimum, with a momentum of 0.9 each."""

    async def program(port: Port, strategy: Strategy, momentum: float) -> Tensor:
        random = torch.Generator().manual_seed(port.rank)
        own = 10 * torch.randn(20, generator=random, dtype=torch.float64)
        bundle, velocity = Bundle({"x": torch.zeros_like(own)}), torch.zeros_like(own)
        state = strategy.parameters.init(bundle.copy())
        for _ in range(300):
            velocity = momentum * velocity + bundle.flat - own
            answer, state = await strategy.parameters.apply(
                port, bundle.with_flat(bundle.flat - 0.05 * velocity), state
            )
            assert answer is not None
            bundle = answer.copy()
        await settled(state)
        return torch.stack([bundle.flat, own])

    def distance(strategy: Strategy, momentum: float) -> float:
        ranks = VirtualWorld(HOST, 8).run(lambda port: program(port, strategy, momentum)).results
        found = torch.stack([each for each in ranks if each is not None])
        return float((found[:, 0] - found[:, 1].mean(0)).norm(dim=1).mean())

    local, of_all = distance(pt.strategies.gossip(), 0.9), distance(pt.strategies.quasi_global_momentum(), 0.0)
    assert 2 * of_all < local
