"""16-bit parameters on real workers: the bits of the virtual world, runs that go on, loops of one's own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import polytempo as pt
from polytempo.core import Strategy
from polytempo.engines.launch import launch
from polytempo.engines.worker import RankInfo
from polytempo.native.library import available

pytestmark = pytest.mark.process

DYNAMIC = "fp16(loss_scale=dynamic)"


@pytest.mark.parametrize(
    ("strategy", "precision"),
    [
        (pt.strategies.sync_sgd(), "bf16"),  # added in float32 by the native core, and rounded once
        (pt.strategies.sync_sgd(), DYNAMIC),
        (pt.strategies.top_k_sgd(0.1, exact_below=0), DYNAMIC),
        (pt.strategies.local_sgd(period=3, route=pt.collectives.ring), "bf16"),
        (pt.strategies.gpipe(2, 2, activations=pt.compression.int8()), "bf16"),
    ],
    ids=str,
)
def test_both_worlds_reach_the_same_bits(strategy: Strategy, precision: str) -> None:
    job, workers = pt.jobs.find("digits"), 2 if strategy.stages > 1 else 3
    real = pt.run(job, strategy, workers, steps=12, threads=1, precision=precision)
    virtual = pt.simulate(job, strategy, workers, pt.cluster.one_host(), steps=12, threads=1, precision=precision)
    if "route=native" in str(strategy) and not available():  # gloo rounds partial sums
        assert real.loss == pytest.approx(virtual.loss, rel=1e-3)
        return
    for figure in ("parameters_sha256", "loss", "accuracy", "bytes_sent_per_rank", "precision"):
        assert getattr(real, figure) == getattr(virtual, figure), figure


@pytest.mark.parametrize("precision", ["bf16", DYNAMIC])
@pytest.mark.parametrize("strategy", [pt.strategies.one_bit_sgd(), pt.strategies.local_sgd(period=3)], ids=str)
def test_a_run_goes_on_to_the_same_bits(strategy: Strategy, precision: str, tmp_path: Path) -> None:
    def run(folder: str, steps: int, **more: Any) -> pt.Result:
        job, options = pt.jobs.find("digits"), {"steps": steps, "checkpoint_every": 7, "threads": 1}
        return pt.run(job, strategy, 2, out=tmp_path / folder, precision=precision, **{**options, **more})

    whole = run("whole", 14)
    run("halves", 7)
    assert run("halves", 14, resume=True).parameters_sha256 == whole.parameters_sha256
    plain = pt.jobs.find("digits").model()
    plain.load_state_dict(pt.checkpoint_model(tmp_path / "whole"))
    assert {tensor.dtype for tensor in plain.state_dict().values()} == {torch.float32}
    assert any(not torch.equal(tensor, tensor.bfloat16().float()) for tensor in plain.state_dict().values())


def test_a_run_of_16_bits_goes_on_in_float32(tmp_path: Path) -> None:
    job, out = pt.jobs.find("digits"), tmp_path / "run"
    pt.run(job, pt.strategies.sync_sgd(), 2, out=out, steps=8, precision="bf16")
    assert pt.run(job, pt.strategies.sync_sgd(), 2, out=out, steps=16, resume=True).steps == 16


def test_ranks_in_a_loop_of_their_own() -> None:
    """They agree on what to skip, on the norm, and on the model; the loop scores their mean."""

    def work(rank_info: RankInfo) -> tuple[list[float], list[float], float, int]:
        world = pt.init(quiet=True)
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
        optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
        handle = pt.attach(
            net, optimizer, pt.strategies.local_sgd(period=2), precision=pt.precision("fp16", loss_scale="dynamic")
        )
        random = torch.Generator().manual_seed(world.rank)
        for step in range(6):
            optimizer.zero_grad()
            spike = 1e4 if step == 2 and world.rank == 1 else 1.0
            loss = net(torch.randn(8, 4, generator=random)).square().mean() * spike
            handle.scaled(loss).backward()
            norm = handle.clip_grad_norm_(1.0)
            optimizer.step()
        with handle.consensus():
            agreed = net.state_dict()["0.weight"].flatten().tolist()
        masters = handle.replica.masters
        assert masters is not None
        return net.state_dict()["0.weight"].flatten().tolist(), agreed, float(norm), masters.scaling.skipped

    (mine, mean, _, skipped), (theirs, other, _, same) = launch(work, 2)
    assert mine == theirs == mean == other, "after six steps of a period of two they have met"
    assert skipped == same == 1


def test_ranks_that_disagree_are_told() -> None:
    def work(rank_info: RankInfo) -> str:
        world = pt.init(quiet=True)
        net = nn.Linear(2, 2)
        with pytest.raises(pt.Mismatch) as error:
            pt.attach(net, torch.optim.SGD(net.parameters(), lr=0.1), precision="bf16" if world.rank else None)
        return str(error.value)

    assert all("precision" in told and "bf16" in told for told in launch(work, 2))
