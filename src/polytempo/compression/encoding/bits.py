"""Rows of bits, 32 in a word, and what two numbers for each row lose."""

from __future__ import annotations

import torch
from torch import Tensor

WORD = 32
_MOST = torch.finfo(torch.float32).max


def words_per_row(row_length: int) -> int:
    """Rows begin with a new word."""
    return -(-row_length // WORD)


def packed(bits: Tensor) -> Tensor:
    """bool (num_rows, row_length) as uint8 (num_rows, 4 · words_per_row): bit j % 8 of byte j / 8 is element j."""
    num_rows, length = bits.shape
    num_bytes = words_per_row(length) * WORD // 8
    eights = torch.nn.functional.pad(bits.to(torch.uint8), (0, 8 * num_bytes - length)).view(num_rows, num_bytes, 8)
    return (eights << torch.arange(8, dtype=torch.uint8, device=bits.device)).sum(2, dtype=torch.uint8)


def unpacked(words: Tensor, num_rows: int, row_length: int) -> Tensor:
    """The bools of `packed`."""
    num_bytes = words_per_row(row_length) * WORD // 8
    eights = words.view(num_rows, num_bytes, 1) >> torch.arange(8, dtype=torch.uint8, device=words.device)
    return (eights & 1).view(num_rows, 8 * num_bytes)[:, :row_length].bool()


def to_float(numbers: Tensor) -> Tensor:
    """As float32, in which what is finite stays so."""
    return numbers.clamp(-_MOST, _MOST).float()


def bits_loss(row_length: int, like: Tensor) -> float:
    """‖x - x̂‖² ≤ loss · ‖x‖², when x̂ is the projection of a row on its classes, rounded to a float."""
    dtype = like.dtype if like.dtype in (torch.float16, torch.bfloat16) else torch.float32
    return 1 - (1 - torch.finfo(dtype).eps ** 2) / max(1, row_length)
