"""`run`: ranks as the tasks of a barrier stage of Spark, with the signature of `horovod.spark.run`.

It needs the extra `spark`. Functions, arguments and results travel as Spark's own do.
"""

from __future__ import annotations

import json
import os
import socket
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TextIO

from polytempo.core.errors import PolytempoError
from polytempo.engines.extras import required
from polytempo.horovod.run_function import free_port, leaves_where_it_fails, rank_variables
from polytempo.horovod.torch.basics import shutdown

Told = tuple[int, Any]


def run(
    fn: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    num_proc: int | None = None,
    start_timeout: float | None = None,
    use_mpi: bool | None = None,
    use_gloo: bool | None = None,
    extra_mpi_args: str | None = None,
    env: Mapping[str, str] | None = None,
    stdout: TextIO | None = None,
    stderr: TextIO | None = None,
    verbose: int = 1,
    nics: Sequence[str] | None = None,
    prefix_output_with_timestamp: bool = False,
    executable: str | None = None,
) -> list[Any]:
    """Call `fn(*args, **kwargs)` in `num_proc` tasks of the active Spark session; the results by rank.

    `num_proc` is by default how many slots Spark has. The tasks are one barrier stage: they start together, and where
    one fails Spark ends all. `env`: variables of the ranks. The output of ranks is in the executors' logs.
    `start_timeout` and the arguments after `env` have no effect, but `executable` and MPI's arguments are refused.

    Errors: ImportError without the extra `spark`; ValueError without a session, and for MPI; PolytempoError if a rank
    fails, with Spark's message.
    """
    if use_mpi or extra_mpi_args or executable:
        raise ValueError("no MPI takes part, and ranks are Spark's own processes: leave MPI and executable out")
    session = required("pyspark.sql", "spark").SparkSession.getActiveSession()
    if session is None:
        raise ValueError("there is no active Spark session; make one with SparkSession.builder.getOrCreate()")
    context = session.sparkContext
    size = num_proc or max(1, context.defaultParallelism)
    task = _task(fn, list(args), dict(kwargs or {}), dict(env or {}))
    try:
        found: list[Told] = context.parallelize(range(size), size).barrier().mapPartitions(task).collect()
    except Exception as error:  # of py4j, which knows no narrower one
        lines = [line for line in str(error).splitlines() if line.strip()]
        said = next((line for line in lines if "Error: " in line and "spark" not in line.partition(":")[0]), lines[0])
        raise PolytempoError(f"a rank of {size} has failed on Spark: {said.strip()}") from error
    return [answer for _, answer in sorted(found, key=lambda told: told[0])]


def _task(
    fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], env: Mapping[str, str]
) -> Callable[[Iterable[int]], Iterator[Told]]:
    def perform(_: Iterable[int]) -> Iterator[Told]:
        context = required("pyspark", "spark").BarrierTaskContext.get()
        number = context.partitionId()
        address = str(context.getTaskInfos()[number].address).rpartition(":")[0].strip("[]")
        address = socket.gethostbyname(address)
        mine = json.dumps([socket.gethostname(), address, free_port(address)])
        places = [json.loads(place) for place in context.allGather(mine)]
        hosts = [host for host, _, _ in places]
        order = sorted(range(len(places)), key=lambda place: (hosts.index(hosts[place]), place))
        rank = order.index(number)
        _, address, port = places[order[0]]
        os.environ.update({**env, **rank_variables(rank, [hosts[place] for place in order], address, port)})
        with leaves_where_it_fails():
            answer = fn(*args, **kwargs)
        shutdown()
        sys.stdout.flush()
        context.barrier()
        yield rank, answer

    return perform
