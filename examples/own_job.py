"""A job of your own: a training, apart from its distribution.

Everything in a `pt.Job` is a function, called in each worker. The same object runs on real processes, under
the virtual clock, and from the command line:

    python examples/own_job.py
    polytempo train examples/own_job.py:job --strategy 'diloco(period=16)' --workers 2
    polytempo simulate examples/own_job.py:job --workers 32 --cluster 'ethernet(gbit_per_s=1)'
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import polytempo as pt


def waves(path: Path | None) -> pt.Data:
    """Learn y = sin(3x) from noisy points. `path` is the value of `--data`; this job makes its own."""
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(2_500, 1, generator=generator) * 4 - 2
    y = torch.sin(3 * x) + 0.1 * torch.randn(x.shape, generator=generator)
    return pt.Data(TensorDataset(x[:2_000], y[:2_000]), TensorDataset(x[2_000:], y[2_000:]))


def close(output: Tensor, target: Tensor) -> Tensor:
    """True for right predictions: the prediction is within three standard deviations of the noise."""
    return (output - target).abs() < 0.3


def adam(parameters: Iterable[nn.Parameter], lr: float) -> torch.optim.Optimizer:
    """The optimizer that each worker steps with."""
    return torch.optim.Adam(parameters, lr=lr)


job = pt.Job(
    name="waves",
    model=lambda: nn.Sequential(nn.Linear(1, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1)),
    data=waves,
    loss=nn.functional.mse_loss,
    optimizer=adam,
    correct=close,
    lr=0.01,
    batch_size=50,
    epochs=10,
)

if __name__ == "__main__":
    result = pt.run(job, pt.strategies.local_sgd(period=4), workers=2)
    print(f"two processes: loss {result.loss:.3f}, {result.accuracy:.1%} close, {result.samples_per_s:,.0f} samples/s")
    result = pt.simulate(job, pt.strategies.local_sgd(period=4), workers=8, batch_size=12)
    print(f"eight virtual workers: loss {result.loss:.3f}, {result.accuracy:.1%} close")
