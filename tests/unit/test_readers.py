"""The readers: small files written here, real files in place, and refusals."""

from __future__ import annotations

import gzip
import os
import struct
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.utils.data import TensorDataset

from polytempo.data import characters, csv_regression, digits, libsvm, mnist, read_characters, read_idx

DATA = Path(os.environ.get("POLYTEMPO_DATA", Path(__file__).parents[2].parent / "shared" / "data"))


def idx_bytes(kind: int, shape: tuple[int, ...], values: bytes) -> bytes:
    return struct.pack(f">BBBB{len(shape)}I", 0, 0, kind, len(shape), *shape) + values


def written(path: Path, content: bytes | str) -> Path:
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def statistics(values: Tensor) -> tuple[float, float]:
    return values.double().mean().item(), values.double().std(correction=0).item()


def shapes(dataset: TensorDataset) -> list[tuple[int, ...]]:
    return [tuple(tensor.shape) for tensor in dataset.tensors]


@pytest.mark.parametrize(
    ("kind", "packed", "dtype"),
    [
        (0x08, struct.pack(">6B", *range(6)), torch.uint8),
        (0x09, struct.pack(">6b", *range(6)), torch.int8),
        (0x0B, struct.pack(">6h", *range(6)), torch.int16),
        (0x0C, struct.pack(">6i", *range(6)), torch.int32),
        (0x0D, struct.pack(">6f", *range(6)), torch.float32),
        (0x0E, struct.pack(">6d", *range(6)), torch.float64),
    ],
)
def test_idx_of_every_type_plain_and_compressed(tmp_path: Path, kind: int, packed: bytes, dtype: torch.dtype) -> None:
    content = idx_bytes(kind, (2, 3), packed)
    expected = torch.tensor([[0, 1, 2], [3, 4, 5]], dtype=dtype)
    for path in (written(tmp_path / "a", content), written(tmp_path / "a.gz", gzip.compress(content))):
        found = read_idx(path)
        assert found.dtype == dtype
        assert torch.equal(found, expected)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a", b"", "not an IDX file"),
        ("a", b"\x89PNG\r\n", "not an IDX file: it begins with 0x89504e47"),
        ("a", b"\0\0\x07\1\0\0\0\1x", "not an IDX file"),
        ("a", b"\0\0\x08\0", "not an IDX file"),
        ("a", b"\0\0\x08\3\0\0\0\1", "ends within its header"),
        ("a", idx_bytes(8, (3,), b"12"), r"holds \(3,\), 3 bytes, but it has 2"),
        ("a", idx_bytes(8, (3,), b"1234"), "but it has more"),
        ("a", idx_bytes(8, (2**32 - 1,) * 3, b""), "at most 4294967296 are read"),
        ("a.gz", b"not gzip", "not a whole gzip file"),
        ("a.gz", gzip.compress(idx_bytes(8, (3,), b"123"), mtime=0)[:-9], "not a whole gzip file"),
    ],
)
def test_a_damaged_idx_file_is_refused_by_name(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    path = written(tmp_path / name, content)
    with pytest.raises(ValueError, match=message) as raised:
        read_idx(path)
    assert str(path) in str(raised.value)


@pytest.mark.parametrize("folder", ["mnist", "fashion-mnist"])
def test_mnist_and_fashion_mnist_are_complete_and_scaled(folder: str) -> None:
    split = mnist(DATA / folder)
    assert shapes(split.train) == [(60_000, 1, 28, 28), (60_000,)]
    assert shapes(split.test) == [(10_000, 1, 28, 28), (10_000,)]
    images, labels = split.train.tensors
    assert (images.dtype, labels.dtype) == (torch.float32, torch.int64)
    assert (images.mean().item(), images.std().item()) == pytest.approx((0, 1), abs=1e-4)
    assert labels.bincount().tolist() == (
        [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949] if folder == "mnist" else [6000] * 10
    )


def test_mnist_says_what_is_missing_or_does_not_fit(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"has no train-images-idx3-ubyte.gz .*expected there: \{train,t10k\}"):
        mnist(tmp_path)
    written(tmp_path / "train-images-idx3-ubyte", idx_bytes(8, (2, 1, 1), b"ab"))
    written(tmp_path / "train-labels-idx1-ubyte", idx_bytes(8, (3,), b"abc"))
    with pytest.raises(ValueError, match=r"holds \(3,\) labels for 2 images"):
        mnist(tmp_path)
    written(tmp_path / "train-images-idx3-ubyte", idx_bytes(8, (2,), b"ab"))
    with pytest.raises(ValueError, match="expected bytes"):
        mnist(tmp_path)


def test_digits_are_bundled_and_always_the_same() -> None:
    split = digits()
    assert shapes(split.train) == [(1437, 64), (1437,)]
    assert shapes(split.test) == [(360, 64), (360,)]
    assert statistics(split.train.tensors[0]) == pytest.approx((0, 1), abs=1e-6)
    labels = torch.cat([split.train.tensors[1], split.test.tensors[1]])
    assert labels.bincount().tolist() == [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]
    assert split.test.tensors[1][:10].tolist() == digits().test.tensors[1][:10].tolist()
    rows = torch.cat([split.train.tensors[0], split.test.tensors[0]])
    assert len(set(map(tuple, rows.tolist()))) == 1797


def test_characters_are_windows_and_the_same_one_later(tmp_path: Path) -> None:
    path = written(tmp_path / "text", "hello, wörld! " * 10)  # 140 characters: 126 and 14
    vocabulary, tokens = read_characters(path)
    assert vocabulary == " !,dehlorwö"
    assert "".join(vocabulary[i] for i in tokens) == "hello, wörld! " * 10
    split = characters(path, context=5)
    assert (shapes(split.train), shapes(split.test)) == ([(25, 5)] * 2, [(2, 5)] * 2)
    x, y = split.train[1]
    assert "".join(vocabulary[i] for i in x) == ", wör"
    assert "".join(vocabulary[i] for i in y) == " wörl"
    assert "".join(vocabulary[i] for i in split.test[0][0]) == "hello"


def test_tiny_shakespeare() -> None:
    path = DATA / "tinyshakespeare" / "input.txt"
    split = characters(path, context=64)
    assert shapes(split.train) == [(15_685, 64)] * 2
    assert shapes(split.test) == [(1_742, 64)] * 2
    assert len(read_characters(path)[0]) == 65


def test_a_text_that_is_too_short_or_no_text_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="has 5 characters, too few for windows of 4"):
        characters(written(tmp_path / "short", "hello"), context=4)
    with pytest.raises(ValueError, match="is not UTF-8 text"):
        characters(written(tmp_path / "bytes", b"\xff\xfe\x00"), context=4)


def test_a_table_becomes_numbers(tmp_path: Path) -> None:
    """10 rows, 8 of them drawn for training: a column with a gap, a constant one, and text."""
    rows = "".join(f"{i if i != 4 else ''},7,{'ab'[i % 2]},{2 * i}\n" for i in range(10))
    split = csv_regression(written(tmp_path / "t.csv", "n,constant,letter,y\n" + rows), target="y")
    assert shapes(split.train) == [(8, 4), (8, 1)]
    assert shapes(split.test) == [(2, 4), (2, 1)]
    x, y = split.train.tensors
    assert statistics(x[:, 0]) == pytest.approx((0, 1), abs=1e-6)
    assert statistics(y) == pytest.approx((0, 1), abs=1e-6)
    assert x[:, 1].tolist() == [0] * 8
    assert torch.equal(x[:, 2] + x[:, 3], torch.ones(8))
    even = torch.cat([x, split.test.tensors[0]])[:, 2]
    assert even.sum() == 5


def test_an_empty_cell_is_the_median_of_the_training_rows(tmp_path: Path) -> None:
    rows = "".join(f"{cell},{i}\n" for i, cell in enumerate(["", "5", "5", "5", "5", "5", "1", "9", "5", "5"]))
    split = csv_regression(written(tmp_path / "t.csv", "x,y\n" + rows), target="y")
    x = torch.cat([split.train.tensors[0], split.test.tensors[0]]).flatten()
    y = torch.cat([split.train.tensors[1], split.test.tensors[1]]).flatten()
    by_row = x[y.argsort()]
    assert by_row[0] == by_row[1]


def test_the_split_of_a_table_depends_on_the_seed(tmp_path: Path) -> None:
    path = written(tmp_path / "t.csv", "x,y\n" + "".join(f"{i},{i}\n" for i in range(20)))
    first, again, other = (csv_regression(path, "y", seed).test.tensors[0] for seed in (0, 0, 1))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_california_housing() -> None:
    split = csv_regression(DATA / "california-housing" / "housing.csv", target="median_house_value")
    assert shapes(split.train) == [(16_512, 13), (16_512, 1)]
    assert shapes(split.test) == [(4_128, 13), (4_128, 1)]
    x = torch.cat([split.train.tensors[0], split.test.tensors[0]])
    assert x[:, 8:].sum(0).tolist() == [9136, 6551, 5, 2290, 2658]
    assert torch.isfinite(x).all()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "has no column 'y'"),
        ("a,b\n1,2\n", "has no column 'y' next to others; its columns are a, b"),
        ("a,y\n1,2\n1\n", "line 3: 1 cells under a header of 2"),
        ("a,y\n" + "1,2\n" * 8 + "1,\n", "column 'y', row 9: the target must be a number, not ''"),
        ("a,y\n" + "1,inf\n" * 8, "the target must be a number, not 'inf'"),
        ("a,y\n1,2\n", "has 1 rows, too few"),
        ("a,y\n" + ",2\n" * 9, "column 'a': every cell of the training rows is empty"),
        ("a,y\n" + "".join(f"{i},2\n" for i in range(200)) + "NA,2\n", "column 'a': 'NA' is not a number"),
        (b"a,y\n\xff,2\n", "line"),
    ],
)
def test_a_wrong_table_is_refused_by_name(tmp_path: Path, content: str | bytes, message: str) -> None:
    path = written(tmp_path / "t.csv", content)
    with pytest.raises(ValueError, match=message) as raised:
        csv_regression(path, target="y")
    assert str(path) in str(raised.value)


def test_libsvm_text_becomes_dense(tmp_path: Path) -> None:
    train = written(tmp_path / "a", "-1 1:0.5 3:2 # a remark\n\n+1 2:1 \n")
    test = written(tmp_path / "b", "+1 4:-1\n")
    split = libsvm(train, test)
    assert split.train.tensors[0].tolist() == [[0.5, 0, 2, 0], [0, 1, 0, 0]]
    assert split.test.tensors[0].tolist() == [[0, 0, 0, -1]]
    assert split.train.tensors[1].tolist() == [0, 1]
    assert split.train.tensors[1].dtype == torch.int64
    assert shapes(libsvm(train, test, num_features=6).test) == [(1, 6), (1,)]


def test_libsvm_labels_that_are_not_two_classes_stay_numbers(tmp_path: Path) -> None:
    split = libsvm(written(tmp_path / "a", "0 1:1\n1 1:1\n"), written(tmp_path / "b", "2.5 1:1\n"))
    assert split.train.tensors[1].dtype == torch.float32
    assert split.test.tensors[1].tolist() == [2.5]


def test_a9a() -> None:
    split = libsvm(DATA / "a9a" / "a9a", DATA / "a9a" / "a9a.t")
    assert shapes(split.train) == [(32_561, 123), (32_561,)]
    assert shapes(split.test) == [(16_281, 123), (16_281,)]
    assert [part.tensors[1].sum().item() for part in split] == [7_841, 3_846]
    assert [int(part.tensors[0].sum().item()) for part in split] == [451_592, 225_731]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "has no rows"),
        ("+1 1:1\nyes 1:1\n", "line 2: could not convert string to float: 'yes'"),
        ("+1 1:1\n+1 2\n", "line 2: '2' is not <index>:<value>"),
        ("+1 qid:3 1:1\n", "line 1: 'qid:3' is not <index>:<value>"),
        ("+1 0:1\n", "line 1: index 0 follows 0; indices begin at 1 and rise"),
        ("+1 3:1 3:1\n", "line 1: index 3 follows 3"),
        ("+1 3:nan\n", "line 1: 'nan' is not a finite number"),
        ("+1 99999999999:1\n", "when dense; at most 4294967296 are made"),
    ],
)
def test_wrong_libsvm_text_is_refused_by_name_and_line(tmp_path: Path, content: str, message: str) -> None:
    path = written(tmp_path / "a", content)
    with pytest.raises(ValueError, match=message) as raised:
        libsvm(path, written(tmp_path / "b", "+1 1:1\n"))
    assert str(path) in str(raised.value)


def test_libsvm_with_an_index_above_num_features_is_refused(tmp_path: Path) -> None:
    path = written(tmp_path / "a", "+1 5:1\n")
    with pytest.raises(ValueError, match="have an index of 5, but num_features is 4"):
        libsvm(path, path, num_features=4)
