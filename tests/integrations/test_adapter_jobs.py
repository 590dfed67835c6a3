"""Models of peft in jobs: every layout of workers, bytes of the adapters alone, and exports that load without us."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import polytempo as pt
from polytempo.training.observe.trained_model import trained_model

FROZEN = 64 * 32 + 32 + 32 * 4 + 4
TRAINED = 2 * (64 + 32) + 2 * (32 + 4)


def base() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 4)).double()


def model() -> Any:
    found = get_peft_model(base(), LoraConfig(r=2, target_modules=["0", "2"]))  # type: ignore[arg-type]  # takes any module
    return found.double()


def job() -> pt.Job:
    x = torch.randn(32, 64, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    data = TensorDataset(x, x[:, :4].tanh())

    def optimizer(parameters: Any, lr: float) -> torch.optim.Optimizer:
        return torch.optim.SGD([p for p in parameters if p.requires_grad], lr=lr)

    return pt.Job(
        model=model,
        data=lambda folder: pt.Data(data, data),
        loss=nn.functional.mse_loss,
        optimizer=optimizer,
        lr=0.1,
        name="lora",
    )


@pytest.mark.parametrize(
    ("strategy", "workers"),
    [
        ("sync_sgd()", 2),
        ("local_sgd(period=2)", 2),
        ("shared_memory()", 2),
        ("async_sgd(shards=2)", 2),
        ("downpour()", 2),
        ("flexrr()", 2),
    ],
)
def test_adapters_alone_travel(strategy: str, workers: int, tmp_path: Path) -> None:
    """A step's bytes do not exceed a gradient there and parameters back, of the adapters, for each worker."""

    def sent(steps: int) -> int:
        given: dict[str, Any] = {"steps": steps, "batch_size": 4, "threads": 1, "out": tmp_path / str(steps)}
        return max([pt.simulate(job(), strategy, workers, **given).bytes_sent_per_rank])

    assert (sent(10) - sent(6)) / 4 <= 2 * 8 * TRAINED + 256 < 8 * FROZEN


def test_exports_load_without_us(tmp_path: Path) -> None:
    pt.simulate(job(), "local_sgd(period=2)", 2, steps=4, batch_size=4, checkpoint_every=4, threads=1, out=tmp_path)
    trained = trained_model(job(), tmp_path)
    x = torch.randn(5, 64, dtype=torch.float64)
    expected: Tensor = trained.model(x)
    again = PeftModel.from_pretrained(base(), str(trained.export("hf"))).double()  # type: ignore[arg-type]
    torch.testing.assert_close(again(x), expected)
    plain = base()
    plain.load_state_dict(load_file(str(trained.export("safetensors"))))
    torch.testing.assert_close(plain(x), expected)
    assert not torch.allclose(base()(x), expected)
    torch.testing.assert_close(trained.model(x), expected)
