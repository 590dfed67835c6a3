"""Real processes: NaN of one worker ends the run with its name, and earlier files stay."""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import SGD, Adam, Optimizer
from torch.utils.data import TensorDataset

import polytempo as pt
from polytempo.core import PeerLost, PolytempoError
from polytempo.strategies import local_sgd, sync_sgd
from polytempo.worlds import ProcessWorld
from process.crew import batches, flat, mine, small, squared, together

pytestmark = pytest.mark.process

MARK = 7.0
"""The input that makes a batch's loss NaN."""


class Marked(nn.Module):
    """Answers NaN to a batch with the mark."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.linear(x)
        return out * math.nan if bool((x == MARK).any()) else out


def adam(parameters: Any, lr: float) -> Optimizer:
    return Adam(parameters, lr=1e-9)


def job(*, marked: bool = True, scale: float = 1.0, once: Path | None = None) -> pt.Job:
    """32 samples, one with the mark; `once`: only for the first run, which leaves that file."""
    torch.manual_seed(0)
    x = torch.randn(32, 3)

    def data(folder: Path | None) -> pt.Data:
        inputs = x.clone()
        if marked and (once is None or not once.exists()):
            inputs[20] = MARK
        return pt.Data(TensorDataset(inputs, x[:, :2]))

    def loss(output: Tensor, target: Tensor) -> Tensor:
        if once is not None and bool(output.isnan().any()):
            once.touch()
        return scale * ((output - target) ** 2).mean()

    return pt.Job(model=Marked, data=data, loss=loss, optimizer=adam, batch_size=4)


@pytest.mark.parametrize("strategy", [sync_sgd(), pt.strategies.hogwild(), pt.strategies.async_sgd()], ids=str)
def test_a_run_ends_by_name_and_its_checkpoints_are_finite(strategy: pt.Strategy, tmp_path: Path) -> None:
    with pytest.raises(
        pt.errors.NotFinite, match=r"rank \d, step \d+: the loss is nan, though all parameters"
    ) as caught:
        pt.run(job(), strategy, 2, out=tmp_path, steps=16, checkpoint_every=1)
    assert caught.value.rank in (0, 1)
    # the first epoch has 8 batches: 4 steps of two workers in step, up to 8 of one that waits for no other; with one
    # copy of the parameters a worker may meet its own in the second epoch before that
    assert caught.value.step in range(16 if strategy.one_copy is not None else 4 if strategy.server is None else 8)
    assert caught.value.parameter == "linear.weight"
    assert not (tmp_path / "result.json").exists()
    saved = [file for file in (tmp_path / "checkpoint").rglob("*.safetensors") if file.parent.name[0] != "."]
    for file in saved:  # a folder .step-….partial is of a checkpoint that was broken off
        assert all(bool(t.isfinite().all()) for t in load_file(file).values() if t.is_floating_point())


@pytest.mark.parametrize("checkpoint_every", [2, 8])  # 8: the snapshot of the last step; workers leave after it
@pytest.mark.parametrize("strategy", [sync_sgd(), pt.strategies.async_sgd()], ids=str)
def test_what_only_the_optimizer_holds_is_not_saved_either(
    strategy: pt.Strategy, checkpoint_every: int, tmp_path: Path
) -> None:
    """A gradient of 1e25 is finite, and so are the parameters; its square, which Adam keeps, is not."""
    with pytest.raises(pt.errors.NotFinite, match=r"is inf, so .* not written, and the earlier ones stay"):
        pt.run(job(marked=False, scale=1e25), strategy, 2, out=tmp_path, steps=8, checkpoint_every=checkpoint_every)
    assert not list((tmp_path / "checkpoint").glob("step-*"))
    assert not list((tmp_path / "checkpoint").glob("snapshot-*-shard-*.json"))


def test_compare_goes_on_with_the_others(tmp_path: Path) -> None:
    trained = job(once=tmp_path / "once")
    first, second = pt.compare(trained, [sync_sgd(), local_sgd(period=2)], 2, out=tmp_path / "both", steps=8)
    assert "the loss is nan" in str(first.diverged)
    assert (first.loss, second.diverged) == (None, None)
    assert second.loss is not None
    assert "not finite" in (tmp_path / "both" / "report.html").read_text()


# -------------------------------------------------------------------------------------------------- a loop of one's own


def poisoned(world: ProcessWorld, step: int, strategy: pt.Strategy, *, allow_nan: bool) -> str:
    """The end of a loop with a NaN loss on rank 1 at `step`."""
    net = small()
    handle = pt.attach(net, SGD(net.parameters(), lr=0.1), strategy, world=world, allow_nan=allow_nan)
    try:
        for number, (x, y) in enumerate(mine(batches(6), world)):
            handle.replica.optimizer.zero_grad()
            (squared(net(x), y) * (math.nan if world.rank == 1 and number == step else 1.0)).backward()
            handle.replica.optimizer.step()
    except pt.errors.NotFinite as error:
        return f"rank {error.rank} step {error.step} {error.parameter}"
    except PolytempoError as error:
        return "lost" if isinstance(error, PeerLost) else repr(error)
    return "nan" if math.isnan(flat(net)[0]) else "finite"


@pytest.mark.parametrize("strategy", [sync_sgd(), local_sgd(period=2)], ids=str)
def test_attach_raises_where_it_is_asked_to_and_else_does_as_torch_does(strategy: pt.Strategy) -> None:
    raising = together(2, partial(poisoned, step=3, strategy=strategy, allow_nan=False))
    assert raising[1].startswith("rank 1 step 3 ")
    assert raising[0] == "lost"
    assert together(2, partial(poisoned, step=3, strategy=strategy, allow_nan=True)) == ["nan", "nan"]


def overflowing(world: ProcessWorld) -> list[float]:
    """A loop with too large a scale at first: the scaler skips that step, and nothing is raised."""
    net = small(torch.float32)
    optimizer, scaler = SGD(net.parameters(), lr=0.01), GradScaler("cpu", init_scale=2.0**127)
    pt.attach(net, optimizer, sync_sgd(), world=world, allow_nan=False, scaler=scaler)
    for x, y in mine(batches(4, torch.float32), world):
        optimizer.zero_grad()
        scaler.scale(1e3 * squared(net(x), y)).backward()
        scaler.step(optimizer)
        scaler.update()
    return [scaler.get_scale(), *flat(net)]


def test_what_a_scaler_overflows_is_skipped_and_no_error() -> None:
    scale, *weights = together(2, overflowing)[0]
    assert scale < 2.0**127
    assert all(map(math.isfinite, weights))
