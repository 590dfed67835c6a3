"""Tensors that can lie in one vector."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor


def by_kind(tensors: Mapping[str, Tensor]) -> dict[tuple[torch.dtype, torch.device], dict[str, Tensor]]:
    """Tensors grouped by dtype and device, each group in its first appearance's order."""
    groups: dict[tuple[torch.dtype, torch.device], dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        groups.setdefault((tensor.dtype, tensor.device), {})[name] = tensor
    return groups
