"""Checkpoints: written bytes are read back or refused by name; the previous one survives anything."""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from polytempo.core import Mesh
from polytempo.core.state import Scalar
from polytempo.training.checkpoint.checkpoint_files import CheckpointPart, commit, read_manifest, read_part, write_part
from polytempo.training.checkpoint.checkpoint_folders import CheckpointError, latest
from polytempo.training.checkpoint.manifest import encoded

DTYPES = [
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.int8,
    torch.uint8,
    torch.bool,
]


class Crash(BaseException):
    """The process stops here: no handler of `Exception` sees it."""


def part(value: float) -> CheckpointPart:
    return CheckpointPart(
        {"weight": torch.full((3, 2), value), "step": torch.tensor(7)}, {"epoch": value, "name": "digits"}
    )


def save(root: Path, step: int, ranks: int = 2) -> Path:
    """A checkpoint with every rank's weight set to the number of the step."""
    return commit(root, step, [write_part(root, step, rank, part(step)) for rank in range(ranks)], {"seed": 3})


def assert_equal(got: CheckpointPart, expected: CheckpointPart) -> None:
    assert got.scalars == expected.scalars
    assert got.tensors.keys() == expected.tensors.keys()
    for name, tensor in expected.tensors.items():
        assert got.tensors[name].dtype == tensor.dtype
        assert got.tensors[name].shape == tensor.shape
        assert bits(got.tensors[name]) == bits(tensor)


def bits(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.detach().clone(memory_format=torch.contiguous_format).view(-1).view(torch.uint8).tolist())


# ---- round trips ----


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (0,), (0, 4), (1,), (5, 3)], ids=str)
def test_round_trip_is_bitwise(tmp_path: Path, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    raw = torch.randint(0, 256, (math.prod(shape) * dtype.itemsize,), dtype=torch.uint8)
    tensor = (raw % 2 if dtype is torch.bool else raw).view(dtype).view(shape)  # any bits: NaN payloads, -0.0 …
    saved = CheckpointPart({"x": tensor}, {})
    folder = commit(tmp_path, 1, [write_part(tmp_path, 1, 0, saved)], {})
    assert_equal(read_part(folder, 0), saved)


def test_views_shared_memory_and_gradients_are_saved_as_values(tmp_path: Path) -> None:
    base = torch.arange(12.0).view(3, 4)
    parameter = torch.nn.Parameter(base.clone())
    complex_ones = torch.tensor([1 + 2j, 3 - 4j])
    saved = CheckpointPart(
        {"base": base, "tied": base, "transposed": base.T, "column": base[:, 1], "expanded": base[:1].expand(3, 4)}
        | {"parameter": parameter, "negated": complex_ones.conj().imag},
        {},
    )
    folder = commit(tmp_path, 1, [write_part(tmp_path, 1, 0, saved)], {})
    loaded = read_part(folder, 0)
    assert_equal(loaded, CheckpointPart({**saved.tensors, "negated": torch.tensor([-2.0, 4.0])}, {}))
    loaded.tensors["base"].zero_()
    assert loaded.tensors["tied"][0, 1] == 1.0, "what is loaded shares no memory"


def test_scalars_and_notes_round_trip(tmp_path: Path) -> None:
    scalars: dict[str, Scalar] = {
        "i": -(2**63),
        "f": 0.1 + 0.2,
        "inf": math.inf,
        "s": 'naïve "x"\n',
        "t": True,
        "none": None,
    }
    folder = commit(
        tmp_path, 5, [write_part(tmp_path, 5, 0, CheckpointPart({}, scalars))], {"strategy": "local_sgd(period=8)"}
    )
    assert read_part(folder, 0) == CheckpointPart({}, scalars)
    manifest = read_manifest(folder)
    assert (manifest.step, len(manifest.parts)) == (5, 1)
    assert manifest.about == {"strategy": "local_sgd(period=8)"}


def test_each_rank_has_its_own_part(tmp_path: Path) -> None:
    parts = [part(float(rank)) for rank in range(3)]
    folder = commit(tmp_path, 2, [write_part(tmp_path, 2, rank, parts[rank]) for rank in range(3)], {})
    for rank in range(3):
        assert_equal(read_part(folder, rank), parts[rank])
    with pytest.raises(ValueError, match=r"ranks 0 to 2; there is no rank 3"):
        read_part(folder, 3)


# ---- meshes ----


def test_the_manifest_says_where_each_part_was(tmp_path: Path) -> None:
    mesh = Mesh((("data", 2), ("model", 3)))
    hashes = [write_part(tmp_path, 1, rank, part(rank)) for rank in range(6)]
    folder = commit(tmp_path, 1, hashes, {}, mesh)
    assert read_manifest(folder).mesh == mesh
    entries = json.loads((folder / "manifest.json").read_text())["parts"]
    assert [entry["coordinates"] for entry in entries] == [mesh.coordinates(rank) for rank in range(6)]
    assert entries[4]["coordinates"] == {"data": 1, "model": 1}


def test_a_mesh_of_another_size_is_refused(tmp_path: Path) -> None:
    sha256 = write_part(tmp_path, 1, 0, part(1))
    with pytest.raises(ValueError, match=r"a mesh\(data=2, model=1\) has 2 ranks, and 1 have written"):
        commit(tmp_path, 1, [sha256], {}, Mesh((("data", 2), ("model", 1))))


def test_checkpoints_of_version_1_are_read(tmp_path: Path) -> None:
    folder = save(tmp_path, 5)
    manifest = read_manifest(folder)
    (folder / "manifest.json").write_bytes(encoded(manifest, version=1))
    assert set(json.loads((folder / "manifest.json").read_text())["parts"][0]) == {"name", "num_bytes", "sha256"}
    assert read_manifest(folder) == manifest
    assert manifest.mesh == Mesh((("data", 2),))
    assert_equal(read_part(folder, 1), part(5))


# ---- wrong arguments ----


def test_what_cannot_be_saved_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"scalar 'x' is a Tensor; put a tensor into `tensors`"):
        write_part(tmp_path, 1, 0, CheckpointPart({}, {"x": torch.ones(1)}))  # type: ignore[dict-item]
    with pytest.raises(ValueError, match="'__metadata__'"):
        write_part(tmp_path, 1, 0, CheckpointPart({"__metadata__": torch.ones(1)}, {}))
    with pytest.raises(ValueError, match="step -1 is negative"):
        write_part(tmp_path, -1, 0, part(1))
    sha256 = write_part(tmp_path, 1, 0, part(1))
    with pytest.raises(ValueError, match="'abc' is not a sha256"):
        commit(tmp_path, 1, ["abc"], {})
    with pytest.raises(ValueError, match="shorten `about`"):
        commit(tmp_path, 1, [sha256], {"note": "x" * 5_000_000})


def test_commit_refuses_missing_and_short_parts(tmp_path: Path) -> None:
    hashes = [write_part(tmp_path, 1, rank, part(1)) for rank in range(2)]
    file = tmp_path / ".step-00000001.partial" / "rank-1.safetensors"
    content = file.read_bytes()
    file.write_bytes(content[:-1])
    with pytest.raises(CheckpointError, match=r"rank-1\.safetensors has \d+ bytes instead of \d+"):
        commit(tmp_path, 1, hashes, {})
    file.unlink()
    with pytest.raises(CheckpointError, match=r"rank-1\.safetensors is missing .* one shared folder"):
        commit(tmp_path, 1, hashes, {})
    assert latest(tmp_path) is None


# ---- damage ----


@pytest.fixture(scope="module")
def saved_root() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as folder:
        save(Path(folder), 100)
        save(Path(folder), 200)
        yield Path(folder)


def read_everything(folder: Path) -> None:
    for rank in range(2):
        read_part(folder, rank)


def refused_after(root: Path, name: str, damage: Callable[[bytes], bytes]) -> str:
    """Damage one file of the newest checkpoint, expect it to be refused by name, and repair it."""
    folder = latest(root)
    assert folder is not None
    file = folder / name
    content = file.read_bytes()
    file.write_bytes(damage(content))
    try:
        with pytest.raises(CheckpointError) as caught:
            read_everything(folder)
    finally:
        file.write_bytes(content)
    assert str(file) in str(caught.value)
    assert f"delete {folder} to fall back to {root / 'step-00000100'}" in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("name", ["rank-0.safetensors", "rank-1.safetensors", "manifest.json"])
@given(data=st.data())
def test_any_flipped_bit_is_refused(saved_root: Path, name: str, data: st.DataObject) -> None:
    size = (saved_root / "step-00000200" / name).stat().st_size
    position = data.draw(st.integers(0, size - 1))
    bit = data.draw(st.integers(0, 7))

    def flip(content: bytes) -> bytes:
        return content[:position] + bytes([content[position] ^ (1 << bit)]) + content[position + 1 :]

    refused_after(saved_root, name, flip)


@pytest.mark.parametrize("name", ["rank-0.safetensors", "manifest.json"])
@given(data=st.data())
def test_any_truncation_is_refused(saved_root: Path, name: str, data: st.DataObject) -> None:
    size = (saved_root / "step-00000200" / name).stat().st_size
    length = data.draw(st.integers(0, size - 1))
    refused_after(saved_root, name, lambda content: content[:length])


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"", "JSONDecodeError"),
        (b"[" * 100_000, "RecursionError"),
        (b"[]", "TypeError"),
        (b"{}", "KeyError"),
        (b" " * (4 * 1024 * 1024 + 1), "larger than 4194304 bytes"),
        (json.dumps({"format": "polytempo-checkpoint", "version": 3}).encode(), "version 3"),
    ],
    ids=["empty", "deep", "list", "no fields", "huge", "newer version"],
)
def test_a_foreign_manifest_is_refused(saved_root: Path, content: bytes, problem: str) -> None:
    assert problem in refused_after(saved_root, "manifest.json", lambda _: content)


def test_more_bytes_than_written_are_refused(saved_root: Path) -> None:
    assert "bytes instead of" in refused_after(saved_root, "rank-1.safetensors", lambda content: content + b"\0")


@pytest.mark.parametrize("name", ["rank-1.safetensors", "manifest.json"])
def test_a_missing_file_is_refused(tmp_path: Path, name: str) -> None:
    folder = save(tmp_path, 5)
    (folder / name).unlink()
    with pytest.raises(CheckpointError, match=rf"{name} cannot be read .*no earlier checkpoint; delete .* start again"):
        read_everything(folder)


def test_deleting_the_damaged_folder_falls_back(tmp_path: Path) -> None:
    save(tmp_path, 1)
    shutil.rmtree(save(tmp_path, 2))
    folder = latest(tmp_path)
    assert folder == tmp_path / "step-00000001"
    assert_equal(read_part(folder, 0), part(1))


# ---- which ones stay ----


def names(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir())


def test_the_newest_two_stay(tmp_path: Path) -> None:
    assert latest(tmp_path) is None
    assert latest(tmp_path / "absent") is None
    for step in (10, 20, 30, 40):
        assert save(tmp_path, step) == latest(tmp_path)
    assert names(tmp_path) == ["step-00000030", "step-00000040"]


def test_a_run_that_starts_over_outdates_later_steps(tmp_path: Path) -> None:
    for step in (10, 1000, 20):
        save(tmp_path, step)
    assert names(tmp_path) == ["step-00000010", "step-00000020"]


def test_leftovers_go_but_a_rank_ahead_is_left_alone(tmp_path: Path) -> None:
    save(tmp_path, 10)
    write_part(tmp_path, 15, 0, part(15))  # of a run that died
    write_part(tmp_path, 30, 1, part(30))  # of rank 1, which did not wait for the commit of step 20
    (tmp_path / "notes.txt").write_text("not ours")
    save(tmp_path, 20)
    assert names(tmp_path) == [".step-00000030.partial", "notes.txt", "step-00000010", "step-00000020"]


def test_saving_a_step_again_replaces_it_with_other_ranks(tmp_path: Path) -> None:
    save(tmp_path, 10, ranks=3)
    for rank in range(3):
        write_part(tmp_path, 10, rank, part(-1))
    sha256 = write_part(tmp_path, 10, 0, part(11))
    folder = commit(tmp_path, 10, [sha256], {})
    assert names(tmp_path) == ["step-00000010"]
    assert names(folder) == ["manifest.json", "rank-0.safetensors"]
    assert_equal(read_part(folder, 0), part(11))


# ---- crashes ----


@pytest.mark.parametrize("function", ["fsync", "rename", "rmtree", "unlink"])
@pytest.mark.parametrize("step", [30, 20], ids=["a new step", "a step again"])
def test_a_crash_anywhere_leaves_a_loadable_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, function: str, step: int
) -> None:
    """Stop at the first call of `function`, start again from the remaining files, stop at the second, and so on."""
    home = shutil if function == "rmtree" else os
    real = getattr(home, function)
    for crash_at in range(100):
        root = tmp_path / str(crash_at)
        for earlier in (10, 20):
            save(root, earlier)
        calls = 0

        def stop(*arguments: object, crash_at: int = crash_at, **options: object) -> object:
            nonlocal calls
            calls += 1
            if calls > crash_at:
                raise Crash
            return real(*arguments, **options)

        monkeypatch.setattr(home, function, stop)
        crashed = True
        try:
            hashes = [write_part(root, step, rank, part(step + 1)) for rank in range(2)]
            commit(root, step, hashes, {})
            crashed = False
        except Crash:
            pass
        monkeypatch.setattr(home, function, real)
        folder = latest(root)
        assert folder is not None
        weight = read_part(folder, 1).tensors["weight"][0, 0].item()
        assert weight in ({20, 31} if step == 30 else {20, 21})
        assert (weight == step + 1) or crashed
        save(root, 40)
        assert latest(root) == root / "step-00000040"
        assert [name for name in names(root) if name.startswith(".")] == []
        assert len(names(root)) == 2
        if not crashed:
            return
    raise AssertionError(f"{function} is called more than 100 times")


def test_a_full_disk_leaves_the_previous_checkpoint(tmp_path: Path) -> None:
    """The kernel's limit on the size of files stands for a full disk."""
    save(tmp_path, 10)
    script = """
import resource, sys, torch
from pathlib import Path
from polytempo.core.state import Scalar
from polytempo.training.checkpoint.checkpoint_files import CheckpointPart, write_part
from polytempo.training.checkpoint.checkpoint_folders import CheckpointError
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
try:
    write_part(Path(sys.argv[1]), 20, 0, CheckpointPart({"x": torch.ones(1_000_000)}, {}))
except CheckpointError as error:
    print(error)
"""
    told = subprocess.run([sys.executable, "-c", script, str(tmp_path)], capture_output=True, text=True, check=True)
    assert "cannot write" in told.stdout
    assert "rank-0.safetensors" in told.stdout
    assert f"The checkpoint {tmp_path / 'step-00000010'} is untouched." in told.stdout
    assert list((tmp_path / ".step-00000020.partial").iterdir()) == []
    assert latest(tmp_path) == tmp_path / "step-00000010"
    read_everything(tmp_path / "step-00000010")


def test_an_unwritable_folder_is_told(tmp_path: Path) -> None:
    (tmp_path / "checkpoint").write_text("a file where the folder should be")
    with pytest.raises(CheckpointError, match=r"cannot write .* There is no earlier checkpoint\."):
        write_part(tmp_path / "checkpoint", 1, 0, part(1))
