"""Readers of data sets."""

from __future__ import annotations

from typing import NamedTuple

from torch.utils.data import TensorDataset


class Split(NamedTuple):
    """Samples to learn from and samples to measure with, as pairs of tensors (inputs, targets) in memory."""

    train: TensorDataset
    test: TensorDataset
