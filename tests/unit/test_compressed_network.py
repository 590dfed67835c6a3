"""The file of a compressed network: Huffman codes, shared values, bytes, and damaged files."""

from __future__ import annotations

import hashlib
import json
import math
import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

import polytempo as pt
from polytempo.compression.network import huffman
from polytempo.compression.network.network_file import MAGIC, KeptElements, from_bytes, to_bytes
from polytempo.compression.network.shared_values import SharedValues, shared_values

EXAMPLE = Path(__file__).parents[2] / "examples" / "compressed_network.py"


@pytest.mark.parametrize(
    ("counts", "lengths"),
    [
        ([], []),
        ([0, 7], [0, 1]),
        ([1, 1], [1, 1]),
        ([5, 2, 1, 1], [1, 2, 3, 3]),
        ([1, 1, 1, 1], [2, 2, 2, 2]),
        ([4, 0, 2, 1, 0, 1], [1, 0, 2, 3, 0, 3]),
    ],
)
def test_lengths_of_codes(counts: list[int], lengths: list[int]) -> None:
    assert huffman.code_lengths(counts) == lengths


def test_codes_count_up_by_length_and_symbol() -> None:
    """The table in the module's docstring: 10, 0, 110, 111."""
    assert huffman.encode(np.array([0, 1, 2, 3]), [2, 1, 3, 3]) == bytes([0b10011011, 0b10000000])


@pytest.mark.parametrize("seed", range(20))
def test_symbols_come_back_in_nearly_their_entropy(seed: int) -> None:
    drawn = random.Random(seed)
    weights = [drawn.random() ** 4 for _ in range(drawn.randrange(2, 60))]
    symbols = np.array(drawn.choices(range(len(weights)), weights, k=drawn.randrange(1, 500)))
    counts = np.bincount(symbols, minlength=len(weights)).tolist()
    lengths = huffman.code_lengths(counts)
    assert sum(2.0**-length for length in lengths if length) <= 1
    stream = huffman.encode(symbols, lengths)
    assert huffman.decode(stream, len(symbols), lengths).tolist() == symbols.tolist()
    entropy = sum(count * math.log2(len(symbols) / count) for count in counts if count)
    assert entropy <= 8 * len(stream) < entropy + len(symbols) + 8


def test_no_code_is_longer_than_16_bits() -> None:
    """Counts of Fibonacci would make codes of 29 bits."""
    counts = [1, 1]
    while len(counts) < 30:
        counts.append(counts[-1] + counts[-2])
    lengths = huffman.code_lengths(counts)
    assert max(lengths) <= huffman.LONGEST
    symbols = np.arange(30)
    assert huffman.decode(huffman.encode(symbols, lengths), 30, lengths).tolist() == symbols.tolist()


@pytest.mark.parametrize(
    ("stream", "count", "lengths"), [(b"\0", 9, [1]), (b"", 1, [1]), (b"\xff", 1, [1]), (b"\0", 3, [3])]
)
def test_a_stream_of_other_symbols_is_refused(stream: bytes, count: int, lengths: list[int]) -> None:
    with pytest.raises(ValueError, match="symbol"):
        huffman.decode(stream, count, lengths)


@pytest.mark.parametrize("lengths", [[1, 1, 1], [17], [0, 2, 1, 1]])
def test_lengths_of_no_code_are_refused(lengths: list[int]) -> None:
    with pytest.raises(ValueError, match="no prefix code"):
        huffman.decode(b"\0", 1, lengths)


# ------------------------------------------------------------------------------------------------------------- values


def test_values_are_shared_by_their_nearest_mean() -> None:
    found = shared_values(torch.tensor([1.0, 10.0, 1.5, 9.0, 1.25, -4.0]), 3)
    assert found.centroids.tolist() == [-4.0, 1.25, 9.5]
    assert found.members.tolist() == [1, 2, 1, 2, 1, 0]


@pytest.mark.parametrize("seed", range(5))
def test_no_mean_and_no_member_could_be_better(seed: int) -> None:
    """The end of Lloyd's rounds, in float64: a mean of its members, and each value with the nearest."""
    values = torch.randn(400, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    centroids, members = shared_values(values, 16)
    assert len(centroids) <= 16
    assert torch.equal(centroids, centroids.sort().values)
    for cluster, centroid in enumerate(centroids):
        assert float(centroid) == pytest.approx(float(values[members == cluster].mean()), abs=1e-12)
    nearest = (values[:, None] - centroids[None]).abs().argmin(dim=1)
    assert torch.equal(nearest, members)


@pytest.mark.parametrize("values", [[], [2.5], [2.5, 2.5, 2.5], [1.0, 2.0]])
def test_few_values_are_exact(values: list[float]) -> None:
    centroids, members = shared_values(torch.tensor(values), 8)
    assert centroids[members].tolist() == values
    assert len(centroids) == len(set(values))


# --------------------------------------------------------------------------------------------------------------- file


def drawn_network(seed: int = 3) -> tuple[dict[str, Tensor], dict[str, KeptElements]]:
    """Tensors of all kinds: shared ones with few weights, with none and with all, and exact ones."""
    g = torch.Generator().manual_seed(seed)
    tensors: dict[str, Tensor] = {
        "few": torch.zeros(40, 30),
        "far": torch.zeros(3, 2000),
        "none": torch.zeros(4, 4),
        "all": torch.zeros(5, 6, dtype=torch.float64),
        "bias": torch.randn(7, generator=g),
        "half": torch.randn(3, generator=g).half(),
        "count": torch.tensor(12),
        "empty": torch.zeros(0, 3),
        "on": torch.tensor([True, False]),
    }
    tensors["tied"] = tensors["few"]
    kept = {}
    for name, count in (("few", 90), ("far", 4), ("none", 0), ("all", 30)):
        flat = tensors[name].view(-1)
        places = torch.randperm(len(flat), generator=g)[:count].sort().values
        shared = shared_values(torch.randn(count, generator=g, dtype=flat.dtype), 8)
        flat[places] = shared.centroids[shared.members]
        kept[name] = KeptElements(places, shared)
    return tensors, kept


def same(found: dict[str, Tensor], tensors: dict[str, Tensor]) -> bool:
    equal = all(found[name].dtype == each.dtype and torch.equal(found[name], each) for name, each in tensors.items())
    return equal and list(found) == list(tensors)


def test_a_file_has_the_same_bits(tmp_path: Path) -> None:
    tensors, kept = drawn_network()
    content, sizes = to_bytes(tensors, kept)
    (tmp_path / "net").write_bytes(content)
    found = pt.training.compressed_model(tmp_path / "net")
    assert same(found, tensors)
    assert found["tied"] is found["few"]
    assert [(each.name, each.kept) for each in sizes if each.centroids] == [("few", 90), ("far", 4), ("all", 30)]
    header = int.from_bytes(content[8:12], "little")
    assert sum(each.num_bytes for each in sizes) + header + 12 == len(content)


def test_an_element_that_is_kept_may_be_zero() -> None:
    kept = KeptElements(torch.tensor([0, 2]), SharedValues(torch.tensor([0.0, 2.0]), torch.tensor([0, 1])))
    tensors = {"w": torch.tensor([[0.0, 0.0, 2.0]])}
    assert same(from_bytes(to_bytes(tensors, {"w": kept})[0], "it"), tensors)


def test_the_decoder_of_the_example_needs_no_library(tmp_path: Path) -> None:
    """In an interpreter that cannot import torch or polytempo; the same bits as our own."""
    tensors, kept = drawn_network()
    (tmp_path / "net").write_bytes(to_bytes(tensors, kept)[0])
    program = (
        "import sys, runpy, numpy, hashlib, json, pathlib\n"
        "sys.modules['torch'] = sys.modules['polytempo'] = None\n"
        f"decoded = runpy.run_path({str(EXAMPLE)!r})['decoded']\n"
        f"arrays = decoded(pathlib.Path({str(tmp_path / 'net')!r}).read_bytes())\n"
        "sums = {k: [v.dtype.str, v.shape, hashlib.sha256(v.tobytes()).hexdigest()] for k, v in arrays.items()}\n"
        "print(json.dumps(sums))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    expected = {
        name: [each.numpy().dtype.str, list(each.shape), hashlib.sha256(each.numpy().tobytes()).hexdigest()]
        for name, each in pt.training.compressed_model(tmp_path / "net").items()
    }
    assert json.loads(done.stdout) == expected


def test_another_dtype_is_refused() -> None:
    with pytest.raises(ValueError, match=r"w is of torch\.bfloat16"):
        to_bytes({"w": torch.zeros(2, dtype=torch.bfloat16)}, {})


def test_another_file_is_refused() -> None:
    with pytest.raises(ValueError, match="it is not a compressed network"):
        from_bytes(b"PK\3\4", "it")


@pytest.mark.parametrize("seed", range(4))
def test_a_damaged_file_is_refused_or_has_other_values(seed: int) -> None:
    """A flipped byte in values or streams may make other values; nothing but ValueError, and no wrong shapes."""
    tensors, kept = drawn_network(seed)
    content = to_bytes(tensors, kept)[0]
    drawn = random.Random(seed)
    for _ in range(300):
        changed = bytearray(content)
        changed[drawn.randrange(len(MAGIC), len(changed))] ^= 1 << drawn.randrange(8)
        try:
            found = from_bytes(bytes(changed), "it")
        except ValueError as error:
            assert "it is damaged" in str(error)  # noqa: PT017
        else:
            assert len(found) <= len(tensors)
    for length in range(len(MAGIC), len(content)):
        with pytest.raises(ValueError, match="it is damaged"):
            from_bytes(content[:length], "it")
    with pytest.raises(ValueError, match="bytes are left"):
        from_bytes(content + b"\0", "it")
