"""A run's folder follows no links: the target of a link is neither written nor emptied."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from polytempo.core.system import files
from polytempo.report.status.metrics import MetricsWriter
from polytempo.server.snapshots import snapshot
from polytempo.training.checkpoint.checkpoint_files import CheckpointPart, commit, read_part, write_part
from polytempo.training.checkpoint.checkpoint_folders import CheckpointError, latest
from polytempo.worlds import write_chrome_trace

PART = CheckpointPart({"weight": torch.ones(3)}, {"epoch": 1})


@pytest.fixture
def foreign(tmp_path: Path) -> Path:
    """Another user's folder with a file in it."""
    folder = tmp_path / "foreign"
    (folder / "deeper").mkdir(parents=True)
    (folder / "thesis.tex").write_text("years of work")
    (folder / "deeper" / "data.csv").write_text("more of it")
    return folder


def untouched(foreign: Path) -> bool:
    names = sorted(str(path.relative_to(foreign)) for path in foreign.rglob("*"))
    content = (foreign / "thesis.tex").read_text() + (foreign / "deeper" / "data.csv").read_text()
    return names == ["deeper", "deeper/data.csv", "thesis.tex"] and content == "years of workmore of it"


def save(root: Path, step: int) -> Path:
    return commit(root, step, [write_part(root, step, rank, PART) for rank in range(2)], {})


# ---- checkpoints


@pytest.mark.parametrize(
    "name",
    [
        ".step-00000003.partial",
        ".step-00000001.partial",
        ".step-00000002.replaced",
        ".step-00000001.removed",
        ".step-00000003.replaced",
        "step-00000003",
        "step-00000001",
    ],
)
@pytest.mark.parametrize("target", ["foreign", "foreign/thesis.tex", "nowhere"])
def test_a_save_succeeds_beside_a_link_and_follows_none(tmp_path: Path, foreign: Path, name: str, target: str) -> None:
    root = tmp_path / "checkpoint"
    save(root, 2)
    (root / name).symlink_to(tmp_path / target)
    saved = save(root, 3)
    assert untouched(foreign)
    assert not saved.is_symlink()
    assert latest(root) == saved
    assert read_part(saved, 1).scalars == PART.scalars
    assert latest(root / "nothing") is None


@pytest.mark.parametrize("name", ["rank-0.safetensors", "manifest.json", "else"])
def test_a_link_among_the_files_of_a_step_is_not_followed(tmp_path: Path, foreign: Path, name: str) -> None:
    root = tmp_path / "checkpoint"
    partial = root / ".step-00000003.partial"
    partial.mkdir(parents=True)
    (partial / name).symlink_to(foreign / "thesis.tex")
    (partial / "link").symlink_to(foreign)
    assert sorted(os.listdir(save(root, 3))) == ["manifest.json", "rank-0.safetensors", "rank-1.safetensors"]
    assert untouched(foreign)


def test_a_linked_folder_of_checkpoints_is_refused(tmp_path: Path, foreign: Path) -> None:
    (tmp_path / "checkpoint").symlink_to(foreign)
    with pytest.raises(CheckpointError, match="checkpoint is a link, and nothing in a run's folder is followed"):
        latest(tmp_path / "checkpoint")
    with pytest.raises(CheckpointError, match="link, and nothing in a run's folder is followed"):
        write_part(tmp_path / "checkpoint", 1, 0, PART)
    with pytest.raises(OSError, match=r"this is a link, .*: '.*/checkpoint'"):
        files.run_folder(tmp_path)
    assert untouched(foreign)


def test_a_pipe_is_no_checkpoint_and_nothing_waits_for_it(tmp_path: Path) -> None:
    folder = save(tmp_path, 1)
    for name in ("rank-0.safetensors", "manifest.json"):
        (folder / name).unlink()
        os.mkfifo(folder / name)
        with pytest.raises(CheckpointError, match=f"{name} cannot be read"):
            read_part(folder, 0)


# ---- snapshots of shards


@pytest.mark.parametrize(
    "name",
    [
        "snapshot-00000003-shard-0.safetensors.partial",
        "snapshot-00000003-shard-0.json.partial",
        "snapshot-00000003-shard-0.safetensors",
        "snapshot-00000001-shard-0.json",
    ],
)
@pytest.mark.parametrize("target", ["foreign", "foreign/thesis.tex", "nowhere"])
def test_a_snapshot_is_written_beside_a_link(tmp_path: Path, foreign: Path, name: str, target: str) -> None:
    folder = tmp_path / "checkpoint"
    for number in (1, 2):
        snapshot.write(folder, number, 0, b"state", [torch.ones(2)])
    (folder / name).unlink(missing_ok=True)
    (folder / name).symlink_to(tmp_path / target)
    snapshot.write(folder, 3, 0, b"state", [torch.ones(2)])
    assert untouched(foreign)
    assert snapshot.newest_whole(folder, 1) == 3
    snapshot.discard_beyond(folder, None)
    assert untouched(foreign)
    assert os.listdir(folder) == []


# ---- metrics, traces, results


def metrics(path: Path) -> None:
    with MetricsWriter(path.parent) as writer:
        writer.write({"kind": "train", "step": 1})


WRITERS: dict[str, Callable[[Path], None]] = {
    "metrics.jsonl": metrics,
    "trace.json": lambda path: write_chrome_trace(path, [], title="run"),
    "result.json": lambda path: files.replace(path, "{}"),
}


@pytest.mark.parametrize("name", WRITERS)
@pytest.mark.parametrize("suffix", ["", ".tmp"])
def test_a_linked_file_of_a_run_is_replaced(tmp_path: Path, foreign: Path, name: str, suffix: str) -> None:
    path = tmp_path / name
    path.with_name(name + suffix).symlink_to(foreign / "thesis.tex")
    WRITERS[name](path)
    assert untouched(foreign)
    assert path.is_file()
    assert not path.is_symlink()


# ---- JSON


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ("[" * 100_000, "nested too deeply"),
        ("[1, 2", "Expecting"),
        ("9" * 5000, "Exceeds the limit"),
        ("[" + "1," * 600 + "1]", "more than 1,000 bytes"),
    ],
    ids=["deep", "cut", "long number", "large"],
)
def test_json_that_no_run_has_written_is_refused_by_name(tmp_path: Path, content: str, problem: str) -> None:
    path = tmp_path / "result.json"
    path.write_text(content)
    with pytest.raises(ValueError, match=rf"result.json cannot be read as JSON: .*{problem}"):
        files.parsed(path, 1000 if "large" in problem or "more than" in problem else 1_000_000)


@pytest.mark.parametrize(
    ("error", "remedy"),
    [
        (
            OSError(errno.ENOSPC, "full"),
            "PT3001: {path} cannot be written: 7 of 1,000 bytes of its disk are free; free space",
        ),
        (
            OSError(errno.EDQUOT, "full"),
            "PT3001: {path} cannot be written: your share of its disk is used up; free space",
        ),
        (RuntimeError("Error while serializing: I/O error: No space left on device (os error 28)"), "free space"),
        (OSError(errno.EACCES, "denied"), "let this process write"),
        (RuntimeError("Read-only file system (os error 30)"), "let this process write"),
        (OSError(errno.EFBIG, "large"), "ulimit -f"),
        (ConnectionResetError(errno.ECONNRESET, "reset"), "answers"),
    ],
)
def test_a_failed_write_has_the_remedy_of_its_cause(
    error: Exception, remedy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = SimpleNamespace(free=7, total=1000)
    monkeypatch.setattr("shutil.disk_usage", lambda at: disk if at == tmp_path else None)
    path = tmp_path / "run" / "metrics.jsonl"
    assert remedy.format(path=path) in files.problem(error, path)


def test_a_full_disk_has_its_remedy_once(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="PT3001") as caught, files.named(tmp_path):
        raise OSError(errno.ENOSPC, "full")
    assert files.problem(caught.value, tmp_path).count("PT3001") == 1
