"""Kernels of codecs in Triton: few passes over x and the residual, where torch makes one for each of its operations.

Each writes the bits of the codec's version in torch: products and sums are rounded one by one (launches switch fusing
off), and divisions are rounded to nearest. `compression/kernels/on_device.py` calls them.

Elements are counted in int32, so tensors have fewer than 2^31. has_residual: v = x + r, and r becomes v - decode(wire);
without it, r is not touched.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _value(x, r, i, inside, has_residual: tl.constexpr):
    v = tl.load(x + i, mask=inside, other=0.0)
    if has_residual:
        v += tl.load(r + i, mask=inside, other=0.0)
    return v


@triton.jit
def first_unfinite(x, r, n, firsts, has_residual: tl.constexpr, tile: tl.constexpr):
    """firsts[program] ← the first i of its tile where v is NaN or infinite; n where there is none."""
    i = tl.program_id(0) * tile + tl.arange(0, tile)
    v = _value(x, r, i, i < n, has_residual)
    tl.store(firsts + tl.program_id(0), tl.min(tl.where(tl.abs(v) < float("inf"), n, i), axis=0))


# ------------------------------------------------------------------ int8: a scale for each block


@triton.jit
def int8_encode(
    x,
    r,
    n,
    block,
    scales,
    codes,
    greatest: tl.constexpr,
    least: tl.constexpr,
    has_residual: tl.constexpr,
    rows: tl.constexpr,
    columns: tl.constexpr,
):
    """scale = max |v| / 127, code = v / scale to nearest even. A program has `rows` blocks."""
    row = tl.program_id(0) * rows + tl.arange(0, rows)
    most = tl.zeros([rows], tl.float32)
    for begin in range(0, block, columns):
        column = begin + tl.arange(0, columns)
        i = row[:, None] * block + column[None, :]
        v = _value(x, r, i, (column < block)[None, :] & (i < n), has_residual)
        most = tl.maximum(most, tl.max(tl.abs(v), axis=1))
    scale = tl.minimum(tl.div_rn(most, 127.0), greatest)
    scale = tl.where(scale < least, 0.0, scale)
    inverse = tl.where(scale > 0, tl.div_rn(1.0, tl.where(scale > 0, scale, 1.0)), 0.0)
    tl.store(scales + row, scale, mask=row * block < n)
    for begin in range(0, block, columns):
        column = begin + tl.arange(0, columns)
        i = row[:, None] * block + column[None, :]
        inside = (column < block)[None, :] & (i < n)
        v = _value(x, r, i, inside, has_residual)
        nearest = (v * inverse[:, None] + 12582912.0) - 12582912.0  # + 1.5 · 2^23 rounds to whole numbers
        code = tl.minimum(tl.maximum(nearest, -127.0), 127.0)
        tl.store(codes + i, code.to(tl.int8), mask=inside)
        if has_residual:
            tl.store(r + i, v - code * scale[:, None], mask=inside)


@triton.jit
def int8_add(scales, codes, block, out, n, tile: tl.constexpr):
    """Add scale · code to out."""
    i = tl.program_id(0) * tile + tl.arange(0, tile)
    inside = i < n
    scale = tl.load(scales + i // block, mask=inside, other=0.0)
    decoded = tl.load(codes + i, mask=inside, other=0).to(tl.float32) * scale
    tl.store(out + i, tl.load(out + i, mask=inside, other=0.0) + decoded, mask=inside)


# ------------------------------------------------------------------ one_bit: two means for each row


@triton.jit
def one_bit_sums(x, r, n, length, tiles, sums, has_residual: tl.constexpr, tile: tl.constexpr):
    """sums[program] ← sum of its negative values, sum of the others, number of the others. `tiles` programs a row."""
    row, part = tl.program_id(0) // tiles, tl.program_id(0) % tiles
    column = part * tile + tl.arange(0, tile)
    inside = column < length
    v = _value(x, r, row * length + column, inside, has_residual)
    wide, up = v.to(tl.float64), inside & (v >= 0)
    place = sums + 3 * tl.program_id(0)
    tl.store(place, tl.sum(tl.where(up, 0.0, wide), axis=0))
    tl.store(place + 1, tl.sum(tl.where(up, wide, 0.0), axis=0))
    tl.store(place + 2, tl.sum(up.to(tl.int32), axis=0).to(tl.float64))


@triton.jit
def one_bit_encode(x, r, length, tiles, means, words, has_residual: tl.constexpr, words_each: tl.constexpr):
    """Bit j % 32 of a row's word j / 32 is (v ≥ 0) of element j. A program has some words of one row."""
    row, part = tl.program_id(0) // tiles, tl.program_id(0) % tiles
    word, bit = part * words_each + tl.arange(0, words_each), tl.arange(0, 32)
    column = word[:, None] * 32 + bit[None, :]
    inside = column < length
    i = row * length + column
    v = _value(x, r, i, inside, has_residual)
    up = inside & (v >= 0)
    num_words = (length + 31) // 32
    packed = tl.sum(up.to(tl.int32) << bit[None, :], axis=1)
    tl.store(words + row * num_words + word, packed, mask=word < num_words)
    if has_residual:
        mean = tl.where(up, tl.load(means + 2 * row + 1), tl.load(means + 2 * row))
        tl.store(r + i, v - mean, mask=inside)


@triton.jit
def one_bit_add(means, words, out, length, n, tile: tl.constexpr):
    """Add the mean that each bit names to out."""
    i = tl.program_id(0) * tile + tl.arange(0, tile)
    inside = i < n
    row, column = i // length, i % length
    word = tl.load(words + row * ((length + 31) // 32) + column // 32, mask=inside, other=0)
    mean = tl.load(means + 2 * row + ((word >> (column % 32)) & 1), mask=inside, other=0.0)
    tl.store(out + i, tl.load(out + i, mask=inside, other=0.0) + mean, mask=inside)


# ------------------------------------------------------------------ qsgd: levels of a bucket's norm, drawn


@triton.jit
def _finalized(x, between):
    """lowbias32, as in `compression/encoding/draw.py`."""
    x = x ^ (x >> 16)
    x = x * 0x7FEB352D
    x = x ^ (x >> 15) ^ between
    x = x * tl.full([], 0x846CA68B, tl.uint32)
    return x ^ (x >> 16)


@triton.jit(do_not_specialize=["key_lower", "key_upper"])
def qsgd_encode(
    x,
    r,
    n,
    bucket,
    key_lower,
    key_upper,
    steps,
    codes,
    levels: tl.constexpr,
    most: tl.constexpr,
    has_residual: tl.constexpr,
    rows: tl.constexpr,
    columns: tl.constexpr,
):
    """steps ← ‖v‖₂ / levels of each bucket, rounded up to float32; codes (int32) ← drawn level + levels."""
    row = tl.program_id(0) * rows + tl.arange(0, rows)
    squares = tl.zeros([rows], tl.float64)
    for begin in range(0, bucket, columns):
        column = begin + tl.arange(0, columns)
        i = row[:, None] * bucket + column[None, :]
        v = _value(x, r, i, (column < bucket)[None, :] & (i < n), has_residual).to(tl.float64)
        squares += tl.sum(v * v, axis=1)
    exact = tl.minimum(tl.sqrt(squares) / tl.full([], levels, tl.float64), tl.full([], most, tl.float64))
    step = exact.to(tl.float32)
    above = (step.to(tl.int32, bitcast=True) + 1).to(tl.float32, bitcast=True)
    step = tl.where(step.to(tl.float64) < exact, above, step)
    tl.store(steps + row, step, mask=row * bucket < n)
    whole = tl.where(step == 0, 1.0, step)
    for begin in range(0, bucket, columns):
        column = begin + tl.arange(0, columns)
        i = row[:, None] * bucket + column[None, :]
        inside = (column < bucket)[None, :] & (i < n)
        v = _value(x, r, i, inside, has_residual)
        place = tl.div_rn(tl.abs(v), tl.broadcast_to(whole[:, None], v.shape))
        below = tl.floor(place)
        grains = ((place - below) * 1073741824.0).to(tl.uint32)
        draw = _finalized(i.to(tl.uint32) ^ key_lower.to(tl.uint32), key_upper.to(tl.uint32))
        level = tl.minimum(below.to(tl.int32) + (grains > (draw >> 2)).to(tl.int32), levels)
        level = tl.where(v < 0, -level, level)
        tl.store(codes + i, level + levels, mask=inside)
        if has_residual:
            tl.store(r + i, v - level.to(tl.float32) * step[:, None], mask=inside)


@triton.jit
def _lanes(block, n, positions: tl.constexpr):
    """The number of lanes of a block of fields: 16, and of the last as few as hold the rest."""
    rest = tl.minimum(n - block * positions * 16, positions * 16)
    return (rest + positions - 1) // positions


@triton.jit
def pack(
    codes,
    n,
    words,
    num_words,
    width: tl.constexpr,
    positions: tl.constexpr,
    words_per_lane: tl.constexpr,
    tile: tl.constexpr,
):
    """Codes of `width` bits into words of 32: the layout of `compression/encoding/fields.py`."""
    o = tl.program_id(0) * tile + tl.arange(0, tile)
    block, within = o // (words_per_lane * 16), o % (words_per_lane * 16)
    lanes = tl.maximum(_lanes(block, n, positions), 1)
    own, lane = within // lanes, within % lanes
    packed = tl.zeros([tile], tl.uint32)
    for position in tl.static_range(positions):
        i = block * (positions * 16) + position * lanes + lane
        code = tl.load(codes + i, mask=(o < num_words) & (i < n), other=0).to(tl.uint32)
        packed |= tl.where(own == position * width // 32, code << (position * width % 32), 0)
        if position * width % 32 + width > 32:
            packed |= tl.where(own == position * width // 32 + 1, code >> (32 - position * width % 32), 0)
    tl.store(words + o, packed.to(tl.int32, bitcast=True), mask=o < num_words)


@triton.jit
def qsgd_decode(
    steps,
    words,
    out,
    n,
    bucket,
    levels: tl.constexpr,
    width: tl.constexpr,
    positions: tl.constexpr,
    words_per_lane: tl.constexpr,
    add: tl.constexpr,
    tile: tl.constexpr,
):
    """Write level · step to out, or add it."""
    i = tl.program_id(0) * tile + tl.arange(0, tile)
    inside = i < n
    block, within = i // (positions * 16), i % (positions * 16)
    lanes = tl.maximum(_lanes(block, n, positions), 1)
    bit = within // lanes * width
    place, shift = words + block * (words_per_lane * 16) + bit // 32 * lanes + within % lanes, bit % 32
    lower = tl.load(place, mask=inside, other=0).to(tl.uint32, bitcast=True)
    code = lower >> shift.to(tl.uint32)
    if words_per_lane > 1:
        over = shift + width > 32
        upper = tl.load(place + lanes, mask=inside & over, other=0).to(tl.uint32, bitcast=True)
        code |= tl.where(over, upper << tl.where(over, 32 - shift, 0).to(tl.uint32), 0)
    level = (code & ((1 << width) - 1)).to(tl.int32) - levels
    found = level.to(tl.float32) * tl.load(steps + i // bucket, mask=inside, other=0.0)
    if add:
        found = tl.load(out + i, mask=inside, other=0.0) + found
    tl.store(out + i, found, mask=inside)


# ------------------------------------------------------------------ top_k: the k-th largest by radix


@triton.jit
def _magnitude(x, r, i, inside, has_residual: tl.constexpr):
    """The bits of |v|, which are in the order of |v|; beyond the tensor -1."""
    v = tl.abs(_value(x, r, i, inside, has_residual))
    return tl.where(inside, v.to(tl.int32, bitcast=True), -1)


@triton.jit
def count_digits(
    x,
    r,
    n,
    prefix,
    counts,
    shift: tl.constexpr,
    digit_bits: tl.constexpr,
    has_residual: tl.constexpr,
    tile: tl.constexpr,
):
    """counts[d] += elements with the digit d, of `digit_bits` bits from `shift` on, behind higher digits `prefix`."""
    i = tl.program_id(0) * tile + tl.arange(0, tile)
    bits = _magnitude(x, r, i, i < n, has_residual)
    same = (bits >= 0) & ((bits >> (shift + digit_bits)) == tl.load(prefix))
    found = tl.histogram((bits >> shift) & ((1 << digit_bits) - 1), 1 << digit_bits, mask=same)
    digit = tl.arange(0, 1 << digit_bits)
    tl.atomic_add(counts + digit, found, mask=found > 0)


@triton.jit
def count_chosen(x, r, n, least, above, equal, has_residual: tl.constexpr, tile: tl.constexpr):
    """Count the |v| of each program's tile that are above `least`, and that are equal to it."""
    i = tl.program_id(0) * tile + tl.arange(0, tile)
    bits, cut = _magnitude(x, r, i, i < n, has_residual), tl.load(least)
    tl.store(above + tl.program_id(0), tl.sum((bits > cut).to(tl.int32), axis=0))
    tl.store(equal + tl.program_id(0), tl.sum((bits == cut).to(tl.int32), axis=0))


@triton.jit
def collect(x, r, n, least, above, equal, ties, indices, values, has_residual: tl.constexpr, tile: tl.constexpr):
    """The elements above `least`, and the first `ties` of those equal to it; r ← v, and 0 where v was taken.

    `above` and `equal`: how many of them stand before each program's tile.
    """
    i = tl.program_id(0) * tile + tl.arange(0, tile)
    v, cut = _value(x, r, i, i < n, has_residual), tl.load(least)
    bits = tl.where(i < n, tl.abs(v).to(tl.int32, bitcast=True), -1)
    before, most = tl.load(equal + tl.program_id(0)), tl.load(ties)
    same = (bits == cut).to(tl.int32)
    taken = (bits > cut) | ((same > 0) & (before + tl.cumsum(same, axis=0) <= most))
    count = taken.to(tl.int32)
    place = tl.load(above + tl.program_id(0)) + tl.minimum(before, most) + tl.cumsum(count, axis=0) - count
    tl.store(indices + place, i, mask=taken)
    tl.store(values + place, v, mask=taken)
    if has_residual:
        tl.store(r + i, tl.where(taken, 0.0, v), mask=i < n)
