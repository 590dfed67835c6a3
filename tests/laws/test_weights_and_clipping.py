"""Weights of batches and clipping meet the other options: each row is plain torch on the joined batch, or refused."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import polytempo as pt
from laws.catalogue import ROWS, Row
from laws.test_batch_weights import BATCH, JOB, PAIRS, STEPS, check, halving, mean_of_tokens, padded, simulated
from polytempo import strategies as s
from polytempo.core.calls.refusals import Incompatible
from polytempo.data.plan import permutation

BOUND = 0.1


def clipped() -> dict[str, torch.Tensor]:
    """Plain torch on the joined batches, with clipped gradients."""
    torch.manual_seed(0)
    net, data = JOB.model(), list(JOB.data(None).train)
    optimizer = JOB.optimizer(net.parameters(), JOB.lr)
    schedule, norms = halving(optimizer, 3), list[float]()
    for step in range(STEPS):
        order = permutation(len(data), 0, step // 3).tolist()[step % 3 * BATCH : (step % 3 + 1) * BATCH]
        optimizer.zero_grad()
        mean_of_tokens(net, padded([data[i] for i in order])).backward()
        norms.append(float(nn.utils.clip_grad_norm_(net.parameters(), BOUND)))
        optimizer.step()
        schedule.step()
    assert max(norms) > BOUND, norms
    return {name: p.detach() for name, p in net.named_parameters()}


@pytest.mark.parametrize(
    ("strategy", "workers", "options"),
    [
        ("sync_sgd()", 1, {}),
        ("sync_sgd()", 3, {}),
        ("sync_sgd()", 3, {"accumulate": 4}),
        ("sync_sgd()", 3, {"accumulate": 2, "balance": "speed"}),
        ("sync_sgd(route=invariant(slices=6))", 3, {}),
        ("shared_memory()", 2, {"accumulate": 2}),
        ("gpipe(2, 3)", 2, {}),
        ("one_f_one_b(2, 2)", 4, {}),
        (s.split({"2": "row"}, parts=2), 2, {}),
        (s.split({"2": "row"}, parts=2), 4, {"accumulate": 2}),
    ],
    ids=str,
)
def test_tokens_clipping_schedule_and_layout(
    strategy: Any, workers: int, options: dict[str, Any], tmp_path: Path
) -> None:
    check(simulated(PAIRS, strategy, workers, tmp_path, clip_norm=BOUND, **options), clipped())


@pytest.mark.parametrize("accumulate", [1, 4])
@pytest.mark.parametrize("row", [row for row in ROWS if row.joined], ids=lambda row: str(row.make()))
def test_every_strategy_that_averages_clips_the_mean_per_token(row: Row, accumulate: int, tmp_path: Path) -> None:
    check(simulated(JOB, row.make(), 3, tmp_path, accumulate=accumulate, clip_norm=BOUND), clipped())


@pytest.mark.parametrize("weigh", [False, True])
@pytest.mark.parametrize("precision", ["bf16", "fp16(loss_scale=256)"])
def test_tokens_in_16_bits_with_masters(precision: str, weigh: bool, tmp_path: Path) -> None:
    """Three workers have one worker's model up to the rounding of 16 bits, with and without a weight."""
    job = replace(PAIRS, model=lambda: JOB.model().float(), weight=PAIRS.weight if weigh else None)
    given: dict[str, Any] = {"precision": precision, "clip_norm": BOUND, "steps": 3}
    one, three = (simulated(job, "sync_sgd()", n, tmp_path / str(n), **given) for n in (1, 3))
    if weigh:
        for name in one:
            torch.testing.assert_close(three[name], one[name], rtol=0, atol=0.02)
    else:  # of losses that divide by tokens, ranks that count by samples have another mean
        assert max(float((three[name] - one[name]).abs().max()) for name in one) > 1e-3


@pytest.mark.parametrize("strategy", ["sync_sgd()", "local_sgd(period=2)", "top_k_sgd(0.3, exact_below=0)"])
def test_the_noise_scale_is_measured_before_clipping(strategy: str, tmp_path: Path) -> None:
    """Looks change no bit of a clipped run."""
    job = replace(PAIRS, weight=None)
    given: dict[str, Any] = {"clip_norm": BOUND}
    looked, alone = (simulated(job, strategy, 3, tmp_path / str(each), noise_scale=each, **given) for each in (1, None))
    assert all(torch.equal(looked[name], alone[name]) for name in alone)


@pytest.mark.parametrize("workers", [1, 3])
def test_sparse_gradients_are_clipped_by_the_same_norm(workers: int, tmp_path: Path) -> None:
    def job(sparse: bool) -> pt.Job:
        return replace(
            PAIRS,
            model=lambda: nn.Sequential(nn.Embedding(9, 5, sparse=sparse), nn.Tanh(), nn.Linear(5, 9)).double(),
            optimizer=partial(torch.optim.SGD, momentum=0.0),
        )

    found, dense = (
        simulated(job(sparse), "sync_sgd()", workers, tmp_path / str(sparse), clip_norm=0.2) for sparse in (True, False)
    )
    check(found, dense)
    free = simulated(job(True), "sync_sgd()", workers, tmp_path / "free")
    assert any(not torch.equal(found[name], free[name]) for name in free)


@pytest.mark.parametrize(
    ("strategy", "options", "code"),
    [
        ("one_f_one_b(2, 2)", {"accumulate": 2}, "PT1526"),
        ("pipedream(2)", {"clip_norm": 0.4}, "PT1535"),
        ("backup_workers(backups=0)", {"clip_norm": 0.4}, "PT1538"),
        ("backup_workers(backups=0)", {"balance": "speed"}, "PT1539"),
        ("local_sgd(period=2)", {"balance": "speed", "accumulate": 2}, "PT1542"),
    ],
)
def test_refused_with_weights(strategy: str, options: dict[str, Any], code: str) -> None:
    with pytest.raises(Incompatible, match=code):
        pt.simulate(PAIRS, strategy, 2, steps=1, batch_size=4, **options)
