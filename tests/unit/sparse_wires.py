"""Small tensors, and writing a wire of a few elements."""

from __future__ import annotations

import struct

import pytest
import torch
from torch import Tensor

from polytempo import compression as c
from polytempo.core import Codec

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
CODECS: list[Codec] = [
    c.threshold(0.5),
    c.threshold(0.5, density=0.1),
    c.top_k(0.3),
    c.top_k(0.3, entropy=True),
    c.random_k(0.3),
    c.prune(0.5),
]
every_codec = pytest.mark.parametrize("codec", CODECS, ids=lambda codec: codec.facts.name)


def t(*values: float, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.tensor(values, dtype=dtype)


def words(wire: Tensor) -> list[int]:
    return [word for (word,) in struct.iter_unpack("<I", bytes(wire.tolist()))]


def normal(n: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(n, generator=torch.Generator().manual_seed(seed)).to(dtype)
