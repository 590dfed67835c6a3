"""16-bit parameters on real workers: the bits of the virtual world, runs that go on, loops of one's own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import polytempo as pt
from polytempo.core import Strategy
from polytempo.engines.local_engine import launch
from polytempo.engines.processes.worker import RankInfo
from polytempo.native.library import available
from polytempo.replay.replay import replay

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
        (pt.strategies.split(activations=pt.compression.int8(), gradients=pt.compression.int8()), "bf16"),
        (pt.strategies.split(activations=pt.compression.qsgd(127)), "fp16(loss_scale=64)"),
        (pt.strategies.hybrid("0", activations=pt.compression.int8(), gradients=pt.compression.int8()), "bf16"),
        (pt.strategies.hybrid("0, 2", "slices", activations=pt.compression.qsgd(127)), "fp16(loss_scale=64)"),
    ],
    ids=str,
)
def test_both_worlds_reach_the_same_bits(strategy: Strategy, precision: str) -> None:
    job, workers = pt.jobs.find("digits"), 2 if strategy.holders > 1 else 3
    real = pt.run(job, strategy, workers, steps=12, threads=1, precision=precision)
    virtual = pt.simulate(job, strategy, workers, pt.cluster.one_host(), steps=12, threads=1, precision=precision)
    if "route=native" in str(strategy) and not available():  # gloo rounds partial sums
        assert real.loss == pytest.approx(virtual.loss, rel=1e-3)
        return
    sent = "bytes_sent_per_rank" if strategy.parted is None else "layers"
    for figure in ("parameters_sha256", "loss", "accuracy", sent, "precision"):
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
    plain.load_state_dict(pt.training.checkpoint_model(tmp_path / "whole"))
    assert {tensor.dtype for tensor in plain.state_dict().values()} == {torch.float32}
    assert any(not torch.equal(tensor, tensor.bfloat16().float()) for tensor in plain.state_dict().values())


def test_a_run_of_16_bits_goes_on_in_float32(tmp_path: Path) -> None:
    job, out = pt.jobs.find("digits"), tmp_path / "run"
    pt.run(job, pt.strategies.sync_sgd(), 2, out=out, steps=8, precision="bf16")
    assert pt.run(job, pt.strategies.sync_sgd(), 2, out=out, steps=16, resume=True).steps == 16


def test_ranks_in_a_loop_of_their_own() -> None:
    """Ranks agree on skipped steps, on the norm, and on the model; the loop scores their mean."""

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
        with pytest.raises(pt.errors.Mismatch) as error:
            pt.attach(net, torch.optim.SGD(net.parameters(), lr=0.1), precision="bf16" if world.rank else None)
        return str(error.value)

    assert all("precision" in told and "bf16" in told for told in launch(work, 2))


def test_a_split_model_shows_and_takes_its_masters() -> None:
    """A user's loop: the whole parameters are float32, more than 16 bits hold."""

    def work(rank_info: RankInfo) -> list[Any]:
        pt.init(quiet=True, mesh={"model": 2})
        torch.manual_seed(0)
        net = pt.split(nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)), {"0": "column", "2": "row"})
        optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
        handle = pt.attach(net, optimizer, precision="bf16")
        for _ in range(3):
            optimizer.zero_grad()
            net(torch.ones(8, 4)).square().mean().backward()
            optimizer.step()
        whole, gradients = net.full_parameters(), net.full_gradients()
        dtypes = {str(tensor.dtype) for tensor in whole.values()}, {str(g.dtype) for g in gradients.values()}
        rounded = all(torch.equal(tensor, tensor.bfloat16().float()) for tensor in whole.values())
        net.load_full_parameters({name: tensor + 1e-4 for name, tensor in whole.items()})
        again = net.full_parameters()
        taken = all(torch.equal(again[name], tensor + 1e-4) for name, tensor in whole.items())
        low = net.get_parameter("2.bias")
        assert low.dtype == torch.bfloat16
        assert torch.equal(low, again["2.bias"].bfloat16())
        handle.detach()
        return [sorted(dtypes[0]), sorted(dtypes[1]), rounded, taken, {n: t.tolist() for n, t in again.items()}]

    first, second = launch(work, 2)
    assert first == second
    assert first[:4] == [["torch.float32"], ["torch.bfloat16"], False, True]


def test_a_checkpoint_of_parts_holds_the_masters(tmp_path: Path) -> None:
    job, strategy = pt.jobs.find("digits"), pt.strategies.split(activations=pt.compression.int8())
    options: dict[str, Any] = {"checkpoint_every": 4, "threads": 1, "precision": "bf16"}
    whole = pt.run(job, strategy, 2, out=tmp_path / "whole", steps=8, **options)
    pt.run(job, strategy, 2, out=tmp_path / "halves", steps=4, **options)
    again = pt.run(job, strategy, 2, out=tmp_path / "halves", steps=8, resume=True, **options)
    assert again.parameters_sha256 == whole.parameters_sha256
    saved = pt.training.checkpoint_model(tmp_path / "whole")
    assert {tensor.dtype for tensor in saved.values()} == {torch.float32}
    assert any(not torch.equal(tensor, tensor.bfloat16().float()) for tensor in saved.values())


@pytest.mark.parametrize("name", ["async_sgd", "downpour(push_every=3, pull_every=3, optimizer='job')", "easgd"])
def test_workers_of_a_server_compute_in_16_bits_and_can_be_replayed(name: str, tmp_path: Path) -> None:
    job, strategy = pt.jobs.find("digits"), pt.parse_strategy(name)
    low = pt.run(job, strategy, 2, epochs=2, threads=1, out=tmp_path, precision="bf16")
    assert low.accuracy is not None
    assert low.accuracy > 0.2, "chance is 0.1; the order of updates is another one each time"
    assert low.precision is not None
    assert low.precision["parameter_bytes"] == low.precision["master_bytes"] / 2
    again = replay(tmp_path, job, strategy)
    assert (again.difference, again.parameters_sha256) == (None, low.parameters_sha256)
