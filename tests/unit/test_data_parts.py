"""A data set in parts: complete parts are read from any file system; unfinished or changed ones are refused."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import numpy
import pytest

import polytempo as pt
from polytempo.data.readers.parts import PartWriter, read_parts, start_folder, write_index


def rows(first: int, count: int) -> tuple[numpy.ndarray, numpy.ndarray]:
    numbers = numpy.arange(first, first + count)
    return numpy.stack([numbers, -numbers], axis=1).astype(numpy.float32), numbers.astype(numpy.int64)


def written(folder: str, counts: list[int], rows_per_part: int = 4) -> str:
    """Rows 0, 1, 2, … by one writer for each of `counts`."""
    place, entries, first = start_folder(folder), [], 0
    for number, count in enumerate(counts):
        writer = PartWriter(place, f"part-{number:05d}-7", rows_per_part)
        writer.add(*rows(first, count))
        entries += writer.finish()
        first += count
    write_index(place, entries)
    return place


@pytest.mark.parametrize("where", ["path", "memory"])
def test_rows_come_back_in_order(where: str, tmp_path: Path) -> None:
    folder = str(tmp_path / "set") if where == "path" else f"memory://{tmp_path.name}"
    found = pt.data.read_parts(written(folder, [3, 0, 9]))
    inputs, targets = found.tensors
    assert (targets.dtype, inputs.dtype) == (pt.data.read_parts(folder).tensors[1].dtype, inputs.dtype)
    expected = rows(0, 12)
    assert numpy.array_equal(inputs.numpy(), expected[0])
    assert numpy.array_equal(targets.numpy(), expected[1])


def test_a_part_has_at_most_so_many_rows_however_they_come(tmp_path: Path) -> None:
    writer = PartWriter(start_folder(tmp_path), "p", 4)
    for first, count in ((0, 1), (1, 6), (7, 0), (7, 2)):
        writer.add(*rows(first, count))
    entries = writer.finish()
    assert [entry["rows"] for entry in entries] == [4, 4, 1]
    write_index(str(tmp_path), entries)
    assert read_parts(tmp_path).tensors[1].tolist() == list(range(9))


def test_a_second_attempt_changes_nothing(tmp_path: Path) -> None:
    """A task that failed has left files under its own name; the index does not name them."""
    place = start_folder(tmp_path)
    for attempt, count in (("1", 2), ("2", 4)):
        writer = PartWriter(place, f"part-00000-{attempt}")
        writer.add(*rows(0, count))
        entries = writer.finish()
    write_index(place, entries)
    assert read_parts(tmp_path).tensors[1].tolist() == [0, 1, 2, 3]
    assert len(list(tmp_path.glob("*.npy"))) == 4


def test_a_finished_folder_is_not_written_to(tmp_path: Path) -> None:
    written(str(tmp_path), [2])
    with pytest.raises(ValueError, match="holds a data set already"):
        start_folder(tmp_path)


def test_what_is_not_finished_or_changed_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"holds no index\.json"):
        read_parts(tmp_path)
    with pytest.raises(ValueError, match="without rows"):
        write_index(str(tmp_path), [])
    written(str(tmp_path), [3, 3])
    inputs = next(tmp_path.glob("part-00001*.inputs.npy"))
    good = inputs.read_bytes()
    inputs.write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
    with pytest.raises(ValueError, match=r"is not the written file: its SHA-256 differs"):
        read_parts(tmp_path)
    inputs.unlink()
    with pytest.raises(ValueError, match=r"lacks part-00001-7-00000\.inputs\.npy"):
        read_parts(tmp_path)


WRONG = [
    (b"{", "is not an index"),
    (b"[]", "is not an index"),
    (b'{"version": 2, "parts": []}', "of version 1"),
    (b'{"version": 1, "parts": []}', "of version 1"),
    (b'{"version": 1, "parts": [{"rows": 1}]}', "of version 1"),
]


@pytest.mark.parametrize(("content", "message"), WRONG)
def test_an_index_is_checked(content: bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / "index.json").write_bytes(content)
    with pytest.raises(ValueError, match=message):
        read_parts(tmp_path)


def test_an_index_names_no_file_of_another_folder(tmp_path: Path) -> None:
    place = written(str(tmp_path / "set"), [1])
    index = json.loads((tmp_path / "set" / "index.json").read_text())
    index["parts"][0]["inputs"]["name"] = "../outside.npy"
    (tmp_path / "set" / "index.json").write_text(json.dumps(index))
    with pytest.raises(ValueError, match="is not a file of that folder"):
        read_parts(place)


def test_arrays_of_objects_are_not_read(tmp_path: Path) -> None:
    place = written(str(tmp_path), [1])
    index = json.loads((tmp_path / "index.json").read_text())
    file = tmp_path / index["parts"][0]["inputs"]["name"]
    numpy.save(file, numpy.array([{}], dtype=object), allow_pickle=True)
    index["parts"][0]["inputs"]["sha256"] = hashlib.sha256(file.read_bytes()).hexdigest()
    (tmp_path / "index.json").write_text(json.dumps(index))
    with pytest.raises(ValueError, match="allow_pickle"):
        read_parts(place)


def test_parts_that_do_not_fit_are_named(tmp_path: Path) -> None:
    place, entries = start_folder(tmp_path), []
    for number, width in enumerate((2, 3)):
        writer = PartWriter(place, f"p{number}")
        writer.add(numpy.zeros((1, width), numpy.float32), numpy.zeros(1, numpy.int64))
        entries += writer.finish()
    with pytest.raises(
        ValueError, match=r"different types or shapes: float32\[2\], int64\[\]; float32\[3\], int64\[\]"
    ):
        write_index(place, entries)
    assert not (tmp_path / "index.json").exists()
    with pytest.raises(ValueError, match="1 inputs and 2 targets"):
        PartWriter(place, "p").add(numpy.zeros((1, 2)), numpy.zeros(2))
    with pytest.raises(ValueError, match="rows_per_part is 0"):
        PartWriter(place, "p", 0)
