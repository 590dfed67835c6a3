"""Places by URL: their syntax, a run's use of one, and the errors that name it."""

from __future__ import annotations

from io import BytesIO
from pathlib import Path

import pytest
from fsspec.implementations.memory import MemoryFileSystem
from fsspec.registry import known_implementations

from object_store import bucket
from polytempo.core.system import files
from polytempo.core.system.url_path import UrlPath, place
from polytempo.report.status.line_file import GrownObject
from polytempo.report.status.metrics import MetricsWriter
from polytempo.report.status.rows import read_metrics
from polytempo.spec.run_options import RunOptions


@pytest.mark.parametrize(
    ("given", "taken"),
    [
        ("runs/digits", Path("runs/digits")),
        ("/tmp/x", Path("/tmp/x")),
        ("file:///tmp/x", Path("/tmp/x")),
        ("C:\\x", Path("C:\\x")),
        ("s3://bucket/x/", UrlPath("s3://bucket/x")),
        ("memory://x", UrlPath("memory://x")),
        (Path("here"), Path("here")),
    ],
)
def test_a_place_is_a_path_or_a_url(given: str | Path, taken: object) -> None:
    assert place(given) == taken
    assert RunOptions(out=place(given)).out == taken


def test_a_url_that_became_a_path_is_refused() -> None:
    with pytest.raises(ValueError, match="give it as a str"):
        RunOptions(out=Path("s3://bucket/x"))


def test_a_url_does_not_lead_out_of_its_folder() -> None:
    with pytest.raises(ValueError, match=r"'\.\.' leads out"):
        place("memory://run/checkpoint") / "../../other"


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    absent = {"class": "absent_package.Files", "err": "Install absent_package"}
    monkeypatch.setitem(known_implementations, "absent", absent)
    with pytest.raises(ValueError, match=r"absent://x: no filesystem is known for absent:// \(Install absent_package"):
        place("absent://x").exists()
    with pytest.raises(ValueError, match="nowhere://x: no filesystem is known for nowhere://"):
        place("nowhere://x").exists()


@pytest.mark.parametrize("kind", ["memory", "bucket", "dir"])
def test_members_mean_what_they_mean_in_a_path(tmp_path: Path, kind: str) -> None:
    urls = {"memory": f"memory://{tmp_path.name}", "bucket": bucket(tmp_path), "dir": f"local://{tmp_path}/dir"}
    folder = UrlPath(urls[kind])
    assert (folder.exists(), folder.names(), list(folder.iterdir())) == (False, [], [])
    file = folder / "a" / "b.txt"
    assert (file.name, file.parent, file.with_name("c")) == ("b.txt", folder / "a", folder / "a" / "c")
    file.write(b"")
    file.write(b"content")
    (tmp_path / "local").write_bytes(b"uploaded")
    (folder / "c").upload(tmp_path / "local")
    assert (folder.names(), (folder / "a").names()) == (["a", "c"], ["b.txt"])
    assert (folder.is_dir(), file.is_file(), file.is_dir(), (folder / "no").is_file()) == (True, True, False, False)
    assert (file.size(), file.read(100), file.read(4)) == (7, b"content", b"cont")
    (folder / "c").download(tmp_path / "copy")
    assert (tmp_path / "copy").read_bytes() == b"uploaded"
    file.remove()
    file.remove()
    assert not file.exists()
    with pytest.raises(FileNotFoundError) as refused:
        file.read(1)
    assert refused.value.filename == str(file)
    folder.remove()
    assert folder.names() == []


def test_a_limit_holds_where_no_size_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a web server without Content-Length, whose answers come in pieces."""

    class Pieces(BytesIO):
        def read(self, most: int | None = -1) -> bytes:
            assert most is not None
            return super().read(min(most, 3))

    monkeypatch.setattr(MemoryFileSystem, "info", lambda *_, **__: {"name": "x", "size": None, "type": "file"})
    for limit, read in ((7, 7), (11, 10), (0, 0)):
        stream = Pieces(b"0123456789")
        with monkeypatch.context() as patched:
            patched.setattr(stream, "close", lambda: None)
            patched.setattr(MemoryFileSystem, "open", lambda *_, stream=stream, **__: stream)
            assert UrlPath("memory://x").read(limit) == b"0123456789"[:limit]
            assert stream.tell() == read


def test_whole_files_go_to_a_url_like_to_a_path(tmp_path: Path) -> None:
    for out in (tmp_path / "run", UrlPath(bucket(tmp_path))):
        assert files.run_folder(out) == out
        files.replace(out / "result.json", '{"a": 1}')
        assert files.parsed(out / "result.json") == {"a": 1}
        with files.aside(out / "x") as stream:
            stream.write(b"12")
        assert files.read(out / "x", 10) == b"12"
        files.remove(out / "x")
        assert not (out / "x").exists()
    with pytest.raises(RuntimeError), files.aside(out / "x") as stream:
        raise RuntimeError
    assert not (out / "x").exists()


def test_metrics_at_a_url_are_those_of_a_file(tmp_path: Path) -> None:
    rows = [{"kind": "train", "step": step, "loss": 1.0 / step} for step in range(1, 6)]
    found = []
    for path in (tmp_path, UrlPath(bucket(tmp_path))):
        with MetricsWriter(path) as metrics:
            for row in rows:
                metrics.write(row)
        with MetricsWriter(path, resumed_at=3) as metrics:
            metrics.write({"kind": "train", "step": 4})
            metrics.close()
        found.append(read_metrics(path))
    assert found[0] == found[1] == [*rows[:3], {"kind": "train", "step": 4}]


class Flaky(UrlPath):
    """Fails so many times."""

    failures = 0

    def write(self, content: bytes) -> None:
        if Flaky.failures:
            Flaky.failures -= 1
            raise OSError("the network is away")
        super().write(content)


def test_a_put_that_fails_is_made_up_for_at_the_end(tmp_path: Path) -> None:
    path = Flaky(f"memory://{tmp_path.name}/metrics")
    grown = GrownObject(path, b"1", every_s=3600)
    grown.write(b"2")
    Flaky.failures = 2
    grown.close()
    assert path.read(10) == b"12"
    grown = GrownObject(path, b"1", every_s=3600)
    grown.write(b"2")
    Flaky.failures = 3
    with pytest.raises(OSError, match="the network is away"):
        grown.close()
