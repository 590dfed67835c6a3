"""A run's folder on the launcher's host, read and written from elsewhere: the methods of a Path, confined to the
folder."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import fsspec
import pytest
import torch
from msgspec import structs

import polytempo as pt
from polytempo.core.system.folder_lock import held
from polytempo.core.system.url_path import UrlPath
from polytempo.engines.engine import EngineAddress
from polytempo.runs.frame.launcher_files import PART_BYTES, FileAnswer, FileRequest, FileServer, OutFolder, served_files
from polytempo.runs.frame.launcher_filesystem import URL, FileClient, LauncherFileSystem, checked, with_launcher_files
from polytempo.spec.run_options import RunOptions
from polytempo.spec.run_spec import RunSpec
from polytempo.training.checkpoint.checkpoint_files import CheckpointPart, commit, read_part, write_part
from polytempo.training.checkpoint.checkpoint_folders import latest
from polytempo.wire.keys import Keys, make_keys

RUN = UrlPath(URL)


class Direct:
    """Asks without a channel; each request comes twice, as after a lost answer."""

    def __init__(self, out: Path) -> None:
        self.folder, self.number = OutFolder(out), 0

    def ask(self, request: FileRequest) -> FileAnswer:
        self.number += 1
        numbered = structs.replace(request, number=self.number)
        first = self.folder.perform(b"p", numbered)
        again = self.folder.perform(b"p", numbered)
        assert first == again
        return checked(again, request.name)


@pytest.fixture
def out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder, which `RUN` is from elsewhere."""
    folder = tmp_path / "out"
    folder.mkdir()
    monkeypatch.setattr(LauncherFileSystem, "asks", Direct(folder))
    fsspec.register_implementation("polytempo", LauncherFileSystem, clobber=True)
    yield folder
    assert not list(folder.rglob("*.part"))


def test_files_are_those_of_the_folder(out: Path, tmp_path: Path) -> None:
    file = RUN / "a" / "b.bin"
    assert (RUN.names(), file.exists(), file.is_file()) == ([], False, False)
    large = os.urandom(2 * PART_BYTES + 17)
    for content in (b"", b"first", b"other", large, large[::-1]):
        file.write(content)
        assert (out / "a" / "b.bin").read_bytes() == content
        assert file.read(len(large)) == content
        assert file.size() == len(content)
    assert file.read(7) == large[::-1][:7]
    (tmp_path / "given").write_bytes(large)
    (RUN / "c").upload(tmp_path / "given")
    (RUN / "c").download(tmp_path / "back")
    assert (tmp_path / "back").read_bytes() == large
    assert (RUN.names(), (RUN / "a").names(), RUN.is_dir(), (RUN / "a").is_dir()) == (["a", "c"], ["b.bin"], True, True)
    (RUN / "a").remove()
    assert RUN.names() == ["c"]
    with pytest.raises(FileNotFoundError, match=r"polytempo://run/a/b\.bin"):
        file.read(1)


@pytest.mark.parametrize(
    "name",
    ["../x", "a/../../x", "/etc/passwd", "a//b", ".", "a/./b", "a\\b", "a\0b", "x" * 300, "a/b/c/d/e/f/g", "l/x", "l"],
)
@pytest.mark.parametrize("verb", ["put", "get", "info", "list", "remove"])
def test_no_name_leads_out_of_the_folder(out: Path, tmp_path: Path, name: str, verb: str) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "x").write_text("theirs")
    (out / "l").symlink_to(outside)
    answer = OutFolder(out).perform(b"p", FileRequest(1, verb, name, content=b"mine", last=True, upload=1))
    assert answer.error
    assert not answer.content
    assert (outside / "x").read_text() == "theirs"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "outside"]


def test_the_folder_itself_stays_and_strange_requests_are_refused(out: Path) -> None:
    folder = OutFolder(out)
    assert folder.perform(b"p", FileRequest(1, "remove", "")).error
    assert folder.perform(b"p", FileRequest(1, "chmod", "x")).error
    assert folder.perform(b"p", FileRequest(1, "put", "x", offset=5, content=b"1", last=True, upload=1)).error
    assert folder.perform(b"p", FileRequest(1, "put", "x", content=bytes(PART_BYTES + 1), upload=2)).error
    assert out.is_dir()
    assert list(out.iterdir()) == []


def test_an_upload_that_was_given_up_leaves_the_file_and_no_part(out: Path) -> None:
    (out / "x").write_text("before")
    folder = OutFolder(out)
    assert not folder.perform(b"p", FileRequest(1, "put", "x", content=b"1234", upload=1)).error
    assert (out / "x").read_text() == "before"
    assert folder.perform(b"q", FileRequest(1, "list", "")).entries == (("x", 6, False),)
    for offset, content in ((0, b"abcd"), (4, b"ef")):
        request = FileRequest(2, "put", "x", offset=offset, content=content, last=offset == 4, upload=2)
        assert not folder.perform(b"p", request).error
    assert (out / "x").read_text() == "abcdef"
    assert not folder.perform(b"p", FileRequest(3, "put", "y", content=b"1234", upload=3)).error
    folder.close()
    assert [path.name for path in out.iterdir()] == ["x"]


def test_checkpoints_written_from_elsewhere_and_here_are_read_from_both(out: Path) -> None:
    for step, root in ((1, out / "checkpoint"), (2, RUN / "checkpoint"), (3, out / "checkpoint")):
        part = CheckpointPart({"w": torch.full((2,), float(step))}, {"s": step})
        commit(root, step, [write_part(root, step, 0, part)], {})
        for other in (out / "checkpoint", RUN / "checkpoint"):
            newest = latest(other)
            assert newest == other / f"step-{step:08d}"
            assert read_part(newest, 0).scalars == {"s": step}
            if step > 1:
                assert read_part(other / f"step-{step - 1:08d}", 0).scalars == {"s": step - 1}
    write_part(RUN / "checkpoint", 4, 0, part)
    assert latest(out / "checkpoint") == out / "checkpoint" / "step-00000003"


def test_over_the_channel_with_its_keys_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given: dict[str, dict[str, str]] = {}
    monkeypatch.setattr(LauncherFileSystem, "asks", None)
    spec = RunSpec.of(pt.jobs.find("digits"), pt.strategies.sync_sgd(), 1, RunOptions(out=tmp_path))
    with held(tmp_path), served_files(tmp_path, EngineAddress("127.0.0.1", 1, shares_files=False), given):
        assert with_launcher_files(spec, given) is spec, "this host sees the folder"
        elsewhere = replace(spec, options=replace(spec.options, out=tmp_path / "not here"))
        assert with_launcher_files(elsewhere, given).options.out == RUN
        (RUN / "result.json").write(b"{}")
        assert (tmp_path / "result.json").read_bytes() == b"{}"
        assert (RUN / "result.json").read(10) == b"{}"
        assert isinstance(LauncherFileSystem.asks, FileClient)
        LauncherFileSystem.asks.close()
    assert [path.name for path in tmp_path.iterdir()] == ["result.json"]
    monkeypatch.setattr("polytempo.runs.frame.launcher_filesystem._DEADLINE_S", 0.3)
    monkeypatch.setattr("polytempo.runs.frame.launcher_filesystem._AGAIN_S", 0.1)
    server = FileServer(tmp_path, "127.0.0.1")
    stranger = FileClient(server.to_plain()["address"], make_keys())
    with pytest.raises(TimeoutError, match="did not answer"):
        stranger.ask(FileRequest(0, "list", ""))
    member = FileClient(server.to_plain()["address"], Keys.from_plain(server.to_plain()["keys"]))
    assert member.ask(FileRequest(0, "info", "result.json")).size == 2
    for client in (stranger, member):
        client.close()
    server.close()


def test_nothing_is_served_where_all_see_the_folder(tmp_path: Path) -> None:
    given: dict[str, object] = {}
    with served_files(tmp_path, EngineAddress("127.0.0.1", 1), given), served_files(None, EngineAddress("h", 1), given):
        assert (given, list(tmp_path.iterdir())) == ({}, [])
