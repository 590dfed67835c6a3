"""`polytempo bench`: its measurements, counts, output and refusals."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from polytempo.bench import collectives, limit, memory, mpi, mpi_rank, tables, training, turns
from polytempo.bench.machine import SCHEMA
from polytempo.bench.operations import OPERATIONS
from polytempo.bench.pictures import write_picture
from polytempo.cli.options.values import sizes

pytestmark = pytest.mark.process

TOP = {"schema", "benchmark", "begun", "command", "machine", "settings", "missing", "rows"}
MACHINE = {"cpu", "cores", "memory_bytes", "kernel", "system", "python", "torch", "native"}
FIGURE = {"median_us", "low_us", "high_us", "mean_us", "rounds_us"}


def written(result: dict[str, Any], folder: Path) -> str:
    """The result as Markdown, with its picture, in the promised layout."""
    assert (set(result), result["schema"], set(result["machine"])) == (TOP, SCHEMA, MACHINE)
    assert json.loads(json.dumps(result)) == result
    write_picture(folder / "picture.png", result)
    assert (folder / "picture.png").read_bytes()[:4] == b"\x89PNG"
    return tables.markdown(tables.table(result))


@pytest.mark.parametrize("size", [2, 3])
def test_every_operation_is_measured(tmp_path: Path, size: int) -> None:
    """A row each, and one more for all-reduce of tensors in the arena; answers were compared before any was timed."""
    result = collectives.collectives(collectives.CollectivesPlan([size], [4096], list(OPERATIONS), 2, 0.001))
    rows = {(row["operation"], row["tensors"]): row for row in result["rows"]}
    assert set(rows) == {(name, "any") for name in OPERATIONS} | {("all_reduce", "arena")}
    for (name, _), row in rows.items():
        assert row["bytes"] == (0 if name == "barrier" else 4096)
        for who in ("ours", "gloo"):
            assert set(row[who]) == FIGURE
            assert 0 < row[who]["low_us"] <= row[who]["median_us"] <= row[who]["high_us"]
        assert (row["limit"] is not None) == (name in ("all_reduce", "barrier"))
        assert row["ratios"]["gloo/ours"]["median"] > 0
    assert f"| all_reduce | arena | {size} | 4 KiB |" in written(result, tmp_path)


def test_training_is_measured(tmp_path: Path) -> None:
    """Every configuration, and one process is once as fast as itself."""
    result = training.training(training.TrainingPlan(["cnn"], 2, 2, 0.001))
    rows = {row["configuration"]: row for row in result["rows"]}
    assert list(rows) == ["one_thread", "threads", "apart", "ddp_gloo", "ddp_polytempo", "shared_memory"]
    assert rows["one_thread"]["ratios"]["one_thread"] == {"median": 1.0, "low": 1.0, "high": 1.0}
    assert all(row["samples_per_s"]["median"] > 0 for row in rows.values())
    assert "| cnn | shared_memory() |" in written(result, tmp_path)


def test_memory_is_measured(tmp_path: Path) -> None:
    """Each worker of DDP has at the peak at least parameters, gradients and Adam's two."""
    result = memory.memory(memory.MemoryPlan(2, 2_000_000, 2))
    ddp, ours = result["rows"]
    assert (ddp["configuration"], ddp["ratio"], ours["configuration"]) == ("ddp_gloo", 1.0, "shared_memory")
    assert ddp["peak_bytes"] - ddp["before_bytes"] > 2 * 4 * 4 * ddp["parameters"]
    assert abs(ddp["parameters"] - 2_000_000) < 100_000
    assert "| shared_memory() | 2 |" in written(result, tmp_path)


def test_without_the_native_core_the_rest_is_measured(tmp_path: Path) -> None:
    """The command line prints one JSON object, writes files in the folder, and gives the reason for missing parts."""
    done = subprocess.run(
        [sys.executable, "-m", "polytempo", "bench", "collectives", "--quick", "--operations", "barrier", "--json"],
        capture_output=True,
        text=True,
        timeout=100,
        cwd=tmp_path,
        env={**os.environ, "POLYTEMPO_NATIVE": "0"},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    (row,) = result["rows"]
    assert (row["ours"], row["limit"], row["ratios"]["gloo/ours"]) == (None, None, None)
    assert row["gloo"]["median_us"] > 0
    assert "POLYTEMPO_NATIVE=0" in result["missing"]["ours"]
    assert "ours is not measured: POLYTEMPO_NATIVE=0 in the environment; unset it" in done.stderr
    folder = tmp_path / "runs" / "bench-collectives"
    assert {path.name for path in folder.iterdir()} == {"result.json", "table.md", "picture.png"}
    assert json.loads((folder / "result.json").read_text()) == result


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        (collectives.CollectivesPlan([1], [4096], ["barrier"], 1, 1.0), "--ranks 1: numbers from 2 to 64"),
        (collectives.CollectivesPlan([2], [7], ["barrier"], 1, 1.0), "--sizes 7: at least 8 bytes"),
        (collectives.CollectivesPlan([2], [1 << 50], ["barrier"], 1, 1.0), "leave the largest out"),
        (collectives.CollectivesPlan([2], [4096], ["reduce"], 1, 1.0), "there is no 'reduce'; there are: all_reduce, "),
        (training.TrainingPlan(["gpt"], 2, 1, 1.0), "there is no 'gpt'; there are: mlp, cnn, embedding, transformer"),
        (training.TrainingPlan(["cnn"], 1, 1, 1.0), "--workers 1: from 2 to 64"),
        (memory.MemoryPlan(4, 10**12, 3), "ask for fewer parameters or workers"),
        (memory.MemoryPlan(4, 1, 3), "at least 2 parameters"),
    ],
)
def test_what_cannot_be_measured_is_refused(plan: Any, message: str) -> None:
    measure = {
        collectives.CollectivesPlan: collectives.collectives,
        training.TrainingPlan: training.training,
        memory.MemoryPlan: memory.memory,
    }
    with pytest.raises(ValueError, match=message):
        measure[type(plan)](plan)


class Alone:
    """A meeting of one."""

    def barrier(self) -> None:
        """There is no other rank to wait for."""

    def agree(self, number: int) -> int:
        """One's own."""
        return number


def test_contenders_take_turns() -> None:
    """Two warm-ups each; then who begins changes from round to round. A turn has 3 calls at least."""
    order: list[tuple[str, int]] = []

    def run(name: str, seconds: float) -> turns.Contender:
        def call(calls: int) -> list[float]:
            order.append((name, calls))
            return [seconds] * (calls - 1) + [4 * seconds]

        return turns.Contender(name, call)

    found = turns.turns([run("a", 1.0), run("b", 0.05)], Alone(), rounds=3, turn_s=0.5)
    assert order[:4] == [("a", 3), ("a", 3), ("b", 3), ("b", 3)]
    assert order[4:] == [("a", 3), ("b", 10), ("b", 10), ("a", 3), ("a", 3), ("b", 10)]
    assert found["a"] == [[1.0, 2.0]] * 3


def test_the_slowest_rank_counts_and_ratios_are_of_rounds() -> None:
    ours = [[[1.0, 2.0], [3.0, 3.0], [2.0, 2.0]], [[2.0, 2.0], [1.0, 9.0], [2.0, 2.0]]]
    peer = [[[4.0, 4.0], [3.0, 3.0], [8.0, 8.0]], [[1.0, 1.0], [1.0, 1.0], [1.0, 1.0]]]
    by_rank = [{"ours": mine, "peer": theirs} for mine, theirs in zip(ours, peer, strict=True)]
    medians, means = turns.slowest(by_rank, "median"), turns.slowest(by_rank, "mean")
    assert medians["ours"] == turns.Measurement(2.0, 2.0, 2.5, [2.0, 3.0, 2.0])
    assert means["ours"].rounds == [2.0, 9.0, 2.0]
    assert turns.ratio(medians["peer"], medians["ours"]) == turns.Ratio(2.0, 1.5, 3.0)


def test_memory_of_one_moment_is_added() -> None:
    """Each worker's last look, once all have looked: 5 + 1, 2 + 1, 2 + 7."""
    assert memory.together([[(0.0, 9), (1.0, 5), (3.0, 2)], [(2.0, 1), (4.0, 7)]]) == 9
    assert memory.together([[(0.0, 9), (2.0, 1)], [(1.0, 3)]]) == 12


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [("4096", 4096), ("4KiB", 4096), ("1.5 MiB", 3 << 19), ("16mib", 16 << 20), ("2MB", 2_000_000), ("1GiB", 1 << 30)],
)
def test_sizes_are_read(text: str, num_bytes: int) -> None:
    assert sizes(text) == (num_bytes,)


@pytest.mark.parametrize("text", ["", "KiB", "4 KiBit", "-4", "4XB"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="must be sizes separated by commas, such as 4096, 4KiB"):
        sizes(text)


@pytest.mark.parametrize(
    ("microseconds", "text"),
    [
        (0.234, "0.23 µs"),
        (18.12, "18.1 µs"),
        (393.0, "393 µs"),
        (1647.0, "1.65 ms"),
        (180_200.0, "180 ms"),
        (2e6, "2.00 s"),
    ],
)
def test_times_are_written_for_people(microseconds: float, text: str) -> None:
    assert tables.duration(microseconds) == text


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [(0, "0 B"), (4096, "4 KiB"), (3 << 19, "1.50 MiB"), (256 << 20, "256 MiB"), (1 << 30, "1 GiB")],
)
def test_memory_is_written_for_people(num_bytes: int, text: str) -> None:
    assert tables.binary(num_bytes) == text


class World:
    """An MPI world of one rank, as mpi4py shows it."""

    def Get_rank(self) -> int:
        return 0

    def Get_size(self) -> int:
        return 1

    def Allreduce(self, sent: Any, received: Any) -> None:
        """A sum of one."""

    def Barrier(self) -> None:
        """There is no other rank to wait for."""


def test_an_mpi_rank_does_what_its_partner_asks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One line a question, one an answer; it ends with the connection."""
    stand_in: Any = ModuleType("mpi4py.MPI")
    stand_in.COMM_WORLD, stand_in.IN_PLACE = World(), None
    monkeypatch.setitem(sys.modules, "mpi4py", ModuleType("mpi4py"))
    monkeypatch.setitem(sys.modules, "mpi4py.MPI", stand_in)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "0"))
        listener.listen(1)
        rank = threading.Thread(target=mpi_rank.main, args=(tmp_path,))
        rank.start()
        with mpi.Partner(listener) as partner:
            assert len(partner.run("all_reduce", 4096)(3)) == 3
            assert len(partner.run("barrier", 0)(2)) == 2
        rank.join(20)
    assert not rank.is_alive()


def test_a_missing_mpi_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mpi, "find_spec", lambda name: None)
    assert mpi.missing() == "no mpi4py in this Python; `pip install mpi4py` brings it"
    monkeypatch.setattr(mpi, "find_spec", lambda name: name)
    monkeypatch.setattr(mpi.shutil, "which", lambda name: None)
    assert "no mpirun on the PATH; install Open MPI" in str(mpi.missing())


def test_there_is_a_limit_where_there_is_a_core() -> None:
    assert limit.missing() is None
