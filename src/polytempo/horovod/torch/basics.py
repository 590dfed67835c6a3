"""`init`, `shutdown`, and a process's questions about its place."""

from __future__ import annotations

import atexit
import os
from collections.abc import Sequence
from typing import Any, Literal

import torch

from polytempo.device import nccl_version
from polytempo.horovod.negotiation.message import WHOLE, Kind, TensorRequest
from polytempo.horovod.runtime.operation import Operation
from polytempo.horovod.runtime.session import Session
from polytempo.horovod.runtime.settings import HorovodSettings
from polytempo.horovod.torch.process_state import PROCESS, ProcessSet


def init(comm: Sequence[int] | None = None, process_sets: Sequence[ProcessSet] | str | None = None) -> None:
    """Join the ranks that the launcher has started (torchrun, mpirun, Slurm, Ray, `polytempo.horovod.run`, or none).

    `process_sets` are registered immediately; "dynamic", as Horovod has it, is accepted and changes nothing: sets can
    always be added. `comm` may name all ranks. Calling it again does nothing. Errors: ValueError.
    """
    if is_initialized():
        return
    given: Sequence[ProcessSet] = []
    if isinstance(process_sets, str):
        if process_sets.lower() != "dynamic":
            raise ValueError(f'process_sets is a list of ProcessSet or "dynamic", got {process_sets!r}')
    else:
        given = list(process_sets or [])
    numbered = {number: list(each.ranks or []) for number, each in enumerate(given, WHOLE + 1)}
    settings, place = HorovodSettings.from_environment(os.environ), PROCESS.place
    if place is None:
        session = Session(numbered, settings, next(PROCESS.session_numbers))
    else:
        session = place.join(settings.end_s, lambda world, look: Session(numbered, settings, 0, world, look))
    rank, size = session.world.rank, session.world.size
    taken = [list(range(size))]
    for ranks in numbered.values():
        if not ranks or not set(ranks) <= set(range(size)) or len(set(ranks)) != len(ranks) or ranks in taken:
            session.close()
            raise ValueError(
                f"a process set has some of the ranks 0 to {size - 1}, each once, and no two sets have the same; got "
                f"{ranks} and {taken}"
            )
        taken.append(ranks)
    if comm is not None and list(comm) != list(range(size)):
        session.close()
        raise ValueError(
            f"comm={comm} is not the list of all {size} ranks; start as many processes as are to take part, and use "
            "process sets for parts of them"
        )
    PROCESS.everyone.bind(WHOLE, range(size), rank)
    for number, each in enumerate(given, WHOLE + 1):
        each.bind(number, numbered[number], rank)
    PROCESS.sets = list(given)
    PROCESS.session = session


def shutdown() -> None:
    """Leave. Operations of other ranks that wait for this one raise `HorovodInternalError`. Also done at exit."""
    session, PROCESS.session = PROCESS.session, None
    if session is not None:
        session.close()
    if (place := PROCESS.place) is not None:
        place.close()
    for each in (PROCESS.everyone, *PROCESS.sets):
        each.unbind()
    PROCESS.sets = []


atexit.register(shutdown)


def is_initialized() -> bool:
    """True after `init`, until `shutdown`."""
    return PROCESS.session is not None


# ---------------------------------------------------------------------- where this process is


def size() -> int:
    """The number of ranks."""
    return PROCESS.opened().world.size


def rank() -> int:
    """This process's rank."""
    return PROCESS.opened().world.rank


def local_size() -> int:
    """The number of ranks on this host."""
    return len(_local())


def local_rank() -> int:
    """This process's place among the ranks of its host."""
    return _local().index(rank())


def cross_size() -> int:
    """The number of hosts that have a rank with this `local_rank`."""
    return len(_cross())


def cross_rank() -> int:
    """This host's place among them."""
    return _cross().index(PROCESS.opened().hosts[rank()])


def is_homogeneous() -> bool:
    """True if all hosts have equally many ranks."""
    hosts = PROCESS.opened().hosts
    return len({hosts.count(host) for host in hosts}) == 1


def _local() -> list[int]:
    hosts = PROCESS.opened().hosts
    return [other for other, host in enumerate(hosts) if host == hosts[rank()]]


def _cross() -> list[int]:
    hosts, place = PROCESS.opened().hosts, local_rank()
    return [host for host in dict.fromkeys(hosts) if hosts.count(host) > place]


# ---------------------------------------------------------------------- its parts


def gloo_built(verbose: bool = False) -> bool:
    """True: between hosts gloo carries the tensors."""
    return True


def gloo_enabled() -> bool:
    """True, as `gloo_built`."""
    return PROCESS.opened() is not None


def mpi_built(verbose: bool = False) -> bool:
    """False: no MPI takes part; processes that mpirun has started are recognised."""
    return False


def mpi_enabled() -> bool:
    """False, as `mpi_built`."""
    return False


def mpi_threads_supported() -> bool:
    """ValueError: no MPI takes part."""
    raise ValueError("Horovod MPI is not enabled; no MPI takes part here.")


def nccl_built() -> int:
    """NCCL's version as a number, 22703 for 2.27.3; 0 where this torch has none. Tensors on CUDA travel by it."""
    major, minor, patch = nccl_version()
    return 10_000 * major + 100 * minor + patch


def cuda_built() -> bool:
    """True if this torch is built with CUDA."""
    return torch.version.cuda is not None


def rocm_built() -> bool:
    """True if this torch is built with ROCm."""
    return torch.version.hip is not None


def ddl_built() -> bool:
    """False."""
    return False


def ccl_built() -> bool:
    """False."""
    return False


# ---------------------------------------------------------------------- timeline


def start_timeline(file_path: str | os.PathLike[str], mark_cycles: bool = False) -> None:
    """Rank 0 begins to write negotiations and operations to `file_path`, for chrome://tracing or Perfetto.

    A timeline that is being written is ended. `mark_cycles`: also the instants of rank 0's submissions. The other ranks
    may call it, too, and do nothing. Results stay the same. Errors: ValueError before `init`, OSError where the file
    cannot be made.
    """
    PROCESS.opened().start_timeline(os.fspath(file_path), mark_cycles)


def stop_timeline() -> None:
    """End the timeline; its file is whole. Does nothing where there is none. ValueError before `init`."""
    PROCESS.opened().stop_timeline()


# ---------------------------------------------------------------------- process sets


def add_process_set(process_set: ProcessSet | Sequence[int]) -> ProcessSet:
    """Register a process set, which is given back. All ranks call it, with the same ranks.

    Errors: ValueError where there is one of these ranks already, `HorovodInternalError` where ranks disagree.
    """
    added = process_set if isinstance(process_set, ProcessSet) else ProcessSet(process_set)
    if added.process_set_id is not None:
        raise ValueError(f"{added} is registered already")
    ranks = tuple(added.ranks or ())
    exists = ranks in PROCESS.opened().member.sets.values()
    operation = _begun("add", ranks)
    if exists:  # the other ranks hear of it, with any set
        raise ValueError(f"there is a process set of ranks {list(ranks)} already; use that, or remove it first")
    added.bind(int(_performed(operation)), ranks, rank())
    PROCESS.sets.append(added)
    return added


def remove_process_set(process_set: ProcessSet) -> bool:
    """Remove a process set; operations that still wait in it are errors. All ranks call it. False for a set that is not
    registered, and for the set of all ranks."""
    number = process_set.process_set_id
    if number is None or number == WHOLE:
        return False
    _performed(_begun("remove", (number,)))
    process_set.unbind()
    if process_set in PROCESS.sets:
        PROCESS.sets.remove(process_set)
    return True


def _begun(change: Literal["add", "remove"], numbers: tuple[int, ...]) -> Operation:
    name = f"{change}_process_set.{next(PROCESS.change_numbers)}"
    kind: Kind = "add_set" if change == "add" else "remove_set"
    operation = Operation(TensorRequest(name, kind, numbers=numbers, lasting=False), [], [])
    PROCESS.opened().runtime.submit(operation)
    return operation


def _performed(operation: Operation) -> Any:
    PROCESS.opened().runtime.wait(operation)
    return operation.answer
