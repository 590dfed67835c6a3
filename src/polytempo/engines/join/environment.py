"""The launcher that set this process up, and the process's place in its world."""

from __future__ import annotations

import os
import re
import zlib
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

_LOOPBACK = "127.0.0.1"
_URL = re.compile(r"tcp://(?:\[([^\]]+)\]|([^:\[\]]+)):(\d{1,5})(?:#([0-9a-f]{64}))?")
_FIRST_PORT, _NUM_PORTS = 61440, 4096
"""Ports derived from a job's name are above the range of Linux's ephemeral ports."""
_LAST_ORDINARY_STEP = 0xFFFF_FF00
"""Slurm numbers the steps of srun from 0; batch scripts and interactive shells have ids near 2³²."""


class RankPlace(NamedTuple):
    """A process's place in its world, as its launcher told it.

    `local_size`, `host` (the host's index) and the master's address are None where the launcher
    does not say them or where they are not needed. `generation` counts restarts of the world, where all ranks know it.
    """

    launcher: str
    """"torchrun", "Slurm", "Open MPI", "MPICH", "Intel MPI", "Ray", "Polytempo" or "none"."""
    rank: int
    size: int
    local_rank: int
    local_size: int | None
    host: int | None
    master_address: str | None
    master_port: int | None
    generation: int = 0
    rendezvous: Path | None = None
    """The folder of Polytempo's own engine, which needs no address; its store is the file `store` in it."""

    def __str__(self) -> str:
        if self.launcher == "none":
            return "no launcher: a world of one"
        meeting = self.rendezvous or f"{self.master_address}:{self.master_port}"
        return f"{self.launcher}: rank {self.rank} of {self.size}, meeting at {meeting}"


def hydra_proxy() -> int | None:
    """The process id of Hydra's proxy among this process's ancestors, if there is one."""
    process = os.getpid()
    with suppress(OSError, ValueError):  # no /proc, or an ancestor that has just ended
        while process > 1:
            name, _, fields = Path(f"/proc/{process}/stat").read_text(encoding="utf-8").rpartition(") ")
            if "(hydra_" in name:
                return process
            process = int(fields.split()[1])
    return None


def recognise(environ: Mapping[str, str], proxy: Callable[[], int | None] = hydra_proxy) -> RankPlace:
    """The place that `environ` describes; a world of one where no launcher has left its variables.

    The launcher that is nearest to the process wins: Polytempo's own engine, then torchrun (or RANK,
    WORLD_SIZE, MASTER_ADDR and MASTER_PORT set by Ray or by hand), then Open MPI's mpirun, then Hydra
    (the mpirun of MPICH and of Intel MPI), then a step of Slurm's srun. Variables that contradict each
    other raise a `ValueError` that names them. `proxy` tells Hydra's worlds of one host apart.
    """
    if "POLYTEMPO_RANK" in environ:
        return _checked(_polytempo(environ), "POLYTEMPO_RANK", "POLYTEMPO_SIZE")
    if environ.keys() & {"TORCHELASTIC_RUN_ID", "RANK", "WORLD_SIZE"}:
        return _checked(_torch(environ), "RANK", "WORLD_SIZE")
    if environ.keys() & {"OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"}:
        return _checked(_open_mpi(environ), "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE")
    if "MPI_LOCALRANKID" in environ:
        return _checked(_hydra(environ, proxy), "PMI_RANK", "PMI_SIZE")
    if _num_slurm_tasks(environ) > 1:  # its plugin pmi2 sets PMI_RANK and PMI_SIZE as well
        return _checked(_slurm(environ), "SLURM_PROCID", "SLURM_NTASKS")
    if _integer(environ, "PMI_SIZE", 1) > 1:  # rather than as many worlds of one
        return _checked(_hydra(environ, proxy), "PMI_RANK", "PMI_SIZE")
    return RankPlace("none", 0, 1, 0, 1, None, None, None)


def _polytempo(environ: Mapping[str, str]) -> RankPlace:
    rank, size = _integer(environ, "POLYTEMPO_RANK"), _integer(environ, "POLYTEMPO_SIZE")
    where, generation = _text(environ, "POLYTEMPO_RENDEZVOUS"), _integer(environ, "POLYTEMPO_GENERATION", 0)
    if not where.startswith("tcp://"):
        return RankPlace("Polytempo", rank, size, rank, size, 0, None, None, generation, Path(where))
    address, port = parsed_url(where)
    one_host = address in (_LOOPBACK, "localhost", "::1")
    return RankPlace(
        "Polytempo",
        rank,
        size,
        _integer(environ, "POLYTEMPO_LOCAL_RANK", rank if one_host else 0),
        _maybe_integer(environ, "POLYTEMPO_LOCAL_SIZE", size if one_host else None),
        _maybe_integer(environ, "POLYTEMPO_HOST", 0 if one_host else None),
        address,
        port,
        generation,
    )


def _torch(environ: Mapping[str, str]) -> RankPlace:
    by_ray = "TORCHELASTIC_RUN_ID" not in environ and any(name.startswith("RAY_") for name in environ)
    rank, size = _integer(environ, "RANK"), _integer(environ, "WORLD_SIZE")
    # A world of one meets no other rank, so it needs no address.
    address = _text(environ, "MASTER_ADDR") if size > 1 else environ.get("MASTER_ADDR")
    port = _integer(environ, "MASTER_PORT") if size > 1 or "MASTER_PORT" in environ else None
    one_host = size == 1 or address in (_LOOPBACK, "localhost", "::1")
    return RankPlace(
        "Ray" if by_ray else "torchrun",
        rank,
        size,
        _integer(environ, "LOCAL_RANK", rank if one_host else 0),
        _maybe_integer(environ, "LOCAL_WORLD_SIZE", size if one_host else None),
        _maybe_integer(environ, "NODE_RANK" if by_ray else "GROUP_RANK", 0 if one_host else None),
        address,
        port,  # and no generation: TORCHELASTIC_RESTART_COUNT is each agent's own (see `elastic_round`)
    )


def _open_mpi(environ: Mapping[str, str]) -> RankPlace:
    rank, size = _integer(environ, "OMPI_COMM_WORLD_RANK"), _integer(environ, "OMPI_COMM_WORLD_SIZE")
    local_rank = _integer(environ, "OMPI_COMM_WORLD_LOCAL_RANK")
    local_size = _integer(environ, "OMPI_COMM_WORLD_LOCAL_SIZE")
    one_host = local_size == size
    address = environ.get("MASTER_ADDR") or (_LOOPBACK if one_host else _address_of_mpirun(environ))
    # Every process of one mpirun, and of no other, has this name.
    job = environ.get("PMIX_NAMESPACE") or environ.get("OMPI_MCA_orte_hnp_uri")
    if job is None and "MASTER_PORT" not in environ:
        raise ValueError("mpirun left no PMIX_NAMESPACE to derive a port from; add: mpirun -x MASTER_PORT=29500")
    port = _integer(environ, "MASTER_PORT", _port(job or ""))
    # OMPI_COMM_WORLD_NODE_RANK is a rank within the node in spite of its name, so the host is known only alone.
    return RankPlace("Open MPI", rank, size, local_rank, local_size, 0 if one_host else None, address, port)


def _address_of_mpirun(environ: Mapping[str, str]) -> str:
    """The host of mpirun (Open MPI up to 4), which is the host of rank 0 unless the hostfile leaves it out."""
    uri = environ.get("OMPI_MCA_orte_hnp_uri", "")
    found = re.search(r"tcp://([^,:]+)|tcp6://\[([^,\]]+)", uri)
    if found is None:
        raise ValueError(
            "Open MPI has spread this world over several hosts and does not say which of them holds rank 0; "
            "add: mpirun -x MASTER_ADDR=<host of rank 0> -x MASTER_PORT=29500"
        )
    return found[1] or found[2]


def _hydra(environ: Mapping[str, str], proxy: Callable[[], int | None]) -> RankPlace:
    """MPICH and Intel MPI. They name neither the job nor the host of rank 0."""
    rank, size = _integer(environ, "PMI_RANK"), _integer(environ, "PMI_SIZE")
    local_rank, local_size = _integer(environ, "MPI_LOCALRANKID"), _integer(environ, "MPI_LOCALNRANKS")
    launcher = "Intel MPI" if any(name.startswith("I_MPI_") for name in environ) else "MPICH"
    one_host = local_size == size
    if size == 1:
        return RankPlace(launcher, rank, size, local_rank, local_size, 0, None, None)
    address, job = environ.get("MASTER_ADDR"), None
    if one_host:  # all ranks are children of one proxy
        number = None if environ.get("MASTER_PORT") else proxy()
        address, job = address or _LOOPBACK, number and f"hydra.{number}"
    elif environ.get("SLURM_JOB_NODELIST"):  # Hydra takes the hosts of the allocation in their order, by one srun
        address = address or first_host(environ["SLURM_JOB_NODELIST"])
        job = f"{_text(environ, 'SLURM_JOB_ID')}.{environ.get('SLURM_STEP_ID')}"
    if address is None or not (job or environ.get("MASTER_PORT")):
        raise ValueError(
            f"{launcher}'s mpirun does not say where the {size} ranks of this world can meet; add: mpirun "
            f"-genv MASTER_ADDR {_LOOPBACK if one_host else '<host of rank 0>'} -genv MASTER_PORT 29500"
        )
    port = _integer(environ, "MASTER_PORT", _port(job or ""))
    return RankPlace(launcher, rank, size, local_rank, local_size, 0 if one_host else None, address, port)


def _num_slurm_tasks(environ: Mapping[str, str]) -> int:
    """Tasks of the step that this process belongs to; 1 outside a step (batch script, interactive shell)."""
    if not {"SLURM_STEP_ID", "SLURM_PROCID"} <= environ.keys():
        return 1
    if _integer(environ, "SLURM_STEP_ID") >= _LAST_ORDINARY_STEP:
        return 1
    return _integer(environ, "SLURM_STEP_NUM_TASKS", _integer(environ, "SLURM_NTASKS", 1))


def _slurm(environ: Mapping[str, str]) -> RankPlace:
    num_hosts = _integer(environ, "SLURM_STEP_NUM_NODES", _integer(environ, "SLURM_NNODES", 1))
    host = _integer(environ, "SLURM_NODEID", 0)
    tasks = _tasks_per_host(environ.get("SLURM_STEP_TASKS_PER_NODE", ""))
    address = environ.get("MASTER_ADDR") or (_LOOPBACK if num_hosts == 1 else _first_slurm_host(environ))
    job = f"{_text(environ, 'SLURM_JOB_ID')}.{environ['SLURM_STEP_ID']}"
    return RankPlace(
        "Slurm",
        _integer(environ, "SLURM_PROCID"),
        _num_slurm_tasks(environ),
        _integer(environ, "SLURM_LOCALID"),
        tasks[host] if host < len(tasks) else None,
        host,
        address,
        _integer(environ, "MASTER_PORT", _port(job)),
    )


def parsed_url(url: str) -> tuple[str, int]:
    """The host and the port of a rendezvous. ValueError for another text."""
    match = _URL.fullmatch(url)
    if match is None:
        raise ValueError(f"a rendezvous is at tcp://host:port, not at {url.partition('#')[0]!r}")
    return match[1] or match[2], int(match[3])


def token_in(url: str) -> bytes:
    """The secret of a rendezvous, which stands behind its address. ValueError where there is none."""
    match = _URL.fullmatch(url)
    if match is None or match[4] is None:
        raise ValueError(
            f"the rendezvous at {url.partition('#')[0]!r} has no token of 64 hexadecimal digits (tcp://host:port#token)"
        )
    return bytes.fromhex(match[4])


def _first_slurm_host(environ: Mapping[str, str]) -> str:
    """The host of rank 0. The launch node comes last: a srun typed on a login node has no rank there."""
    for name in ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST"):
        if environ.get(name):
            return first_host(environ[name])
    return _text(environ, "SLURM_LAUNCH_NODE_IPADDR")


def first_host(hosts: str) -> str:
    """The first name of a Slurm host list: `node[003-005,8],login1` begins with `node003`."""
    return re.sub(r"\[([^],-]+)[^]]*\]", r"\1", hosts).split(",")[0]


def _tasks_per_host(text: str) -> list[int]:
    """Slurm's `2(x3),1` is [2, 2, 2, 1]."""
    pairs = re.findall(r"(\d+)(?:\(x(\d+)\))?", text)
    return [int(count) for count, times in pairs for _ in range(int(times or 1))]


def _port(job: str) -> int:
    """The same port on every rank of a job, rarely the port of another job on the same host."""
    return _FIRST_PORT + zlib.crc32(job.encode()) % _NUM_PORTS


def _text(environ: Mapping[str, str], name: str) -> str:
    value = environ.get(name)
    if not value:
        known = {key: environ[key] for key in _NAMES if key in environ}
        raise ValueError(f"{name} is not set, though a launcher has set {known}; set it, or unset those")
    return value


def _integer(environ: Mapping[str, str], name: str, default: int | None = None) -> int:
    if default is not None and not environ.get(name):
        return default
    value = _text(environ, name)
    if not value.isdecimal():
        raise ValueError(f"{name}={value!r} must be a whole number that is not negative")
    return int(value)


def _maybe_integer(environ: Mapping[str, str], name: str, default: int | None) -> int | None:
    return _integer(environ, name) if environ.get(name) else default


def _checked(place: RankPlace, rank_name: str, size_name: str) -> RankPlace:
    if place.rank >= place.size:
        raise ValueError(f"{rank_name}={place.rank} must be less than {size_name}={place.size}")
    if place.local_size is not None and not place.local_rank < place.local_size <= place.size:
        raise ValueError(
            f"local rank {place.local_rank} of {place.local_size} on this host does not fit {size_name}={place.size}"
        )
    if place.master_port is not None and not 0 < place.master_port < 65536:
        raise ValueError(f"MASTER_PORT={place.master_port} must be between 1 and 65535")
    return place


_NAMES = (
    "POLYTEMPO_RANK",
    "POLYTEMPO_SIZE",
    "TORCHELASTIC_RUN_ID",
    "RANK",
    "WORLD_SIZE",
    "OMPI_COMM_WORLD_RANK",
    "OMPI_COMM_WORLD_SIZE",
    "MPI_LOCALRANKID",
    "PMI_RANK",
    "PMI_SIZE",
    "SLURM_STEP_ID",
    "SLURM_PROCID",
)
