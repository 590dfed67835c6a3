"""Records: read in the order of writing after any crash; damage is named by its line."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from polytempo.server.message import COORDINATOR, Ask, Elapsed, Inquire, Members, Pull, Push, Save, Stranger
from polytempo.server.record import (
    Asking,
    Elapsing,
    Enrolling,
    Entry,
    Inquiring,
    Lost,
    Noting,
    PullEntry,
    PushEntry,
    Record,
    Recorder,
    RecordError,
    Saving,
    check_of,
    entry_of,
    read_record,
)

PUSH = Push(1, 1, 2, clock=1, basis=0, samples=32, lrs=(0.1,), tickets=(5, 6), gradient=torch.ones(3))
ENTRIES: list[Entry] = [
    entry_of(Members(COORDINATOR, 0, 1, ((0, 1), (1, 1)))),
    entry_of(Pull(0, 1, 1, clock=0, basis=-1)),
    entry_of(PUSH, version=1),
    entry_of(Save(COORDINATOR, 0, 2, number=4), version=1),
    entry_of(Inquire(COORDINATOR, 0, 3), version=1),
    entry_of(Ask(0, 1, 2, done=(3,), rows=(b"{}",))),
    Noting(0, 1),
    Lost(2),
    entry_of(Elapsed(1), version=2),
]


def written(path: Path, entries: list[Entry]) -> bytes:
    with Recorder(path, "shard 0") as recorder:
        for entry in entries:
            recorder.append(entry, now_s=0.0)
    return path.read_bytes()


def test_what_is_kept_of_each_message() -> None:
    assert ENTRIES[:6] == [
        Enrolling(1, 0, ((0, 1), (1, 1)), ()),
        PullEntry(0, 1, 1, 0, -1, 0),
        PushEntry(1, 1, 2, 1, 0, 32, (5, 6), 1, check_of(torch.ones(3))),
        Saving(2, 1, 4),
        Inquiring(3, 1),
        Asking(0, 1, 2, (3,)),
    ]
    assert ENTRIES[8] == Elapsing(1, 2)
    with pytest.raises(ValueError, match="a Stranger is not an entry"):
        entry_of(Stranger(0, 0, 1, 1, "over"))  # type: ignore[arg-type]


def test_a_record_is_read_as_it_was_written(tmp_path: Path) -> None:
    content = written(tmp_path / "run" / "shard-0.jsonl", ENTRIES)
    assert read_record(tmp_path / "run" / "shard-0.jsonl") == Record("shard 0", ENTRIES, torn=False)
    assert content.splitlines()[:4] == [
        b'{"format":"polytempo-record","version":2,"machine":"shard 0"}',
        b'["members",1,0,[[0,1],[1,1]],[]]',
        b'["pull",0,1,1,0,-1,0]',
        b'["push",1,1,2,1,0,32,[5,6],1,3699134100]',
    ]


def test_entries_leave_the_process_now_and_then(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path / "shard-0.jsonl", "shard 0", flush_every_s=1.0)
    counts = []
    for now_s in (10.0, 10.5, 11.0, 11.5, 12.5):
        recorder.append(Lost(2), now_s)
        counts.append(len(read_record(tmp_path / "shard-0.jsonl").entries))
    assert counts == [0, 0, 3, 3, 5]
    for _ in range(4000):
        recorder.append(ENTRIES[2], 12.5)
    assert 0 < 4005 - len(read_record(tmp_path / "shard-0.jsonl").entries) < 2500, "64 KiB do not wait for the time"
    recorder.close()
    recorder.close()
    assert len(read_record(tmp_path / "shard-0.jsonl").entries) == 4005


@given(cut=st.integers(0, 10_000))
def test_a_torn_last_line_is_left_out(tmp_path_factory: pytest.TempPathFactory, cut: int) -> None:
    path = tmp_path_factory.mktemp("record") / "shard-0.jsonl"
    content = written(path, ENTRIES)
    first_line = content.index(b"\n") + 1
    content = content[: first_line + cut % (len(content) - first_line + 1)]
    path.write_bytes(content)
    whole = content.count(b"\n") - 1
    assert read_record(path) == Record("shard 0", ENTRIES[:whole], torn=not content.endswith(b"\n"))


def test_damage_is_named_by_its_line(tmp_path: Path) -> None:
    path = tmp_path / "shard-0.jsonl"
    lines = written(path, ENTRIES).splitlines(keepends=True)
    for damaged in (b'["shove",1]\n', b'["pull",0,1]\n', b"\n", b'["pull",0,1,1,0,-1,"x"]\n'):
        path.write_bytes(b"".join([*lines[:3], damaged, *lines[4:]]))
        with pytest.raises(RecordError, match="line 4 is damaged"):
            read_record(path)
    path.write_bytes(lines[0] + b"[" * (1 << 20))
    with pytest.raises(RecordError, match="line 2 is longer"):
        read_record(path)


def test_other_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "shard-0.jsonl"
    for content, words in [
        (b"", "is not a record"),
        (b"\x00\x01", "is not a record"),
        (b'{"format":"polytempo-record","version":9,"machine":"shard 0"}\n', "version 9; this program reads version 2"),
    ]:
        path.write_bytes(content)
        with pytest.raises(RecordError, match=words):
            read_record(path)


def test_a_record_is_never_overwritten(tmp_path: Path) -> None:
    written(tmp_path / "shard-0.jsonl", ENTRIES)
    with pytest.raises(FileExistsError):
        Recorder(tmp_path / "shard-0.jsonl", "shard 0")


def test_an_entry_has_its_bounds(tmp_path: Path) -> None:
    with Recorder(tmp_path / "c.jsonl", "coordinator") as recorder, pytest.raises(ValueError, match="an entry of"):
        recorder.append(Asking(0, 1, 1, tuple(range(10**6, 10**6 + 200_000))), 0.0)


def test_a_record_ends_at_its_bound_without_a_gap(tmp_path: Path) -> None:
    with Recorder(tmp_path / "c.jsonl", "coordinator", max_bytes=25) as recorder:
        for entry in (Lost(2), Lost(3), Asking(0, 1, 1, (7, 8)), Lost(4)):  # 11, 11 and more bytes
            recorder.append(entry, 0.0)
    assert read_record(tmp_path / "c.jsonl").entries == [Lost(2), Lost(3)]


def test_a_check_tells_gradients_apart_that_differ_in_rounding() -> None:
    gradient = torch.linspace(0.1, 1, 10_000)
    assert check_of(gradient) == check_of(gradient.clone())
    assert check_of(gradient) != check_of(gradient * (1 + 1e-6))
    assert check_of(gradient.bfloat16()) != check_of(gradient.half()), "every dtype has one"
    assert check_of(torch.empty(0)) == 0
