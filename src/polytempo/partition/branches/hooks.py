"""Hooks of a module: code of the user's that runs with it."""

from __future__ import annotations

from torch import nn

HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def has_hooks(module: nn.Module) -> bool:
    """Whether there are some."""
    return any(getattr(module, name) for name in HOOKS)
