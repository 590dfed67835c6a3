"""A trained network as a file of a few kilobytes, and a decoder of the file that needs only Python and NumPy.

    python examples/compressed_network.py                # trains, compresses, decodes
    python examples/compressed_network.py FILE           # decodes: name, shape and zeros of each tensor

`decoded` is the whole decoder: copy it into a program that has neither torch nor Polytempo.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

import numpy as np


def decoded(content: bytes) -> dict[str, np.ndarray]:
    """The arrays in the content of a file of `polytempo compress`, by name."""
    assert content[:8] == b"PTNET001", "not a compressed network"
    at, found = 12 + int.from_bytes(content[8:12], "little"), dict[str, np.ndarray]()

    def take(count: int, dtype: str = "|u1") -> np.ndarray:
        nonlocal at
        values = np.frombuffer(content, dtype, count, at)
        at += values.nbytes
        return values

    def symbols(stream: np.ndarray, count: int, lengths: np.ndarray) -> np.ndarray:
        """Canonical Huffman: codes count up in the order of (length, symbol), highest bit first."""
        names, code, before = dict[tuple[int, int], int](), 0, 0
        for length, symbol in sorted((int(n), s) for s, n in enumerate(lengths) if n):
            code <<= length - before
            names[length, code], code, before = symbol, code + 1, length
        out, length, code = list[int](), 0, 0
        for bit in np.unpackbits(stream).tolist():
            length, code = length + 1, code << 1 | bit
            if (length, code) in names and len(out) < count:
                out.append(names[length, code])
                length = code = 0
        return np.array(out, np.int64)

    for name, *entry in json.loads(content[12:at]):
        if len(entry) == 1:
            found[name] = found[entry[0]]  # another name of the same tensor
        elif len(entry) == 2:
            found[name] = take(int(np.prod(entry[0])), entry[1]).reshape(entry[0])
        else:
            shape, dtype, kept, clusters, gap_bits, num_gaps, gap_bytes, member_bytes = entry
            values, lengths, gap_lengths = take(clusters, dtype), take(clusters), take(1 << gap_bits)
            gaps = symbols(take(gap_bytes), num_gaps, gap_lengths)
            members = symbols(take(member_bytes), kept, lengths)
            ends = gaps < (1 << gap_bits) - 1  # the largest gap is followed by another gap, not by a weight
            places = (np.cumsum(gaps + ends) - 1)[ends] if num_gaps else np.arange(kept)
            flat = np.zeros(int(np.prod(shape)), dtype)
            flat[places] = values[members]
            found[name] = flat.reshape(shape)
    return found


def main() -> None:
    """Train the digits, compress the network, and decode the file."""
    import polytempo as pt

    with tempfile.TemporaryDirectory() as folder:
        trained = pt.run("digits", pt.strategies.sync_sgd(), workers=2, out=folder, epochs=6, checkpoint_every=100)
        small = pt.training.compress(pt.jobs.find("digits"), folder, keep=0.15, bits=4)
        arrays, ours = decoded(Path(small.file).read_bytes()), pt.training.compressed_model(small.file)
    assert small.after is not None
    print(f"{small.dense_bytes:,} bytes, accuracy {trained.accuracy:.1%}")
    print(f"{small.num_bytes:,} bytes, accuracy {small.after.accuracy:.1%}, {small.ratio:.1f} times smaller")
    print("decoded to the same bits:", all(arrays[name].tobytes() == ours[name].numpy().tobytes() for name in ours))


if __name__ == "__main__":
    if len(sys.argv) > 1:
        for name, array in decoded(Path(sys.argv[1]).read_bytes()).items():
            print(name, array.shape, f"{(array == 0).mean():.1%} zeros")
    else:
        main()
