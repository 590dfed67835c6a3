"""The mpi engine by Open MPI and by MPICH, and worlds that they have started (Debian: openmpi-bin, mpich)."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from engines.batch_runs import (
    DETERMINISTIC,
    LONG_S,
    SAMPLES,
    SERVED,
    agents,
    begun,
    digits,
    hash_here,
    marked,
    processes,
    result,
    train,
)
from polytempo.engines.mpi_engine import Mpi

pytestmark = [pytest.mark.process, pytest.mark.timeout(900)]

KINDS = {
    "Open MPI": Mpi(mpirun="mpirun.openmpi", agents=2, options=["--allow-run-as-root", "--oversubscribe"]),
    "MPICH": Mpi(mpirun="mpirun.mpich", agents=2),
}
COMMANDS = {name: [setup.mpirun, *setup.options, "-n", "2"] for name, setup in KINDS.items()}
BY_MPI = (
    "import sys; from engines.batch_runs import digits; from engines.test_mpi import KINDS; "
    "from pathlib import Path; name, strategy, epochs, out = sys.argv[1:]; "
    "digits(strategy, KINDS[name], epochs=int(epochs), out=Path(out.removeprefix('--out=')))"
)
"""A program that trains by one of them in the folder that it is given last."""


@pytest.fixture(autouse=True)
def mark() -> Iterator[str]:
    """A test's processes have ended after it."""
    with marked() as mark:
        yield mark


@pytest.mark.parametrize("strategy", DETERMINISTIC)
@pytest.mark.parametrize("name", KINDS)
def test_two_agents_reach_the_bits_of_this_host(name: str, strategy: str, tmp_path: Path) -> None:
    found = digits(strategy, KINDS[name], out=tmp_path / "run")
    assert found.parameters_sha256 == hash_here(strategy)
    assert {path.name for path in (tmp_path / "run" / "logs").iterdir()} >= {"rank-0.log", "rank-1.log"}


def program(name: str, strategy: str, epochs: int) -> list[str]:
    """The command of `BY_MPI`, without the folder."""
    return [sys.executable, "-c", BY_MPI, name, strategy, str(epochs)]


@pytest.mark.parametrize("name", KINDS)
def test_a_parameter_server_outlives_an_agent(name: str, tmp_path: Path, mark: str) -> None:
    """mpirun itself would end all of its processes as soon as one is killed."""
    with begun(program(name, SERVED, 20), tmp_path / "run") as process:
        os.kill(agents(mark)[-1], signal.SIGKILL)
        said = process.communicate(timeout=LONG_S)[0]
        assert process.returncode == 0, said
    assert result(tmp_path / "run")["samples"] == 20 * SAMPLES


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
@pytest.mark.parametrize("name", KINDS)
def test_a_run_that_is_ended_leaves_no_process(name: str, number: signal.Signals, tmp_path: Path, mark: str) -> None:
    """And while it goes on, its keys are on no command line. The fixture looks for remains."""
    with begun(program(name, "sync_sgd()", 10_000), tmp_path / "run") as process:
        assert len(agents(mark)) == 2
        for each in processes(mark):
            assert b"polytempo-ticket" not in Path(f"/proc/{each}/cmdline").read_bytes()
        process.send_signal(number)
        process.communicate(timeout=LONG_S)


@pytest.mark.parametrize("name", KINDS)
def test_a_world_that_mpirun_has_started_is_joined(name: str, tmp_path: Path) -> None:
    """Every process is a worker, without an engine of ours."""
    out = tmp_path / "run"
    command = [*COMMANDS[name], *train("--epochs=2", f"--out={out}")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LONG_S, check=False)
    assert done.returncode == 0, done.stderr
    assert f"polytempo: {name}, 2 ranks on 1 host" in done.stderr
    assert result(out)["parameters_sha256"] == hash_here("sync_sgd()")


@pytest.mark.parametrize("name", KINDS)
def test_two_worlds_of_one_host_do_not_meet(name: str) -> None:
    """Each is behind a shell, and at the same time; the port follows from their differences."""
    code = "import os; from polytempo.engines.join.environment import recognise; "
    code += "print('', recognise(os.environ).master_port, '')"
    command = [*COMMANDS[name], "sh", "-c", '"$@"; true', "sh", sys.executable, "-c", code]
    worlds = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    ports = [world.communicate(timeout=LONG_S)[0].split() for world in worlds]
    assert [len(each) for each in ports] == [2, 2]
    assert [len(set(each)) for each in ports] == [1, 1]
    assert ports[0] != ports[1]
