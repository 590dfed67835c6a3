"""A text file as characters, to learn which one comes next."""

from __future__ import annotations

from pathlib import Path

import numpy
import torch
from torch import Tensor
from torch.utils.data import TensorDataset

from polytempo.data.readers import Split

MAX_BYTES = 1 << 30


def characters(path: Path, context: int) -> Split:
    """Windows of `context` characters: the first 90 % of the text to train on, the rest to test with.

    Sample i of a part is `text[i*context : (i+1)*context]` and the same window one character later,
    both int64 (context,): places in the text's vocabulary (all its characters, sorted).
    """
    _, tokens = read_characters(path)
    border = len(tokens) * 9 // 10
    train, test = windows(tokens[:border], context), windows(tokens[border:], context)
    if min(len(train), len(test)) == 0:
        raise ValueError(f"{path} has {len(tokens)} characters, too few for windows of {context} in both its parts")
    return Split(train, test)


def windows(tokens: Tensor, context: int) -> TensorDataset:
    """`tokens` (length,) as pairs of windows (N, context), the second one token later. Copies nothing."""
    num_windows = max(len(tokens) - 1, 0) // context
    length = num_windows * context
    inputs, targets = tokens[:length], tokens[1 : length + 1]
    return TensorDataset(inputs.view(num_windows, context), targets.view(num_windows, context))


def read_text(path: Path) -> str:
    """All characters of a UTF-8 file. ValueError for a file larger than `MAX_BYTES`, and for other bytes."""
    if path.stat().st_size > MAX_BYTES:
        raise ValueError(f"{path} has {path.stat().st_size} bytes; at most {MAX_BYTES} are read")
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text: {error}") from error


def read_characters(path: Path) -> tuple[str, Tensor]:
    """The vocabulary of a UTF-8 file (its characters, sorted) and the text as places in it, int64 (length,)."""
    codes = numpy.frombuffer(read_text(path).encode("utf-32-le"), numpy.uint32)
    found, places = numpy.unique(codes, return_inverse=True)
    return "".join(map(chr, found)), torch.from_numpy(places.astype(numpy.int64))
