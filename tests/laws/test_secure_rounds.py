"""Laws of `secure`: a round's gradient is the masked sum of clients' fixed-point movements. Seeds are literals."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import polytempo as pt
from laws.test_federated import SEED, close, job, plain, simulated, trained
from laws.test_secure_sum import TOY
from polytempo import federated as fed
from polytempo.aggregation import trimmed_mean
from polytempo.compression import int8
from polytempo.core import Strategy
from polytempo.core.calls.refusals import Incompatible
from polytempo.core.strategy import InRounds, Privacy, SecureSum
from polytempo.federated.secure_sum import FixedPoint, secure_sum
from polytempo.spec.text.catalogue import parse_strategy
from polytempo.training.federated.movement_words import words_of


@pytest.mark.parametrize(("bits", "fraction"), [(32, 24), (32, 10), (64, 40)])
def test_a_round_is_the_masked_sum_of_the_movements(bits: Any, fraction: int) -> None:
    """All four phases with masks, and the run without them, give one sum."""
    point = FixedPoint(bits, fraction)

    def update(theta: list[Tensor], movements: list[list[Tensor]], sizes: list[int], steps: list[int]) -> None:
        weighed = [
            torch.cat([m.flatten() for m in each]).numpy() * (size / sum(sizes))
            for each, size in zip(movements, sizes, strict=True)
        ]
        moved = torch.from_numpy(secure_sum(weighed, point=point, crypto=TOY, random=random.Random(3).randbytes))
        for value, part in zip(theta, moved.split([value.numel() for value in theta]), strict=True):
            value -= part.view(value.shape)

    close(trained(fed.secure(fed.fed_avg(4, 2, 4), bits, fraction), 3), plain(3, 4, 2, 4, update))


def test_a_round_is_nearly_the_plain_one() -> None:
    exact = trained(fed.fed_avg(4, 2, 4), 1)
    for one, other in zip(trained(fed.secure(fed.fed_avg(4, 2, 4), 32, 12), 1), exact, strict=True):
        assert 0 < float((one - other).abs().max()) <= 4 / 2**13


@pytest.mark.parametrize(
    "inner",
    [
        fed.fed_buff(4, 4, batch_size=4),
        fed.fed_nova(4, 1, 4),
        fed.fed_rep(4, 1, 4),
        fed.fed_coded(fed.fed_avg(4), None, int8()),
    ],
    ids=["fed_buff", "fed_nova", "fed_rep", "pull_codec"],
)
def test_other_rounds_have_the_same_bits_for_any_number_of_workers(inner: Strategy) -> None:
    strategy = fed.secure(inner, 64, 40)
    assert str(parse_strategy(str(strategy))) == str(strategy)
    found = [simulated(strategy, 3, workers, clients="iid(8)") for workers in (1, 3)]
    assert found[0]["hash"] == found[1]["hash"]
    assert found[0]["loss"] == pytest.approx(simulated(inner, 3, clients="iid(8)")["loss"], abs=1e-9)


def test_a_run_goes_on_to_the_bit(tmp_path: Path) -> None:
    def run(folder: str, steps: int, **more: Any) -> pt.Result:
        given = {"clients": "iid(6)", "seed": SEED, "steps": steps, "out": tmp_path / folder}
        return pt.Trainer(job(), fed.secure(fed.fed_adam(3, 2, 4)), **given, **more).fit()

    whole = run("whole", 4)
    run("part", 2, checkpoint_every=2)
    assert run("part", 4, resume=True).parameters_sha256 == whole.parameters_sha256


def test_private_movements_are_rounded_towards_zero() -> None:
    """A norm never grows, and the sum is the private one to the unit."""
    rounds = InRounds(3, None, None, None, privacy=Privacy(1.0, 0.0, 1e-5, 3), secure=SecureSum(32, 8, None))  # type: ignore[arg-type]
    movement = [torch.tensor([0.999 / 256, -2.7 / 256]), torch.tensor([[1.5 / 256]])]
    assert words_of(movement, 1.0, 3, rounds).view("i4").tolist() == [0, -2, 1]
    inner = fed.private(fed.fed_avg(4, 1, 4), clip=0.1, noise=0.0)
    found, exact = trained(fed.secure(inner), 1), trained(inner, 1)
    for one, other in zip(found, exact, strict=True):
        assert float((one - other).abs().max()) < inner.slices / 2**24


@pytest.mark.parametrize(
    "make",
    [
        lambda: fed.secure(fed.fed_robust(fed.fed_avg(), trimmed_mean(1))),
        lambda: fed.secure(fed.fed_coded(codec=int8())),
        lambda: fed.secure(fed.q_fed_avg()),
        lambda: fed.secure(fed.scaffold()),
        lambda: fed.secure(fed.secure()),
        lambda: fed.fed_robust(fed.secure()),
        lambda: fed.fed_coded(fed.secure(), int8()),
    ],
)
def test_rounds_that_need_single_movements_are_refused(make: Callable[[], Strategy]) -> None:
    with pytest.raises(Incompatible) as refused:
        make()
    assert refused.value.code == "PT2520"


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda: fed.secure(pt.strategies.sync_sgd()), "has none"),
        (lambda: fed.secure(fed.fed_avg(1)), "two clients at least"),
        (lambda: fed.secure(fed.fed_avg(6), threshold=3), "more than half"),
        (lambda: fed.secure(fed.fed_avg(6), threshold=7), "more than half"),
        (lambda: fed.secure(fed.fed_avg(6), fraction=32), "fraction below them"),
        (lambda: fed.private(fed.secure(fed.fed_avg(6)), noise=0.0), "movements alone"),
        (lambda: trained(fed.secure(fed.fed_avg(3, 1, 4), 32, 31), 1, job=job(lr=20.0)), "takes values below"),
    ],
)
def test_mistakes(make: Callable[[], object], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        make()
