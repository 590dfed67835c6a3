"""Codes of a few bits, and single bits, in words of 32: the layouts of native/codes_drawn.h and codes_dense.h.

block    codes 0…15 | 16…31 | 32…47 | …    `positions` rows of 16
lane j   codes j, 16 + j, 32 + j, …        from the lowest bit on, in `words` words of 32 bits; then zeros
memory   word 0 of lanes 0…15 | word 1 of lanes 0…15 | …

The last block has as few lanes as hold the rest, so n codes take `words` · (16 · ⌊n / block⌋ + ⌈rest / positions⌉)
words.
"""

from __future__ import annotations

from math import gcd

import torch
from torch import Tensor

from polytempo.native.kernels.codes_drawn import Fields

LANES = 16


def dense_fields(width: int) -> Fields:
    """Fields without a bit between codes: 8 of 4 bits in a word, 32 of 3 bits in three words."""
    shared = gcd(width, 32)
    return Fields(width, 32 // shared, width // shared)


def whole_fields(width: int) -> Fields:
    """Each code in one word, so that words can be added as numbers: 10 of 3 bits, and two bits of zeros."""
    return Fields(width, 32 // width, 1)


def num_words(fields: Fields, count: int) -> int:
    """Words of 32 bits for so many codes."""
    blocks, rest = divmod(count, fields.positions * LANES)
    return fields.words * (LANES * blocks + -(-rest // fields.positions))


def packed(fields: Fields, codes: Tensor) -> Tensor:
    """int32 words of int64 codes, both flat."""
    whole = codes.numel() - codes.numel() % (fields.positions * LANES)
    rest = codes[whole:]
    lanes = -(-rest.numel() // fields.positions)
    padded = rest.new_zeros(fields.positions * lanes)
    padded[: rest.numel()] = rest
    return torch.cat([_packed(fields, codes[:whole], LANES), _packed(fields, padded, lanes)])


def unpacked(fields: Fields, words: Tensor, count: int) -> Tensor:
    """`count` codes (int64, flat) of int32 words."""
    whole = num_words(fields, count - count % (fields.positions * LANES))
    rest = words[whole : num_words(fields, count)]
    lanes = rest.numel() // fields.words
    return torch.cat([_unpacked(fields, words[:whole], LANES), _unpacked(fields, rest, lanes)])[:count]


def _packed(fields: Fields, codes: Tensor, lanes: int) -> Tensor:
    rows = codes.view(-1, fields.positions, max(lanes, 1))
    words = rows.new_zeros(rows.shape[0], fields.words + 1, max(lanes, 1))
    for position in range(fields.positions):
        word, shift = divmod(position * fields.width, 32)
        shifted = rows[:, position] << shift
        words[:, word] |= shifted & 0xFFFFFFFF
        words[:, word + 1] |= shifted >> 32
    unsigned = words[:, : fields.words].reshape(-1)
    return torch.where(unsigned >= 2**31, unsigned - 2**32, unsigned).to(torch.int32)


def _unpacked(fields: Fields, words: Tensor, lanes: int) -> Tensor:
    rows = words.view(-1, fields.words, max(lanes, 1)).to(torch.int64) & 0xFFFFFFFF
    codes = []
    for position in range(fields.positions):
        word, shift = divmod(position * fields.width, 32)
        code = rows[:, word] >> shift
        if shift + fields.width > 32:
            code = code | rows[:, word + 1] << (32 - shift)
        codes.append(code & ((1 << fields.width) - 1))
    return torch.stack(codes, dim=1).reshape(-1)


# ------------------------------------------------------------------ single bits, in rows of whole words

WORD = 32
_MOST = torch.finfo(torch.float32).max


def words_per_row(row_length: int) -> int:
    """Rows begin with a new word."""
    return -(-row_length // WORD)


def packed_bits(bits: Tensor) -> Tensor:
    """bool (num_rows, row_length) as uint8 (num_rows, 4 · words_per_row): bit j % 8 of byte j / 8 is element j."""
    num_rows, length = bits.shape
    num_bytes = words_per_row(length) * WORD // 8
    eights = torch.nn.functional.pad(bits.to(torch.uint8), (0, 8 * num_bytes - length)).view(num_rows, num_bytes, 8)
    return (eights << torch.arange(8, dtype=torch.uint8, device=bits.device)).sum(2, dtype=torch.uint8)


def unpacked_bits(words: Tensor, num_rows: int, row_length: int) -> Tensor:
    """The bools of `packed_bits`."""
    num_bytes = words_per_row(row_length) * WORD // 8
    eights = words.view(num_rows, num_bytes, 1) >> torch.arange(8, dtype=torch.uint8, device=words.device)
    return (eights & 1).view(num_rows, 8 * num_bytes)[:, :row_length].bool()


def to_float(numbers: Tensor) -> Tensor:
    """Round to float32; finite numbers stay finite."""
    return numbers.clamp(-_MOST, _MOST).float()


def bits_loss(row_length: int, like: Tensor) -> float:
    """‖x - x̂‖² ≤ loss · ‖x‖², when x̂ is the projection of a row on its classes, rounded to a float."""
    dtype = like.dtype if like.dtype in (torch.float16, torch.bfloat16) else torch.float32
    return 1 - (1 - torch.finfo(dtype).eps ** 2) / max(1, row_length)
