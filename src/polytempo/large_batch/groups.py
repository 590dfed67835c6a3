"""Which parameters decay, and which begin at zero, when a batch is large."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from fnmatch import fnmatch
from typing import Any

import torch
from torch import nn


def decayed(model: nn.Module | Iterable[nn.Parameter], weight_decay: float) -> list[dict[str, Any]]:
    """Parameter groups for any optimizer: weights decay; biases, and what else has one dimension or none, do not.

        torch.optim.SGD(decayed(model, 1e-4), lr=0.1, momentum=0.9)

    Instead of the model its parameters may be given, as a job's `optimizer` has them. Errors: ValueError for a
    negative decay.

    Source: P. Goyal et al., "Accurate, large minibatch SGD", 2017, section 5.1: not on the gains of batch norm; X. Jia
    et al., 2018, not on biases either.
    """
    if not 0 <= weight_decay < float("inf"):
        raise ValueError(f"weight_decay must be a number of at least 0, got {weight_decay!r}")
    parameters = model.parameters() if isinstance(model, nn.Module) else model
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    return [
        {"params": [p for p in trained if p.ndim > 1], "weight_decay": weight_decay},
        {"params": [p for p in trained if p.ndim <= 1], "weight_decay": 0.0},
    ]


@torch.no_grad()
def zero_gains_(model: nn.Module, *patterns: str) -> Sequence[str]:
    """Set to 0 the gains of the norms whose names match, such as "*.bn2": each residual block begins as the identity.

    Returns their names. Errors: ValueError where a pattern matches no module with a gain.
    Source: P. Goyal et al., 2017, section 5.1.
    """
    weights = {name: getattr(module, "weight", None) for name, module in model.named_modules()}
    gains = {name: gain for name, gain in weights.items() if isinstance(gain, nn.Parameter) and gain.ndim == 1}
    found = []
    for pattern in patterns:
        chosen = [name for name in gains if fnmatch(name, pattern)]
        if not chosen:
            raise ValueError(f"no norm of this model is called {pattern!r}; with a gain: {', '.join(gains) or 'none'}")
        for name in chosen:
            gains[name].zero_()
        found += chosen
    return found
