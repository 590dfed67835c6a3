"""What `run` and `simulate` are given, refused at once where it is of the wrong kind."""

from __future__ import annotations

from polytempo.collectives.invariant import Invariant
from polytempo.core import Strategy
from polytempo.data.plan import check_global_batch
from polytempo.engines.engine import EngineSetup
from polytempo.engines.local_engine import Local
from polytempo.spec.run_spec import RunSpec


def check_strategy(strategy: object) -> None:
    """ValueError where `strategy` is none: its text, say, or the function that makes one."""
    if not isinstance(strategy, Strategy):
        raise ValueError(
            f"a strategy is an object such as pt.strategies.downpour(), got {strategy!r}; "
            "pt.parse_strategy makes one of a text such as 'downpour(push_every=5)'"
        )


def checked_engine(engine: object) -> EngineSetup:
    """The engine that is given, `Local` where none is; ValueError for its name, or for one that is not called."""
    if engine is None:
        return Local()
    if isinstance(engine, type) or not isinstance(engine, EngineSetup):
        raise ValueError(f"an engine is an object such as pt.engines.subprocess(), got {engine!r}")
    return engine


def check_workers(strategy: Strategy, workers: int) -> None:
    """ValueError where a run of `strategy` needs more workers, or has nothing to do for so many."""
    if strategy.slices is not None:
        Invariant(strategy.slices).check(workers)
    least = 1 if strategy.server is None else strategy.server.least_workers
    if workers < least:
        raise ValueError(
            f"{strategy} needs at least {least} workers, or it waits for none of them, and there are {workers}; use "
            f"workers={least} or more, or a smaller argument"
        )


def check_batches(spec: RunSpec) -> None:
    """ValueError where a step has no sample for one of the workers, or of the slices."""
    slices, workers, asked = spec.strategy.slices, spec.workers, spec.options.global_batch_size
    if slices is not None:
        check_global_batch(asked or workers * spec.batch_size, slices, "slices")
    elif asked is not None:
        check_global_batch(asked, workers, "workers")
