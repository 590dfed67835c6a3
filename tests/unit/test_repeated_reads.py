"""Repeated reads of data: bytes of real files against the formula of the documentation, and the note.

`make test-integrations` runs this file, too: there is pyarrow.
"""

from __future__ import annotations

import gzip
import io
import json
import math
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from torch.utils.data import IterableDataset, TensorDataset

import polytempo as pt
from polytempo import data
from polytempo.data.streams.repeated_reads import RepeatedReads, repeated_reads
from polytempo.data.streams.sources import stream_files
from polytempo.report.status.metrics import MetricsWriter
from polytempo.runs.frame.folder import began
from polytempo.training.observe.user_log import note_reads

FILES, ROWS, BUFFER, INTERLEAVE = 3, 300, 16, 2
WORKERS = (1, 2, 3, 5, 8)


@pytest.fixture(autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POLYTEMPO_CACHE", str(tmp_path_factory.mktemp("cache")))


def rows(part: int) -> list[dict[str, Any]]:
    random = Random(part)
    return [{"n": part * ROWS + row, "text": random.randbytes(2048).hex()} for row in range(ROWS)]


def lines(part: int) -> bytes:
    return "".join(f"{json.dumps(row)}\n" for row in rows(part)).encode()


def table(part: int) -> bytes:
    """Two row groups a file."""
    arrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    stream = io.BytesIO()
    parquet.write_table(arrow.Table.from_pylist(rows(part)), stream, row_group_size=ROWS // 2, use_dictionary=False)
    return stream.getvalue()


FORMATS: dict[str, tuple[Callable[[int], bytes], Callable[..., Any], float]] = {
    "jsonl": (lines, data.json_lines, math.inf),
    "jsonl.gz": (lambda part: gzip.compress(lines(part), 1), data.json_lines, FILES),
    "parquet": (table, data.parquet, 2 * FILES),
}
"""The content of a file, the reader, and the blocks of all files."""


@pytest.mark.parametrize("workers", WORKERS)
@pytest.mark.parametrize("form", FORMATS)
def test_the_bytes_of_an_epoch_are_within_the_formula(
    form: str, workers: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, reader, blocks = FORMATS[form]
    size = 0
    for part in range(FILES):
        (tmp_path / f"{part}.{form}").write_bytes(content := write(part))
        size += len(content)
    source = reader(str(tmp_path / f"*.{form}"), as_tuple=("n",)).shuffled(buffer=BUFFER, interleave=INTERLEAVE)
    list(source)  # counted, and its footers kept
    read = list[int]()

    class Counted(io.FileIO):
        def readinto(self, buffer: Any) -> int:
            read.append(found := super().readinto(buffer) or 0)
            return found

        def read(self, size: int | None = -1) -> bytes:
            read.append(len(found := super().read(size) or b""))
            return found

    monkeypatch.setattr(stream_files, "_bytes_of", lambda fs, path, *_: io.BufferedReader(Counted(path), 4096))
    shards = [data.DataShard(source, rank=rank, size=workers, batch_size=4, seed=1) for rank in range(workers)]
    seen = [int(n) for shard in shards for (batch,) in shard for n in batch[: shard.local_samples]]
    assert sorted(seen) == list(range(FILES * ROWS))
    facts, stretches = repeated_reads(shards[0]), workers * INTERLEAVE
    assert facts == (FILES * ROWS, blocks, INTERLEAVE, BUFFER // INTERLEAVE)
    found, per_end = sum(read) / size, 1 / blocks + BUFFER / INTERLEAVE / (FILES * ROWS)
    buffers = stretches * 2 * (132 << 10) / size  # a decompressor reads 128 KiB at a time, and marks are 64 KiB apart
    assert found <= 1 + (stretches - 1) * per_end + buffers
    if blocks < math.inf and workers > 1:
        assert found >= 1 + 0.5 * (facts.times(workers) - 1)  # and not much less


def test_data_that_are_read_once_need_no_note() -> None:
    in_memory = data.DataShard(TensorDataset(torch.arange(64)), rank=0, size=8, batch_size=4)
    assert repeated_reads(in_memory).note(8) == ""
    lists = data.InMemoryShards([list(range(10))] * 2)
    assert repeated_reads(data.DataShard(lists, rank=0, size=8, batch_size=1)).times(8) == 1.0
    assert RepeatedReads(10_000_000, 4000, 4, 2500).note(8) == ""
    assert RepeatedReads(None, 8).note(8) == ""
    assert RepeatedReads(999, 1.0, 4, 2500).note(8) == ""  # a trial


@pytest.mark.parametrize(
    ("facts", "workers", "times", "remedies"),
    [
        (RepeatedReads(None, None), 4, 4.0, ["each of 4 ranks reads all", "4 shards or more"]),
        (RepeatedReads(None, 3), 4, 4.0, ["each of 4 ranks reads all"]),
        (RepeatedReads(3_000_000, 3, 4, 2500), 8, 1 + 31 * (1 / 6 + 2500 / 3_000_000), ["interleave=1", "310 files"]),
        (RepeatedReads(100_000, math.inf, 4, 2500), 2, 1.175, ["shuffled(buffer=2856)", "interleave=1"]),
        (RepeatedReads(1000, 50.0, 4, 2500), 2, 8.0, ["shuffled(buffer="]),
    ],
)
def test_more_than_a_tenth_is_said_with_a_remedy(
    facts: RepeatedReads, workers: int, times: float, remedies: list[str]
) -> None:
    assert facts.times(workers) == pytest.approx(times)
    note = facts.note(workers)
    assert all(remedy in note for remedy in remedies), note


@pytest.mark.parametrize("interleave", [1, 4])
@pytest.mark.parametrize("workers", WORKERS)
def test_a_remedy_is_one(workers: int, interleave: int) -> None:
    """So many blocks and so small a window have no note."""
    asked = RepeatedReads(1_000_000, 3.0, interleave, 250_000 // interleave)
    words = asked.note(workers).replace(",", "").replace(")", "").split()
    if workers == interleave == 1:
        assert words == []
        return
    blocks = float(words[words.index("write") + 1])
    (buffer,) = [int(word.partition("buffer=")[2]) for word in words if "buffer=" in word]
    assert asked._replace(blocks=blocks, window=buffer // interleave).note(workers) == ""


class Endless(IterableDataset[torch.Tensor]):
    def __iter__(self) -> Iterator[torch.Tensor]:
        yield from torch.ones(64, 4)


def endless_job() -> pt.Job:
    return pt.Job(
        model=lambda: torch.nn.Linear(4, 1),
        data=lambda path: pt.Data(Endless()),
        loss=pt.of_batch(lambda model, batch: model(batch).mean()),
        optimizer=lambda parameters, lr: torch.optim.SGD(parameters, lr=lr),
        batch_size=4,
    )


@pytest.mark.process
def test_a_job_says_it_at_its_start_and_on_its_page(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    pt.run(endless_job(), "sync_sgd", workers=2, steps=2, out=tmp_path / "run")
    assert "note: each of 2 ranks reads all of this stream" in capfd.readouterr().err
    rows = map(json.loads, (tmp_path / "run" / "metrics.jsonl").read_text().splitlines())
    texts = [row for row in rows if row["kind"] == "text"]
    assert [row["name"] for row in texts] == ["data"]
    assert "each of 2 ranks reads all" in (tmp_path / "run" / "report.html").read_text()


def test_a_start_with_the_note_that_fails_leaves_no_folder(tmp_path: Path) -> None:
    out = tmp_path / "run"
    with suppress(RuntimeError), began(out), MetricsWriter(out) as metrics:
        note_reads(data.DataShard(Endless(), rank=0, size=2, batch_size=4), metrics)
        raise RuntimeError("later")
    assert not out.exists()


def test_the_note_comes_with_the_first_row_and_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shard, row = data.DataShard(Endless(), rank=0, size=2, batch_size=4), {"kind": "train", "step": 1}
    for resumed_at in (None, 1):
        with MetricsWriter(tmp_path, resumed_at=resumed_at) as metrics:
            before = (tmp_path / "metrics.jsonl").read_bytes()
            note_reads(shard, metrics, resumed=resumed_at is not None)
            assert (tmp_path / "metrics.jsonl").read_bytes() == before
            metrics.write(row)
    kinds = [json.loads(line)["kind"] for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert kinds == ["text", "train", "train"]
    assert capsys.readouterr().err.count("reads all of this stream") == 2


def test_a_run_without_a_folder_says_nothing_by_its_ranks(capsys: pytest.CaptureFixture[str]) -> None:
    note_reads(data.DataShard(Endless(), rank=1, size=2, batch_size=4), None)
    assert capsys.readouterr().err == ""
