"""`run`: a function on several processes, each with a rank in `polytempo.horovod.torch`."""

from __future__ import annotations

import json
import os
import socket
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from operator import attrgetter
from pathlib import Path
from typing import Any

from polytempo.core.calls.refusals import refuse
from polytempo.device import current_device
from polytempo.engines.local_engine import launch
from polytempo.engines.processes.command_process import ANSWER_FILE
from polytempo.engines.processes.fork_obstacles import fork_obstacles, say_interpreters
from polytempo.engines.processes.worker import RankInfo
from polytempo.horovod.launcher.elastic_ranks import Discover, run_elastic_ranks
from polytempo.horovod.launcher.hosts import HostDiscovery, parsed_hosts, read_hostfile
from polytempo.horovod.launcher.run_ranks import run_ranks
from polytempo.horovod.launcher.settings import ElasticSettings, LaunchSettings
from polytempo.horovod.plain_values import decoded, encoded
from polytempo.horovod.torch.basics import shutdown


def run(
    func: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    num_proc: int | None = None,
    min_num_proc: int | None = None,
    max_num_proc: int | None = None,
    slots: int | None = None,
    reset_limit: int | None = None,
    cooldown_range: Sequence[float] | None = None,
    hosts: str | None = None,
    hostfile: str | Path | None = None,
    start_timeout: float | None = None,
    ssh_port: int | None = None,
    ssh_identity_file: str | None = None,
    disable_cache: bool | None = None,
    output_filename: str | Path | None = None,
    verbose: bool | None = None,
    use_gloo: bool | None = None,
    use_mpi: bool | None = None,
    mpi_args: str | None = None,
    network_interfaces: str | None = None,
    executable: str | None = None,
    np: int | None = None,
    min_np: int | None = None,
    max_np: int | None = None,
    prefix_output_with_timestamp: bool = False,
    host_discovery_script: str | Path | None = None,
) -> list[Any]:
    """Call `func(*args, **kwargs)` in `np` processes; the results by rank: `run(work, np=2)`.

    On this host alone processes are forked from this one, so `func` may be any function; call it before this process
    computes with several threads. Where this process has used a device, or has computed gradients beside one, forks
    could not compute: ranks are then new interpreters, or `Incompatible` (PT1906, PT1907) is raised. With hosts, and in
    an elastic run (`min_np`, `max_np`, `host_discovery_script`), ranks are new interpreters, where `func` is found by
    its module and name; the other arguments are options of
    `polytempo horovodrun`. An elastic run returns the results of the ranks of its last group. Plain values, tensors and
    NumPy arrays can travel (`horovod.plain_values`); TypeError for others.

    Errors: the errors of `polytempo.launch` if processes are forked, else `RanksFailed`; ValueError for refused
    arguments.
    """
    if use_mpi or mpi_args:
        raise ValueError("no MPI takes part: leave use_mpi and mpi_args out")
    size, least, most = num_proc or np, min_num_proc or min_np, max_num_proc or max_np
    is_elastic = bool(least or most or host_discovery_script)
    if not is_elastic and hosts is None and hostfile is None and _forks_compute(func):
        return _forked(func, args, kwargs or {}, size or 1)
    settings = LaunchSettings(
        30.0 if start_timeout is None else start_timeout,
        network_interface=network_interfaces,
        ssh_port=ssh_port,
        ssh_identity_file=ssh_identity_file,
        timestamps=prefix_output_with_timestamp,
        verbose=bool(verbose),
        output=None if output_filename is None else Path(output_filename),
        exported={"HOROVOD_CACHE_CAPACITY": "0"} if disable_cache else {},
    )
    given = _hosts(hosts, hostfile, slots or size or most or 1)
    words, text = (executable or sys.executable, *WORDS), called(func, args, kwargs or {})
    if not is_elastic:
        answers = run_ranks(words, size or sum(given.values()), given, settings, text)
    else:
        elastic = ElasticSettings.of(size, least, most, reset_limit=reset_limit, cooldown_s=cooldown_range)
        script = host_discovery_script
        discover: Discover = (lambda: given) if script is None else HostDiscovery(Path(script), slots or 1)
        answers = run_elastic_ranks(words, discover, settings, elastic, text)
    return [answer_of(each) for each in answers]


def _hosts(hosts: str | None, hostfile: str | Path | None, slots: int) -> Mapping[str, int]:
    if hosts is not None:
        return parsed_hosts(hosts)
    return {"localhost": slots} if hostfile is None else read_hostfile(Path(hostfile))


def _forked(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], size: int) -> list[Any]:
    def work(_: RankInfo) -> str:
        answer = encoded(func(*args, **kwargs))
        shutdown()
        return answer.hex()

    return [decoded(bytes.fromhex(each)) for each in launch(work, size)]


WORDS = ("-c", "from polytempo.horovod.run_function import main; main()")


def _forks_compute(func: Callable[..., Any]) -> bool:
    """False if ranks must be new interpreters, which is said. `Incompatible` for a function that has no name there."""
    if why := fork_obstacles(uses_device=True):
        if not _has_name(func):
            refuse({"function", *why}, device=current_device(), function=getattr(func, "__qualname__", func))
        say_interpreters("ranks are new interpreters", why)
    return not why


def _has_name(func: Callable[..., Any]) -> bool:
    """True if new interpreters find the function."""
    module, name = getattr(func, "__module__", None), getattr(func, "__qualname__", "<")
    return module not in (None, "__main__") and "<" not in name


def called(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    """The input of such a process. ValueError for a function that has no name there; TypeError as `plain_values`."""
    module, name = getattr(func, "__module__", None), getattr(func, "__qualname__", "<")
    if not _has_name(func):
        raise ValueError(
            f"{module}.{name} cannot be found by name in a new interpreter; put it at the top level of a module that "
            "ranks can import. On this host alone, and without min_np, max_np and hosts, any function will do"
        )
    return json.dumps([module, name, encoded([list(args), dict(kwargs)]).hex()])


def answer_of(text: str | None) -> Any:
    """The value that the process has left; None if it has left nothing."""
    return None if text is None else decoded(bytes.fromhex(text))


def main() -> None:
    """Call the function that standard input names, and leave its result."""
    sys.path.insert(0, os.getcwd())
    module, name, data = json.load(sys.stdin)
    args, kwargs = decoded(bytes.fromhex(data))
    answer = attrgetter(name)(import_module(module))(*args, **kwargs)
    Path(os.environ[ANSWER_FILE]).write_text(encoded(answer).hex(), encoding="ascii")


def rank_variables(rank: int, hosts: Sequence[str], address: str, port: int) -> dict[str, str]:
    """The variables that make a process of another system rank `rank`, if `hosts` has each rank's host; ranks meet at
    `address`, which is rank 0's, and `port`."""
    here = [other for other, host in enumerate(hosts) if host == hosts[rank]]
    local_rank, order = here.index(rank), list(dict.fromkeys(hosts))
    across = [host for host in order if list(hosts).count(host) > local_rank]
    values = {
        "RANK": rank,
        "SIZE": len(hosts),
        "LOCAL_RANK": local_rank,
        "LOCAL_SIZE": len(here),
        "CROSS_RANK": across.index(hosts[rank]),
        "CROSS_SIZE": len(across),
    }
    torchs = {
        "MASTER_ADDR": "127.0.0.1" if len(order) == 1 else address,
        "MASTER_PORT": port,
        "RANK": rank,
        "WORLD_SIZE": len(hosts),
        "LOCAL_RANK": local_rank,
        "LOCAL_WORLD_SIZE": len(here),
        "NODE_RANK": order.index(hosts[rank]),
    }
    named = {f"HOROVOD_{name}": str(value) for name, value in values.items()}
    return {**named, **{name: str(value) for name, value in torchs.items()}}


def free_port(address: str) -> int:
    """A port that is free now at this host's `address`."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.create_server((address, 0), family=family) as listener:
        return int(listener.getsockname()[1])


@contextmanager
def leaves_where_it_fails() -> Iterator[None]:
    """Shut Horovod down where something raises in a process that lives on: others would wait for it."""
    try:
        yield
    except BaseException:
        shutdown()
        raise
