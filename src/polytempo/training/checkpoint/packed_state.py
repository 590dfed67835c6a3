"""Tensors by name, and plain values, as one message: safetensors in `bytes`, without pickle."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import torch
from safetensors.torch import load, save
from torch import Tensor

_ABOUT = "about"
"""The tensor of bytes that holds the plain values as JSON."""


def packed(tensors: Mapping[str, Tensor], about: Mapping[str, Any]) -> bytes:
    """The message of `tensors` and of `about`, which JSON can hold."""
    text = torch.frombuffer(bytearray(json.dumps(dict(about)).encode()), dtype=torch.uint8)
    found = {**tensors, _ABOUT: text}
    message: bytes = save({name: each.detach().cpu().contiguous().clone() for name, each in found.items()})
    return message


def unpacked(message: bytes) -> tuple[dict[str, Tensor], Any]:
    """The tensors and the plain values of a message."""
    tensors: dict[str, Tensor] = load(message)
    return tensors, json.loads(tensors.pop(_ABOUT).numpy().tobytes())
