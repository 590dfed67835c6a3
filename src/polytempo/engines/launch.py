"""The local engine: worker processes on this host, started together and ended together."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from polytempo.engines.collective import collected
from polytempo.engines.engine import Launch, Result, Role
from polytempo.engines.local_engine import Local
from polytempo.engines.processes.capacity import check_processes
from polytempo.engines.processes.worker import RankInfo
from polytempo.spec.topology import Topology


def launch(
    work: Callable[[RankInfo], Result],
    workers: int,
    *,
    threads: int | None = None,
    logs: Path | None = None,
    timeout_s: float | None = None,
    tick: Callable[[], object] | None = None,
) -> list[Any]:
    """Call `work(rank_info)` in `workers` processes of this host; return their results, in the order of ranks.

    Workers are forked, so `work` may be a closure, and they start in milliseconds. Results travel as
    JSON (a tuple arrives as a list). A worker has `threads` threads: by default its share of the
    cores this process may use, or 1 where this process has already computed with several threads
    (OpenMP's threads do not survive a fork). Output goes to `logs/rank-R.log`; without `logs` it is
    only quoted in errors. Temporary files of workers end with the run. `tick` is called a few times
    a second while workers run, and may raise.

        launch(lambda rank_info: rank_info.rank ** 2, workers=3)      # [0, 1, 4]

    The first worker that fails ends the run. However it ends, killed launcher included, no process,
    folder or port is left; `logs` stay.

    Errors: `WorkerDied` names the rank, how it ended and its last lines; `RunTimedOut` after
    `timeout_s`, with the place where a worker hung; `ValueError` for impossible arguments.
    """
    if workers < 1:
        raise ValueError(f"workers={workers} must be at least 1")
    check_processes(workers, workers)

    def at(role: Role) -> Result:
        threads, home = engine.address.threads, engine.address.home
        assert home is not None
        return work(RankInfo(role.node, workers, home, threads))

    with Local().open(Launch(at, None, dict, workers, workers, threads, logs)) as engine:
        return collected(engine, Topology.collective(workers), tick, timeout_s, engine.ask_where)
