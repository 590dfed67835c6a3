"""Sources of streams: any ranges of any shard equal a plain read, from every file format and filesystem.

`make test-integrations` runs this file, too: there is pyarrow.
"""

from __future__ import annotations

import gzip
import io
import json
import pickle
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from polytempo import data
from polytempo.data.streams.sharded_data import ShardedData, runs_of
from polytempo.data.streams.sources import kept_index, marked_files, stream_files

COUNTS = (7, 0, 31, 1)
"""Samples of the files."""


@pytest.fixture(autouse=True)
def _small(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Marks every 64 bytes, and a cache folder of the test's own that keeps every index."""
    monkeypatch.setattr(marked_files, "MARK_BYTES", 64)
    monkeypatch.setattr(marked_files, "KEPT_FROM_BYTES", 0)
    monkeypatch.setenv("POLYTEMPO_CACHE", str(tmp_path_factory.mktemp("cache")))
    yield
    memory = fsspec.filesystem("memory")
    memory.store.clear()


def tar(samples: list[dict[str, bytes]], names: list[str]) -> bytes:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w") as archive:
        for sample, name in zip(samples, names, strict=True):
            for extension, content in sample.items():
                member = tarfile.TarInfo(f"{name}.{extension}")
                member.size = len(content)
                archive.addfile(member, io.BytesIO(content))
    return stream.getvalue()


def lines(first: int, count: int) -> bytes:
    return "".join(
        f'{{"n": {number}, "text": "{"é" * (number % 9)}"}}\n' for number in range(first, first + count)
    ).encode()


def parquet_file(first: int, count: int) -> bytes:
    arrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    stream = io.BytesIO()
    numbers = list(range(first, first + count))
    columns = {"n": arrow.array(numbers, arrow.int64()), "text": arrow.array([str(number) for number in numbers])}
    parquet.write_table(arrow.table(columns), stream, row_group_size=5)
    return stream.getvalue()


def archive(first: int, count: int) -> bytes:
    numbers = range(first, first + count)
    return tar(
        [{"cls": str(n).encode(), "bin": b"x" * (n * 37 % 700)} for n in numbers], [f"a/{n:04d}" for n in numbers]
    )


FORMATS: dict[str, tuple[str, Callable[[int, int], bytes], Callable[..., ShardedData], str]] = {
    "jsonl": ("jsonl", lines, data.json_lines, "n"),
    "jsonl.gz": ("jsonl.gz", lambda first, count: gzip.compress(lines(first, count)), data.json_lines, "n"),
    "parquet": ("parquet", parquet_file, data.parquet, "n"),
    "tar": ("tar", archive, data.webdataset, "cls"),
    "tar.gz": ("tar.gz", lambda first, count: gzip.compress(archive(first, count)), data.webdataset, "cls"),
}


def written(folder: str, form: str) -> ShardedData:
    """The source of numbered samples in files of `COUNTS`."""
    ending, write, source, column = FORMATS[form]
    first = 0
    for place, count in enumerate(COUNTS):
        with fsspec.open(f"{folder}/part-{place}.{ending}", "wb") as file:
            file.write(write(first, count))
        first += count
    return source(f"{folder}/part-*.{ending}", as_tuple=(column,))


def numbers(samples: Any) -> list[int]:
    return [int(sample[0]) for sample in samples]


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("place", ["path", "memory"])
def test_every_sample_once(form: str, place: str, tmp_path: Path) -> None:
    source = written(str(tmp_path) if place == "path" else "memory://corpus", form)
    assert numbers(source) == list(range(sum(COUNTS)))
    assert sum(source.counts) == len(source) == sum(COUNTS)


@pytest.mark.parametrize("form", FORMATS)
@given(chosen=st.lists(st.sets(st.integers(0, 30)), min_size=1, max_size=3))
def test_ranges_are_those_of_a_plain_read(form: str, chosen: list[set[int]], tmp_path_factory: Any) -> None:
    source = written("memory://ranges", form)
    plain = [list(source.read(shard, [range(count)])) for shard, count in enumerate(source.counts)]
    for shard, rows in enumerate(plain):
        for numbers_ in chosen:
            wanted = sorted(number for number in numbers_ if number < len(rows))
            found = list(source.read(shard, runs_of(wanted)))
            assert numbers(map(source.decode, found)) == numbers(source.decode(rows[number]) for number in wanted)


@pytest.mark.parametrize("workers", [3, 8])
@pytest.mark.parametrize("form", ["jsonl", "tar"])
def test_workers_read_the_bytes_once(form: str, workers: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond the data they read ends of stretches: buffers and marks, which are small here."""
    ending, write, source, column = FORMATS[form]
    count, read, size = 300, list[int](), 0
    for part in range(6):
        content = write(part * count, count)
        (tmp_path / f"part-{part}.{ending}").write_bytes(content)
        size += len(content)

    class Counted(io.FileIO):
        def readinto(self, buffer: Any) -> int:
            read.append(found := super().readinto(buffer) or 0)
            return found

    found = source(str(tmp_path / f"part-*.{ending}"), as_tuple=(column,)).shuffled(buffer=16, interleave=2)
    monkeypatch.setattr(stream_files, "_bytes_of", lambda fs, path, *_: io.BufferedReader(Counted(path), 256))
    shards = [data.DataShard(found, rank=rank, size=workers, batch_size=4, seed=1) for rank in range(workers)]
    seen = [int(n) for shard in shards for (batch,) in shard for n in batch[: shard.local_samples]]
    assert sorted(seen) == list(range(6 * count))
    assert sum(read) <= 1.1 * size


@pytest.mark.parametrize("workers", [1, 8])
@pytest.mark.parametrize("place", ["kept", "small", "not kept"])
def test_processes_read_small_row_groups_and_footers_once(
    place: str, workers: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Five rows a group: footers are most of a file. They are read once, by the process that counts first: the cache
    folder keeps them, and of small files together; a process holds its own where the filesystem has no times."""
    from polytempo.data.streams.sources import parquet

    monkeypatch.setattr(parquet, "KEPT_FROM_BYTES", 0 if place == "kept" else 1 << 20)
    if place == "not kept":
        monkeypatch.setattr(stream_files, "_TAGS", ())
    sizes, read = list[int](), list[int]()
    for part in range(6):
        (tmp_path / f"part-{part}.parquet").write_bytes(content := parquet_file(part * 300, 300))
        sizes.append(len(content))

    class Counted(io.FileIO):
        def readinto(self, buffer: Any) -> int:
            read.append(found := super().readinto(buffer) or 0)
            return found

        def read(self, size: int | None = -1) -> bytes:
            read.append(len(found := super().read(size) or b""))
            return found

    def bytes_of(fs: Any, path: str, buffer_bytes: int, ahead_bytes: int) -> Any:
        return io.BufferedReader(Counted(path), buffer_bytes) if buffer_bytes else Counted(path)

    monkeypatch.setattr(stream_files, "_bytes_of", bytes_of)
    seen, names = list[int](), str(tmp_path / "part-*.parquet")
    for rank in range(workers):
        source = data.parquet(names, as_tuple=("n", "text")).shuffled(buffer=16, interleave=2)
        shard = data.DataShard(source, rank=rank, size=workers, batch_size=4, seed=1)
        seen += [int(n) for numbers_, _ in shard for n in numbers_[: shard.local_samples]]
    assert sorted(seen) == list(range(1800))
    footers = sum(len(parquet._footer_bytes(file)) for file in stream_files.find_files(names))
    again = workers - 1 if place == "not kept" else 0
    assert sum(read) - footers <= 1.1 * sum(sizes) + again * footers


@pytest.mark.parametrize("form", FORMATS)
def test_a_source_can_be_given_up_and_read_twice_at_a_time(form: str, tmp_path: Path) -> None:
    source = written("memory://twice", form)
    shard = source.counts.index(max(source.counts))
    one, other = (source.read(shard, [range(2, source.counts[shard])]) for _ in range(2))
    a, b = source.decode(next(one)), source.decode(next(other))
    assert a == b
    assert source.decode(next(one)) != a
    one.close()
    assert source.decode(next(other)) != b


@pytest.mark.parametrize("form", FORMATS)
def test_moved_data_have_the_same_fingerprint_and_other_data_another(form: str, tmp_path: Path) -> None:
    one, moved = written("memory://one", form), written(str(tmp_path), form)
    assert one.fingerprint == moved.fingerprint
    ending, write, source, column = FORMATS[form]
    with fsspec.open(f"memory://one/part-0.{ending}", "wb") as file:
        file.write(write(1, COUNTS[0] + 2))
    assert source(f"memory://one/*.{ending}", as_tuple=(column,)).fingerprint != one.fingerprint
    assert pickle.loads(pickle.dumps(one)).fingerprint == one.fingerprint


@pytest.mark.parametrize("form", FORMATS)
def test_a_kept_index_is_taken_and_a_damaged_one_is_not(
    form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from polytempo.data.streams.sources import parquet

    monkeypatch.setattr(parquet, "KEPT_FROM_BYTES", 0)
    first = written(str(tmp_path), form)
    kept = sorted(kept_index.cache_folder().iterdir())
    assert len(kept) == len(COUNTS) * (2 if form == "parquet" else 1)  # counts, and a footer
    assert {path.suffix for path in kept} == {".index"}
    ending, _, source, column = FORMATS[form]
    monkeypatch.setattr(marked_files.MarkedFiles, "_marks", None)  # it would have to count
    monkeypatch.setattr(parquet, "_footer", None)
    monkeypatch.setattr(parquet, "_footer_bytes", None)
    again = source(f"{tmp_path}/*.{ending}", as_tuple=(column,))
    assert again.counts == first.counts
    assert numbers(again) == numbers(first)
    for path in kept:
        path.write_bytes(path.read_bytes()[:-1] + b"?")
    with pytest.raises(TypeError):  # it does count
        source(f"{tmp_path}/*.{ending}", as_tuple=(column,))


def test_small_files_share_a_kept_index_and_old_ones_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    monkeypatch.setenv("POLYTEMPO_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(kept_index, "SMALL_TOGETHER", 2)
    monkeypatch.setattr(kept_index, "MOST_SMALL", 4)
    for part in range(5):
        (tmp_path / f"part-{part}.jsonl").write_text('{"n": 1}\n' * (part + 1))
    for count in range(1, 6):
        source = data.json_lines([tmp_path / f"part-{part}.jsonl" for part in range(count)])
        assert source.counts == list(range(1, count + 1))
    assert 2 <= len(list((tmp_path / "cache").glob("*.small"))) <= 4
    assert not list((tmp_path / "cache").glob("*.index"))
    data.json_lines([tmp_path / f"part-{part}.jsonl" for part in range(5)])
    with monkeypatch.context() as patch:
        patch.setattr(marked_files.MarkedFiles, "_marks", None)  # it would have to count
        assert data.json_lines([tmp_path / f"part-{part}.jsonl" for part in range(5)]).counts == [1, 2, 3, 4, 5]
    (tmp_path / "part-4.jsonl").write_text('{"n": 1}\n')
    assert data.json_lines(str(tmp_path / "part-4.jsonl")).counts == [1]


def test_json_lines_have_blanks_a_byte_order_mark_and_no_last_newline(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"n": 0}\r\n\n  \n{"n": 1.5}\n{"n": [1, 2]}\n{"n": "x"}')
    source = data.json_lines(path)
    values = [sample["n"] for sample in source]
    assert values[0].dtype == torch.int64
    assert values[1].dtype == torch.float32
    assert values[2].tolist() == [1, 2]
    assert values[3] == "x"
    assert [source[place]["n"] if place == 3 else source[place]["n"].tolist() for place in range(4)] == [
        0,
        1.5,
        [1, 2],
        "x",
    ]


def test_a_tar_is_decoded_by_extensions() -> None:
    picture = io.BytesIO()
    Image.new("RGB", (3, 2), (255, 0, 10)).save(picture, "png")
    array = io.BytesIO()
    np.save(array, np.arange(3.0))
    member = {
        "txt": "né".encode(),
        "json": b'{"a": [1]}',
        "cls": b"7",
        "npy": array.getvalue(),
        "seg.PNG": picture.getvalue(),
        "bin": b"\0",
    }
    with fsspec.open("memory://a.tar", "wb") as file:
        file.write(tar([member], ["d.x/one"]))
    (sample,) = data.webdataset("memory://a.tar")
    assert sample["__key__"] == "d.x/one"
    assert (sample["txt"], sample["json"], sample["cls"], sample["bin"]) == ("né", {"a": [1]}, 7, b"\0")
    assert sample["npy"].tolist() == [0, 1, 2]
    assert sample["seg.png"].shape == (3, 2, 3)
    assert sample["seg.png"][:, 0, 0].tolist() == [255, 0, 10]
    (plain,) = data.webdataset("memory://a.tar", decode=False, as_tuple=("cls", "txt"))
    assert plain == (b"7", "né".encode())
    (own,) = data.webdataset("memory://a.tar", decode={"cls": lambda content: int(content) + 1}, as_tuple=("cls",))
    assert own == (8,)


def test_parquet_columns_become_tensors() -> None:
    arrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    table = arrow.table(
        {
            "float": arrow.array([0.5, 1.5], arrow.float32()),
            "ids": arrow.array([[1, 2, 3], []], arrow.list_(arrow.uint16())),
            "bool": [True, False],
            "hole": [1, None],
            "name": ["a", "b"],
            "nested": [[[1]], [[2, 3]]],
        }
    )
    with fsspec.open("memory://a.parquet", "wb") as file:
        parquet.write_table(table, file)
    one, two = data.parquet("memory://a.parquet")
    assert one["float"].dtype == torch.float32
    assert one["ids"].dtype == torch.int64
    assert (one["ids"].tolist(), two["ids"].tolist()) == ([1, 2, 3], [])
    assert one["bool"].dtype == torch.bool
    assert (one["hole"], two["hole"], one["name"], two["nested"]) == (1, None, "a", [[2, 3]])
    assert list(data.parquet("memory://a.parquet", columns=["name"])) == [{"name": "a"}, {"name": "b"}]


@pytest.mark.parametrize("kind", ["float16", "float32", "float64", "int8", "int16", "int32", "int64", "uint8"])
def test_numbers_of_arrow_are_not_copied(kind: str) -> None:
    arrow = pytest.importorskip("pyarrow")
    from polytempo.data.streams.sources.arrow_rows import arrow_rows

    column = arrow.array(np.arange(9, dtype=kind))
    rows = list(arrow_rows(arrow.record_batch({"n": column}).slice(2)))
    assert [row["n"].item() for row in rows] == list(range(2, 9))
    size = rows[0]["n"].element_size()
    assert [row["n"].data_ptr() for row in rows] == [column.buffers()[1].address + n * size for n in range(2, 9)]


@pytest.mark.parametrize("ending", ["npy", "bin"])
@given(size=st.integers(0, 40), length=st.integers(1, 9))
def test_each_token_is_predicted_once(ending: str, size: int, length: int) -> None:
    whole = np.arange(size, dtype=np.uint16)
    with fsspec.open(f"memory://t.{ending}", "wb") as file:
        np.save(file, whole) if ending == "npy" else file.write(whole.tobytes())
    if size <= length:
        with pytest.raises(ValueError, match="PT2606"):
            data.tokens(f"memory://t.{ending}", length, dtype="uint16")
        return
    source = data.tokens(f"memory://t.{ending}", length, dtype="uint16")
    pairs = list(source)
    used = (size - 1) // length * length
    assert torch.cat([x for x, _ in pairs]).tolist() == list(range(used))
    assert torch.cat([y for _, y in pairs]).tolist() == list(range(1, used + 1))
    assert all(len(x) == len(y) == length for x, y in pairs)
    last = len(source) - 1
    assert torch.equal(source[last][0], pairs[last][0])


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        ("{8..11}.jsonl", ["8.jsonl", "9.jsonl", "10.jsonl", "11.jsonl"]),
        ("{008..010}.jsonl", ["008.jsonl", "009.jsonl", "010.jsonl"]),
        (["b.jsonl", "a*.jsonl"], ["b.jsonl", "a1.jsonl", "a2.jsonl"]),
    ],
)
def test_names_of_files(names: Any, expected: list[str]) -> None:
    for name in expected:
        with fsspec.open(f"memory://n/{name}", "wb") as file:
            file.write(b"{}\n")
    urls = [f"memory://n/{name}" for name in ([names] if isinstance(names, str) else names)]
    assert data.json_lines(urls).names == expected


def _write(url: str, content: bytes) -> str:
    with fsspec.open(url, "wb") as file:
        file.write(content)
    return url


def _member(name: str, **facts: Any) -> bytes:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w") as archive_:
        member = tarfile.TarInfo(name)
        for key, value in facts.items():
            setattr(member, key, value)
        archive_.addfile(member, io.BytesIO(b"1" * member.size))
    return stream.getvalue()


HOSTILE = {
    "missing": (lambda: data.json_lines("memory://nothing.jsonl"), "PT2602"),
    "no match": (lambda: data.json_lines("memory://nothing-*.jsonl"), "PT2606"),
    "empty": (lambda: data.json_lines(_write("memory://a.jsonl", b"\n \n")), "PT2606"),
    "not json": (lambda: list(data.json_lines(_write("memory://a.jsonl", b"{}\nnonsense\n"))), "PT2604"),
    "no object": (lambda: list(data.json_lines(_write("memory://a.jsonl", b"[1]\n"))), "PT2604"),
    "cut line": (lambda: list(data.json_lines(_write("memory://a.jsonl", b'{"n": 1}\n{"n": '))), "PT2604"),
    "no utf-8": (lambda: list(data.json_lines(_write("memory://a.jsonl", b'{"n": "\xff"}\n'))), "PT2604"),
    "deep": (lambda: list(data.json_lines(_write("memory://a.jsonl", b'{"n": ' + b"[" * 100_000))), "PT2604"),
    "huge": (lambda: data.json_lines(_write("memory://a.jsonl", b"x" * 99), max_line_bytes=98), "PT2609"),
    "column": (lambda: list(data.json_lines(_write("memory://a.jsonl", b'{"n": 1}\n'), as_tuple=["m"])), "PT2605"),
    "cut gzip": (lambda: data.json_lines(_write("memory://a.jsonl.gz", gzip.compress(lines(0, 99))[:-9])), "PT2604"),
    "not gzip": (lambda: data.json_lines(_write("memory://a.jsonl.gz", lines(0, 3))), "PT2604"),
    "cut zip": (lambda: data.webdataset(_write("memory://a.tar.gz", gzip.compress(archive(0, 9))[:-9])), "PT2604"),
    "not tar": (lambda: data.webdataset(_write("memory://a.tar", b"x" * 2000)), "PT2604"),
    "no bytes": (lambda: data.webdataset(_write("memory://a.tar", b"")), "PT2604"),
    "cut tar": (lambda: data.webdataset(_write("memory://a.tar", archive(0, 9)[:9000])), "PT2604"),
    "cut header": (lambda: data.webdataset(_write("memory://a.tar", archive(0, 9)[: 512 * 6])), "PT2604"),
    "bad header": (lambda: data.webdataset(_write("memory://a.tar", _spoiled(archive(0, 9)))), "PT2604"),
    "two tars": (lambda: data.webdataset(_write("memory://a.tar", 2 * archive(0, 9))), "PT2604"),
    "parent": (lambda: data.webdataset(_write("memory://a.tar", _member("../a.txt"))), "PT2607"),
    "root": (lambda: data.webdataset(_write("memory://a.tar", _member("/etc/a.txt"))), "PT2607"),
    "link": (lambda: data.webdataset(_write("memory://a.tar", _member("a.txt", type=b"2", linkname="/b"))), "PT2607"),
    "device": (lambda: data.webdataset(_write("memory://a.tar", _member("a.txt", type=b"3"))), "PT2607"),
    "twice": (lambda: data.webdataset(_write("memory://a.tar", archive(1, 1)[:1024] + archive(1, 1))), "PT2604"),
    "pickle": (lambda: list(data.webdataset(_write("memory://a.tar", _member("a.pth")))), "PT2608"),
    "picture": (lambda: list(data.webdataset(_write("memory://a.tar", _member("a.png", size=3)))), "PT2604"),
    "field": (lambda: list(data.webdataset(_write("memory://a.tar", _member("a.txt")), as_tuple=["x"])), "PT2605"),
    "npy": (lambda: data.tokens(_write("memory://a.npy", b"x" * 99), 2), "PT2604"),
    "odd bytes": (lambda: data.tokens(_write("memory://a.bin", b"x" * 99), 2, dtype="int16"), "PT2604"),
    "parquet": (lambda: data.parquet(_write("memory://a.parquet", b"PAR1" + b"x" * 99)), "PT2604"),
    "cut parquet": (lambda: data.parquet(_write("memory://a.parquet", parquet_file(0, 50)[:-20])), "PT2604"),
    "no column": (
        lambda: data.parquet(_write("memory://a.parquet", parquet_file(0, 5)), columns=["m"]),
        "PT2605",
    ),
    "no rows": (lambda: data.parquet(_write("memory://a.parquet", parquet_file(0, 0))), "PT2606"),
}


def _spoiled(content: bytes) -> bytes:
    return content[:1536] + b"?" * 512 + content[2048:]


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_files_are_refused(name: str) -> None:
    if name in ("parquet", "cut parquet", "no column", "no rows"):
        pytest.importorskip("pyarrow")
    act, code = HOSTILE[name]
    with pytest.raises(ValueError, match=code) as caught:
        act()
    assert caught.value.code == code  # type: ignore[attr-defined]


@pytest.mark.parametrize("form", FORMATS)
def test_a_file_that_changes_after_it_was_counted_is_refused(form: str, tmp_path: Path) -> None:
    source = written(str(tmp_path), form)
    ending, write, _, _ = FORMATS[form]
    (tmp_path / f"part-0.{ending}").write_bytes(write(3, 8))
    with pytest.raises(ValueError, match="PT2603"):
        list(source)


def test_an_array_with_pickled_objects_is_refused(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.array([{}, {}], dtype=object), allow_pickle=True)
    with pytest.raises(ValueError, match="PT2604"):
        data.tokens(tmp_path / "a.npy", 1)
    content = (tmp_path / "a.npy").read_bytes()
    with pytest.raises(ValueError, match="PT2604"):
        list(data.webdataset(_write("memory://a.tar", tar([{"npy": content}], ["a"]))))


def test_a_missing_library_names_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    with pytest.raises(ValueError, match=r"PT2601.*polytempo\[parquet\]"):
        data.parquet("memory://a.parquet")


def test_a_name_given_twice_is_refused() -> None:
    _write("memory://a.jsonl", b"{}\n")
    with pytest.raises(ValueError, match="named twice"):
        data.json_lines(["memory://a.jsonl", "memory://a.json*"])


def test_json_lines_of_zstandard() -> None:
    zstandard = pytest.importorskip("zstandard")
    _write("memory://a.jsonl.zst", zstandard.compress(lines(0, 9)) + zstandard.compress(lines(9, 9)))
    assert [int(sample["n"]) for sample in data.json_lines("memory://a.jsonl.zst")] == list(range(18))


def test_samples_are_read_from_their_mark_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A range of the end reads no more than the range, a mark's distance and a buffer."""
    (tmp_path / "a.jsonl").write_bytes(b"".join(json.dumps({"n": n}).encode() + b"\n" for n in range(100_000)))
    source = data.json_lines(tmp_path / "a.jsonl")
    seen: list[int] = []
    plain = source.walk

    def walk(stream: Any, file: Any, wanted: Any) -> Any:
        for offset, content in plain(stream, file, wanted):
            seen.append(offset)
            yield offset, content

    monkeypatch.setattr(source, "walk", walk)
    assert [int(sample["n"]) for sample in map(source.decode, source.read(0, [range(90_000, 90_010)]))] == [
        *range(90_000, 90_010)
    ]
    assert len(seen) < 20
