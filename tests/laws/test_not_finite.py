"""Law: the rank that brings NaN ends the run by name, before another rank or the disk gets it; `allow_nan` goes on."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import polytempo as pt
from laws.catalogue import HELPED, ROWS, SERVED, Row, label
from laws.harness import OPTIMIZERS

WORKERS, BATCH, STEPS = 4, 4, 4
"""Every strategy of the catalogue can have so many workers."""
CULPRIT, BAD = 2, 2
"""The rank and its own step, both counted from 0."""


class Tripped(nn.Module):
    """A model of one worker which answers NaN in one forward pass, or has a gradient of NaN beside a finite loss."""

    def __init__(self, way: str = "") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(5, 7, dtype=torch.float64), nn.Linear(7, 3, dtype=torch.float64)
        self.way, self.passes = way, 0

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(self.first(x).tanh())
        if self.training and torch.is_grad_enabled():
            self.passes += 1
        if self.passes == BAD + 1 and self.way == "loss":
            return out * math.nan
        if self.passes == BAD + 1 and self.way == "gradient":
            return out + (0 * self.first.weight.sum()).sqrt()  # 0, and its derivative 0 · inf
        return out


def job(way: str, made: list[Tripped]) -> pt.Job:
    """A job with the run's own model first, and then the workers'."""

    def make() -> nn.Module:
        made.append(Tripped(way if len(made) - 1 == CULPRIT else ""))
        return made[-1]

    random = torch.Generator().manual_seed(0)
    x = torch.randn(WORKERS * BATCH * 4, 5, generator=random, dtype=torch.float64)
    return pt.Job(
        model=make,
        data=lambda folder: pt.Data(TensorDataset(x, x[:, :3].sin())),
        loss=lambda output, target: ((output - target) ** 2).mean(),
        optimizer=lambda parameters, lr: OPTIMIZERS["sgd"](parameters),
        batch_size=BATCH,
    )


def run(row: Row, way: str, out: Path | None = None, *, allow_nan: bool = False) -> pt.Result:
    options = {} if out is None else {"out": out, "checkpoint_every": 1}
    return pt.simulate(job(way, []), row.make(), WORKERS, steps=STEPS, allow_nan=allow_nan, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("row", "way"),
    [(row, "loss") for row in [*ROWS, *SERVED]] + [(row, "gradient") for row in [*ROWS, *SERVED[-1:]]],
    ids=lambda given: given if isinstance(given, str) else label(given),
)
def test_the_error_names_the_step_the_rank_and_the_parameter(row: Row, way: str) -> None:
    with pytest.raises(pt.errors.NotFinite, match=f"rank {CULPRIT}, step .*(nan|inf)") as caught:
        run(row, way)
    error = caught.value
    assert error.rank == CULPRIT
    assert error.parameter in ("first.weight", "first.bias", "last.weight", "last.bias")
    if row in ROWS:
        assert error.step == BAD
    else:
        assert error.step is not None  # the batch's number in the run: a free worker takes the next one
        assert 0 <= error.step < STEPS


@pytest.mark.parametrize("row", HELPED, ids=label)
def test_a_slice_of_a_batch_is_looked_at_by_whoever_computes_it(row: Row) -> None:
    with pytest.raises(pt.errors.NotFinite, match="the loss is nan") as caught:
        run(row, "loss")
    assert (caught.value.rank, caught.value.step is not None) == (CULPRIT, True)


def encodes(row: Row) -> bool:
    """True if a codec of the strategy has no code for NaN; a plain cast has one."""
    compressed = (
        "demo",
        "dgc",
        "dion",
        "distributed_lion",
        "ef21",
        "int8_sgd",
        "one_bit_sgd",
        "power_sgd",
        "qsgd",
        "sign_sgd",
        "sparse_loco",
    )
    compressed += ("terngrad", "threshold", "top_k", "zero_one_adam")
    return row.name.startswith(compressed) or "codec=feedback" in label(row)


@pytest.mark.parametrize("row", [row for row in [*ROWS, *SERVED, *HELPED] if not encodes(row)], ids=label)
def test_allow_nan_goes_on_to_the_end(row: Row) -> None:
    result = run(row, "loss", allow_nan=True)
    assert (result.steps, result.diverged) == (STEPS, None)


@pytest.mark.parametrize("row", [row for row in [*ROWS, *SERVED] if encodes(row)], ids=label)
def test_with_allow_nan_the_codec_that_cannot_encode_it_says_so(row: Row) -> None:
    with pytest.raises(pt.errors.NotFinite, match="cannot encode") as caught:
        run(row, "loss", allow_nan=True)
    assert caught.value.codec
    if row in ROWS and "codec=" not in label(row):
        assert caught.value.step == BAD


@pytest.mark.parametrize("allow_nan", [False, True])
@pytest.mark.parametrize("name", ["sync_sgd", "local_sgd", "gossip", "hogwild", "shared_memory", "diloco"])
def test_good_checkpoints_stay(name: str, allow_nan: bool, tmp_path: Path) -> None:
    """A run is saved after each step, and from the third on it holds NaN: the first two stay."""
    row = next(row for row in ROWS if row.name == name)
    if allow_nan:
        run(row, "loss", tmp_path, allow_nan=True)
    else:
        with pytest.raises(pt.errors.NotFinite):
            run(row, "loss", tmp_path)
    folders = sorted(folder.name for folder in (tmp_path / "checkpoint").glob("step-*"))
    assert folders == ["step-00000001", "step-00000002"]
    for file in (tmp_path / "checkpoint").glob("step-*/*.safetensors"):
        assert all(bool(tensor.isfinite().all()) for tensor in load_file(file).values())


@pytest.mark.parametrize("row", ROWS[:1], ids=label)
def test_looking_changes_no_bit(row: Row) -> None:
    looking, blind = (run(row, "", allow_nan=allow_nan) for allow_nan in (False, True))
    assert looking.trace_hash == blind.trace_hash
    assert looking.parameters_sha256 == blind.parameters_sha256
