"""Hyper-parameters and other settings as JSON can hold them, and back in the types that they had."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def plain(value: Any, name: str) -> Any:
    """`value` as JSON can hold it: tensors of one number become numbers, tuples lists, and integer keys text.

    Raises ValueError that calls anything else by its `name`.
    """
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Tensor) and value.numel() == 1 and not value.is_complex():
        return value.item()
    if isinstance(value, list | tuple):
        return [plain(part, f"{name}[{i}]") for i, part in enumerate(value)]
    if isinstance(value, dict) and all(isinstance(key, str | int) and not isinstance(key, bool) for key in value):
        return {str(key): plain(part, f"{name}[{key!r}]") for key, part in value.items()}
    shown = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
    raise ValueError(
        f"{name} is {shown}, which JSON cannot hold, so it can be neither saved nor sent to other ranks; use numbers, "
        "texts, lists or dicts there, or leave it out of what state_dict() returns"
    )


def typed(value: Any, like: Any) -> Any:
    """`value`, read from JSON, in the types of `like`, its counterpart in a fresh object.

    Tensors have the dtype and device of `like`, tuples stay tuples, and dicts of integers (as a Counter) keep their
    class and their keys. A value without a counterpart comes back as JSON had it.
    """
    if isinstance(like, Tensor) and isinstance(value, bool | int | float):
        return torch.as_tensor(value, dtype=like.dtype, device=like.device).reshape(like.shape)
    if isinstance(like, dict) and isinstance(value, dict):
        return _dict_like(like, value)
    if isinstance(like, list | tuple) and isinstance(value, list):
        likes = like if len(like) == len(value) else [like[0] if like else None] * len(value)
        parts = [typed(part, other) for part, other in zip(value, likes, strict=True)]
        if isinstance(like, tuple):
            return type(like)(*parts) if hasattr(like, "_fields") else tuple(parts)
        return parts
    return value


def _dict_like(like: dict[Any, Any], value: dict[str, Any]) -> dict[Any, Any]:
    numbered = any(isinstance(key, int) for key in like)
    keyed = {int(key) if numbered else key: part for key, part in value.items()}
    other = like.copy()  # its class, and other attributes of a class of dicts
    other.clear()
    other.update({key: typed(part, like.get(key)) for key, part in keyed.items()})
    return other


def written(value: Any) -> Any:
    """An option as JSON can hold it; of other values, the type."""
    try:
        return plain(value, "")
    except ValueError:
        return type(value).__name__
