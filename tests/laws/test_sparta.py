"""SPARTA: the strategy it reduces to, its masks, its bytes, and the mean that it leaves where it was."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import polytempo as pt
from laws.harness import HOST, Setting, run
from polytempo import aggregation, collectives
from polytempo import strategies as s
from polytempo.compression import masked
from polytempo.core import Bundle, Port, Route, Strategy
from polytempo.core.cost import num_bytes
from polytempo.core.transform import cost_of
from polytempo.worlds import VirtualWorld

NUM_RANKS, LAST = 3, 13
ROUTES = [collectives.native, collectives.ring, collectives.tree]


def final(strategy: Strategy, setting: Setting = Setting("adam")) -> Tensor:
    """All ranks' weights, shape (N, numel)."""
    return torch.stack([rank.history[-1] for rank in run(strategy, NUM_RANKS, LAST, setting)[0]])


@pytest.mark.parametrize("route", ROUTES)
def test_a_share_of_all_is_an_average_in_every_step(route: Route) -> None:
    assert torch.equal(final(s.sparta(1.0, route=route)), final(s.local_sgd(1, route)))


@pytest.mark.parametrize("route", ROUTES)
def test_a_share_of_all_in_longer_periods_is_local_sgd(route: Route) -> None:
    assert torch.equal(final(s.sparta(1.0, 4, route=route)), final(s.local_sgd(4, route)))


async def averaged(port: Port, seed: int, steps: int, share: float = 0.1) -> list[Tensor]:
    """The models of ranks that each step begins with models of their own, after each step."""
    transform, found = masked(share, aggregation.mean(), seed), []
    like = Bundle({"a": torch.zeros(5, 8, dtype=torch.float64), "b": torch.zeros(20, dtype=torch.float64)})
    state = transform.init(like)
    for _ in range(steps):
        after, state = await transform.apply(port, like.map(lambda flat: torch.full_like(flat, port.rank)), state)
        assert after is not None
        found.append(after.flat.clone())
    return found


def masks(seed: int, steps: int) -> Tensor:
    """The averaged elements of each step, equal on all ranks, shape (steps, numel)."""
    results = VirtualWorld(HOST, 3).run(lambda port: averaged(port, seed, steps)).results
    own = [torch.stack(models) for models in results]
    of_each = [models != rank for rank, models in enumerate(own) if rank != 1]
    assert torch.equal(*of_each)
    assert all(torch.equal(models[of_each[0]], torch.ones_like(models[of_each[0]])) for models in own)
    return of_each[0]


def test_masks_are_equal_on_all_ranks_and_others_in_each_step() -> None:
    first, again, other = masks(0, 20), masks(0, 20), masks(1, 20)
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert len({tuple(row.tolist()) for row in first}) > 15
    assert (first.sum(1) == 4 + 2).all()  # a tenth of 40, and of 20


def test_every_element_is_averaged_after_enough_steps() -> None:
    """0.9^150 · 60 elements: one is left out in ten thousand runs."""
    found = masks(0, 150)
    assert found.any(0).all()
    assert float(found.double().mean(0).std()) < 0.05


def test_bytes_are_the_share_of_the_parameters() -> None:
    parameters = Bundle({"w": torch.empty(200, 100, device="meta"), "b": torch.empty(1000, device="meta")})
    (exchange,) = cost_of(s.sparta(0.005).parameters, parameters, 4).exchanges
    assert [each.numel * each.itemsize for each in exchange.sums] == [0.005 * num_bytes(parameters)]


def test_the_mean_of_the_models_stays() -> None:
    """DiLoCo's outer steps are the same with it and without, if gradients do not depend on the parameters."""

    async def program(port: Port, strategy: Strategy) -> Tensor:
        bundle = Bundle({"w": torch.full((30,), 1.0, dtype=torch.float64)})
        state = strategy.parameters.init(bundle.copy())
        for step in range(12):
            moved = bundle.with_flat(bundle.flat - 0.1 * (port.rank + step))
            answer, state = await strategy.parameters.apply(port, moved, state)
            bundle = moved if answer is None else answer.copy()
        return bundle.flat

    with_it, without = (
        torch.stack(VirtualWorld(HOST, 3).run(lambda port, each=each: program(port, each)).results)
        for each in (s.sparta(0.2, outer=s.diloco(4)), s.diloco(4))
    )
    torch.testing.assert_close(with_it, without, rtol=0, atol=1e-12)


def test_models_drift_less_within_a_round() -> None:
    def spread(strategy: Strategy) -> float:
        ranks, _ = run(strategy, NUM_RANKS, 12, Setting("momentum"))
        return float(torch.stack([rank.history[-1] for rank in ranks]).std(0).norm())

    assert 2 * spread(s.sparta(0.3, outer=s.diloco(13))) < spread(s.diloco(13))


def test_it_learns_digits_with_a_share_of_the_bytes() -> None:
    results = {
        call: pt.simulate(pt.jobs.find("digits"), call, workers=4, steps=96)
        for call in ("sparta(0.05)", "local_sgd(period=1)", "local_sgd(period=96)")
    }
    loss = {call: result.loss for call, result in results.items()}
    sent = {call: result.bytes_sent_per_rank for call, result in results.items()}
    print(loss, sent)
    assert 15 < sent["local_sgd(period=1)"] / sent["sparta(0.05)"] <= 20
    assert loss["sparta(0.05)"] < loss["local_sgd(period=96)"]
    assert loss["sparta(0.05)"] < loss["local_sgd(period=1)"] + 0.05


@pytest.mark.parametrize("share", [0.0, 1.5])
def test_shares_out_of_range_are_refused(share: float) -> None:
    with pytest.raises(ValueError, match="share is a part of the elements"):
        s.sparta(share)
