"""Jobs that want their cores divided differently: towers of several kinds, a wide perceptron, small convolutions."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import polytempo as pt

_SAMPLES = 2048


class TwoTowers(nn.Module):
    """Two towers of small operations on one input, which meet in the last layer."""

    def __init__(self, width: int = 384, depth: int = 6) -> None:
        super().__init__()
        self.towers = nn.ModuleList(
            nn.Sequential(nn.Linear(64, width), nn.Tanh(), *(each for _ in range(depth) for each in _layer(width)))
            for _ in range(2)
        )
        self.scores = nn.Linear(2 * width, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Shapes (samples, 64) and (samples, 10)."""
        scores: Tensor = self.scores(torch.cat([tower(x) for tower in self.towers], dim=1))
        return scores


class WideTowers(nn.Module):
    """Two towers of wide layers on one input, which meet in the last layer."""

    def __init__(self, width: int = 1024, depth: int = 4) -> None:
        super().__init__()
        self.towers = nn.ModuleList(
            nn.Sequential(*(each for at in range(depth) for each in (nn.Linear(width if at else 64, width), nn.ReLU())))
            for _ in range(2)
        )
        self.scores = nn.Linear(2 * width, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Shapes (samples, 64) and (samples, 10)."""
        scores: Tensor = self.scores(torch.cat([tower(x) for tower in self.towers], dim=1))
        return scores


class RecurrentTowers(nn.Module):
    """Two recurrent layers that read one sequence of pieces of the input, as encoders of two languages do."""

    def __init__(self, width: int = 256, length: int = 32) -> None:
        super().__init__()
        self.length = length
        self.towers = nn.ModuleList(nn.GRU(64 // length, width, batch_first=True) for _ in range(2))
        self.scores = nn.Linear(2 * width, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Shapes (samples, 64) and (samples, 10)."""
        pieces = x.unflatten(1, (self.length, -1))
        scores: Tensor = self.scores(torch.cat([tower(pieces)[0][:, -1] for tower in self.towers], dim=1))
        return scores


class Mixed(nn.Module):
    """Blocks of four branches of convolutions, as in GoogLeNet."""

    def __init__(self, blocks: int = 3) -> None:
        super().__init__()
        self.begin = nn.Conv2d(1, 32, 3, padding=1)
        self.blocks = nn.ModuleList(
            nn.ModuleList(
                nn.Sequential(nn.Conv2d(32, 8, size, padding=size // 2), nn.BatchNorm2d(8), nn.ReLU(inplace=True))
                for size in (1, 3, 3, 5)
            )
            for _ in range(blocks)
        )
        self.scores = nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Shapes (samples, 64) and (samples, 10)."""
        x = torch.relu(self.begin(x.unflatten(1, (1, 8, 8))))
        for block in self.blocks:
            x = torch.cat([branch(x) for branch in block], dim=1)
        scores: Tensor = self.scores(x.mean((2, 3)))
        return scores


def _layer(width: int) -> tuple[nn.Module, ...]:
    return nn.Linear(width, width), nn.LayerNorm(width), nn.Tanh()


def _wide() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 2048), nn.ReLU(), nn.Linear(2048, 2048), nn.ReLU(), nn.Linear(2048, 10))


def _data(path: Path | None) -> pt.Data:
    drawn = torch.Generator().manual_seed(0)
    images = torch.randn(_SAMPLES, 64, generator=drawn)
    return pt.Data(TensorDataset(images, torch.randint(10, (_SAMPLES,), generator=drawn)))


def _job(name: str, model: type[nn.Module], batch_size: int = 64) -> pt.Job:
    return pt.Job(
        model=model,
        data=_data,
        loss=nn.functional.cross_entropy,
        optimizer=lambda parameters, lr: torch.optim.SGD(parameters, lr=lr),
        lr=0.01,
        batch_size=batch_size,
        name=name,
    )


towers = _job("towers", TwoTowers)
wide_towers = _job("wide_towers", WideTowers, batch_size=128)
recurrent = _job("recurrent", RecurrentTowers)
wide = _job("wide", _wide)  # type: ignore[arg-type]
mixed = _job("mixed", Mixed)
