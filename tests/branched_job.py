"""A job with a model of two branches, each worth a thread, with dropout and batch norm in both."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn

import polytempo as pt


class WideTowers(nn.Module):
    """Two towers on the bundled digits."""

    def __init__(self) -> None:
        super().__init__()
        self.towers = nn.ModuleList(
            nn.Sequential(nn.Linear(64, 256), nn.BatchNorm1d(256), nn.ReLU(inplace=True), nn.Dropout(0.2))
            for _ in range(2)
        )
        self.scores = nn.Linear(512, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Shapes (samples, 64) and (samples, 10)."""
        scores: Tensor = self.scores(torch.cat([tower(x) for tower in self.towers], dim=1))
        return scores


class Undecided(WideTowers):
    """Tracing fails."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x if x.sum() > 0 else -x)


def _data(path: Path | None) -> pt.Data:
    return pt.Data(*pt.data.digits())


def _job(model: type[nn.Module]) -> pt.Job:
    return pt.Job(
        model=model,
        data=_data,
        loss=nn.functional.cross_entropy,
        optimizer=lambda parameters, lr: torch.optim.SGD(parameters, lr=lr, momentum=0.9),
        correct=lambda output, target: output.argmax(dim=1) == target,
        batch_size=64,
        name=model.__name__,
    )


job = _job(WideTowers)
undecided = _job(Undecided)
