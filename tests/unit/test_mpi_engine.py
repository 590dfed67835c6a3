"""The mpi engine's calls of mpirun, with stand-ins of its three kinds."""

from __future__ import annotations

from pathlib import Path

import pytest

import polytempo as pt
from polytempo.engines.engine import Launch, parse_engine
from polytempo.engines.mpi_engine import Mpi, family


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ("mpirun.openmpi (OpenRTE) 4.1.4\n\nReport bugs to http://www.open-mpi.org/community/help/", "Open MPI"),
        ("mpirun (Open MPI) 5.0.3", "Open MPI"),
        ("HYDRA build details:\n    Version:       4.0.2", "Hydra"),
        ("Intel(R) MPI Library for Linux* OS, Version 2021.12 Build 20240213", "Hydra"),
    ],
)
def test_the_kind_of_an_mpirun_is_what_it_says_of_itself(said: str, expected: str, tmp_path: Path) -> None:
    assert family(stand_in(tmp_path, said)) == expected


def stand_in(folder: Path, said: str) -> str:
    """A program that prints `said`."""
    program = folder / "mpirun"
    program.write_text(f"#!/bin/sh\ncat <<END\n{said}\nEND\n")
    program.chmod(0o700)
    return str(program)


def test_another_program_and_none_at_all_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"is of no known kind \('lam 7'\); Open MPI, MPICH and Intel MPI are known"):
        family(stand_in(tmp_path, "lam 7"))
    with pytest.raises(ValueError, match=r"mpirun='no-mpirun' cannot be run .*install Open MPI or MPICH"):
        family("no-mpirun")


def test_the_words_of_open_mpi() -> None:
    """One agent on each host, bound to no core, and secrets passed on by name."""
    setup = Mpi(["n1", "n2"], python="python3", environment={"PYTHONPATH": "/src"}, options=["--oversubscribe"])
    words = setup.words("Open MPI")
    assert " ".join(words[: words.index("sh")]) == (
        "mpirun -n 2 --host n1,n2 --map-by node --bind-to none -x POLYTEMPO_TICKET -x PYTHONPATH --oversubscribe"
    )
    assert words[-4:] == ["python3", "-P", "-m", "polytempo.agent"]


def test_the_words_of_hydra() -> None:
    words = Mpi(["n1", "n2"], mpirun="mpiexec").words("Hydra")
    assert " ".join(words[: words.index("sh")]) == "mpiexec -n 2 -hosts n1,n2 -ppn 1"
    assert " ".join(Mpi(agents=3).words("Hydra")[:3]) == "mpirun -n 3"


@pytest.mark.parametrize(
    ("text", "setup"), [("mpi", Mpi()), ("mpi:n1", Mpi(("n1",))), ("mpi:n1,n2", Mpi(("n1", "n2")))]
)
def test_the_command_line_names_hosts(text: str, setup: Mpi) -> None:
    assert parse_engine(text) == setup


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"hosts": "n1"}, "hosts='n1' must be a list of names"),
        ({"hosts": ["n1", "n1"]}, "names a host twice"),
        ({"hosts": ["-x"]}, "'-x' is not a host's name"),
        ({"hosts": ["n1:4"]}, "'n1:4' is not a host's name"),
        ({"hosts": [""]}, "'' is not a host's name"),
        ({"agents": 0}, "agents=0"),
        ({"hosts": ["n1", "n2"], "agents": 3}, "agents=3 with hosts="),
    ],
)
def test_what_cannot_be_hosts_is_refused(given: dict[str, object], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        pt.engines.mpi(**given)


def test_mpirun_does_not_start_inside_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "1", "SIZE": "2", "LOCAL_RANK": "1", "LOCAL_SIZE": "2"}.items():
        monkeypatch.setenv(f"OMPI_COMM_WORLD_{name}", value)
    monkeypatch.setenv("PMIX_NAMESPACE", "job")
    with pytest.raises(ValueError, match="this process is rank 1 of 2 that Open MPI has started"):
        pt.engines.mpi().open(Launch(lambda role: None, None, dict, 1, 1)).__enter__()
