"""Canonical Huffman codes, of at most 16 bits: a code is the list of its lengths.

lengths    symbol 0: 2   1: 1   2: 3   3: 3        0: the symbol does not occur
codes               10      0      110    111      counted up in the order of (length, symbol)
stream     the codes one behind the other, highest bit first, filled with zeros to a whole byte

Source: D. Huffman, "A method for the construction of minimum-redundancy codes", 1952.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

LONGEST = 16
_WINDOW_BYTES = 4
"""A code of 16 bits touches three bytes."""


def code_lengths(counts: Sequence[int]) -> list[int]:
    """The length of each symbol's code, for symbols that occur so often; of a single one 1.

    Σ counts · lengths is the least of all prefix codes, and at most Σ counts more than the entropy. Where a code would
    be longer than 16 bits, counts are halved until it is not: then it may be a little more than the least.
    Cost: S log S for S symbols.
    """
    lengths = _least_lengths(counts)
    while max(lengths, default=0) > LONGEST:
        counts = [count and max(1, count // 2) for count in counts]
        lengths = _least_lengths(counts)
    return lengths


def _least_lengths(counts: Sequence[int]) -> list[int]:
    """Join the two rarest groups again and again; of equally rare ones the first."""
    lengths = [0] * len(counts)
    groups = [(count, symbol, [symbol]) for symbol, count in enumerate(counts) if count]
    if len(groups) == 1:
        lengths[groups[0][1]] = 1
    heapq.heapify(groups)
    while len(groups) > 1:
        rare, _, few = heapq.heappop(groups)
        other, first, more = heapq.heappop(groups)
        for symbol in few + more:
            lengths[symbol] += 1
        heapq.heappush(groups, (rare + other, first, few + more))
    return lengths


def _codes(lengths: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """(symbol, length, code) in the order of codes. ValueError for lengths that no prefix code has."""
    code = before = 0
    for length, symbol in sorted((length, symbol) for symbol, length in enumerate(lengths) if length):
        code <<= length - before
        if length > LONGEST or code >> length:
            raise ValueError(f"no prefix code of up to {LONGEST} bits has the lengths {list(lengths)}")
        yield symbol, length, code
        code, before = code + 1, length


def encode(symbols: NDArray[np.int64], lengths: Sequence[int]) -> bytes:
    """The stream of `symbols` (n,). Memory: 17 bytes for each of its bits."""
    table = np.zeros(len(lengths), np.int64)
    for symbol, _, code in _codes(lengths):
        table[symbol] = code
    each = np.asarray(lengths, np.int64)[symbols]
    ends = np.repeat(np.cumsum(each), each)
    place = ends - 1 - np.arange(len(ends))
    return np.packbits(((np.repeat(table[symbols], each) >> place) & 1).astype(np.uint8)).tobytes()


def decode(stream: bytes, count: int, lengths: Sequence[int]) -> NDArray[np.int64]:
    """The `count` symbols of a stream. ValueError for a stream that is too short, or that no symbols have made.

    Cost: one look into a table of 2^longest entries for each symbol.
    """
    if not 0 <= count <= 8 * len(stream):
        raise ValueError(f"{count} symbols in {len(stream)} bytes")
    codes = list(_codes(lengths))
    longest = max(lengths, default=0)
    table = [(0, 0)] * (1 << longest)
    for symbol, length, code in codes:
        first = code << (longest - length)
        table[first : first + (1 << (longest - length))] = [(symbol, length)] * (1 << (longest - length))
    data, at, found = stream + bytes(_WINDOW_BYTES), 0, np.empty(count, np.int64)
    for i in range(count):
        byte = at >> 3
        window = int.from_bytes(data[byte : byte + _WINDOW_BYTES], "big") >> (8 * _WINDOW_BYTES - longest - (at & 7))
        symbol, length = table[window & ((1 << longest) - 1)]
        at += length
        if not length or at > 8 * len(stream):
            raise ValueError(f"a stream of {len(stream)} bytes ends, or has no code, at symbol {i} of {count}")
        found[i] = symbol
    return found
