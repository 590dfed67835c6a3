"""Fine-tuning by LoRA: frozen parameters are constants, in every strategy.

Frozen parameters beside trained ones:   the same operations, bytes and bits as with constants in their place
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import polytempo as pt
from laws.catalogue import ROWS, SERVED, Row
from polytempo import strategies as s
from polytempo.runs.frame import run_page
from some_cases import some_of

BASE = torch.randn(7, 5, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
HEAD = torch.randn(3, 7, generator=torch.Generator().manual_seed(4), dtype=torch.float64)


class Adapted(nn.Module):
    """x W' + x A' B', with W frozen; `constant`: W is a tensor, not a parameter. LoRA (E. Hu et al., 2021)."""

    def __init__(self, base: Tensor, rank: int, constant: bool) -> None:
        super().__init__()
        rows, columns = base.shape
        if constant:
            self.register_buffer("base", base.clone(), persistent=False)
        else:
            self.base = nn.Parameter(base.clone(), requires_grad=False)
        self.down = nn.Linear(columns, rank, bias=False, dtype=torch.float64)
        self.up = nn.Linear(rank, rows, bias=False, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x @ self.base.T + self.up(self.down(x))
        return y


def net(constant: bool) -> nn.Module:
    return nn.Sequential(Adapted(BASE, 2, constant), nn.Tanh(), Adapted(HEAD, 2, constant))


def trained(net: nn.Module) -> dict[str, Tensor]:
    return {name: p for name, p in net.named_parameters() if p.requires_grad}


def job(constant: bool) -> pt.Job:
    inputs = torch.randn(48, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    data = TensorDataset(inputs, torch.stack([inputs.sum(1).sin(), inputs[:, 0], inputs[:, 1] ** 2], dim=1))

    def optimizer(parameters: Any, lr: float) -> torch.optim.Optimizer:
        held = list(parameters)
        groups = [[p for p in held if p.requires_grad], [p for p in held if not p.requires_grad]]
        return torch.optim.SGD([{"params": each} for each in groups], lr=0.05, momentum=0.9)

    return pt.Job(
        model=lambda: net(constant),
        data=lambda folder: pt.Data(data, data),
        loss=nn.functional.mse_loss,
        optimizer=optimizer,
        name="adapters",
    )


@pytest.fixture(autouse=True)
def _without_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_page, "write_report", lambda *_, **__: None)


LAYOUTS = [
    *(("gpipe(2, 2)", 4), ("interleaved(2, 2, parts=1)", 2), ("zero_bubble(2, 2)", 2), ("pipedream(2)", 2)),
    *(("ddg(2)", 2), ("one_f_one_b(2, 2, inner=downpour(2, 2))", 4), ("shared_memory()", 3)),
    *((s.split({"0.down": "column", "0.up": "row"}, parts=2), 4), ('hybrid("2.up")', 3)),
]


@pytest.mark.parametrize(("strategy", "workers"), LAYOUTS, ids=str)
def test_frozen_parameters_of_parts_are_constants(strategy: Any, workers: int) -> None:
    """The same of stages, split layers, one copy and hybrids."""
    given: dict[str, Any] = {"threads": 1, "steps": 4, "batch_size": 8}
    frozen, constant = (pt.simulate(job(each), strategy, workers, **given) for each in (False, True))
    assert frozen.bytes_sent_per_rank == constant.bytes_sent_per_rank
    assert (frozen.train_loss, frozen.loss) == (constant.train_loss, constant.loss)


@pytest.mark.parametrize("row", some_of(ROWS + SERVED, 0, of=4), ids=lambda row: str(row.make()))
def test_frozen_parameters_are_constants(row: Row, tmp_path: Any) -> None:
    """The same bytes in the same time, the same losses; frozen parameters keep their bits, saved ones too."""
    saving: dict[str, Any] = {"threads": 1} if row in SERVED else {"threads": 1, "checkpoint_every": 8}
    found = [
        pt.simulate(job(constant), row.make(), 3, steps=8, batch_size=4, out=tmp_path / str(constant), **saving)
        for constant in (False, True)
    ]
    assert found[0].bytes_sent_per_rank == found[1].bytes_sent_per_rank
    assert (found[0].seconds, found[0].train_loss, found[0].loss) == (
        found[1].seconds,
        found[1].train_loss,
        found[1].loss,
    )
    if row not in SERVED:
        frozen, constant = (pt.training.checkpoint_model(tmp_path / str(each)) for each in (False, True))
        assert torch.equal(frozen.pop("0.base"), BASE)
        assert torch.equal(frozen.pop("2.base"), HEAD)
        assert all(torch.equal(frozen[name], tensor) for name, tensor in constant.items())
        assert frozen.keys() == constant.keys()


@pytest.mark.process
@pytest.mark.parametrize(
    "strategy",
    ["sync_sgd()", "local_sgd(period=2)", "bf16_sgd()", "top_k_sgd(ratio=0.25, exact_below=0)", "diloco(period=3)"],
)
@pytest.mark.parametrize("train", [pt.run, pt.simulate], ids=["processes", "simulated"])
def test_trained_parameters_alone_travel(train: Any, strategy: str) -> None:
    """Six steps send the bytes that `explain` counts for the trained parameters."""

    def sent(steps: int) -> int:
        found: pt.Result = train(job(False), strategy, 2, steps=steps, batch_size=2, threads=1)
        return found.bytes_sent_per_rank

    def counted(parameters: dict[str, Tensor]) -> float:
        return sum(pt.explain(strategy, 2, parameters).at(step).busiest_bytes for step in range(5, 11))

    assert sent(10) - sent(4) == counted(trained(net(False))) < counted(dict(net(False).named_parameters()))
