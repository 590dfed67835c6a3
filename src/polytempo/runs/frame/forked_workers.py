"""`fitting_engine`: workers are forked from this process only where such workers could compute."""

from __future__ import annotations

from collections.abc import Sequence

from polytempo import jobs
from polytempo.core.calls.refusals import refuse
from polytempo.device import current_device
from polytempo.engines.engine import EngineSetup
from polytempo.engines.local_engine import Local
from polytempo.engines.processes.fork_obstacles import fork_obstacles, say_interpreters
from polytempo.engines.subprocess_engine import Subprocess
from polytempo.spec.run_spec import RunSpec
from polytempo.training.model.run_device import may_use_device


def fitting_engine(engine: EngineSetup, specs: Sequence[RunSpec]) -> EngineSetup:
    """The engine of these runs: new interpreters in place of forks that could not compute, said in a note.

    A fork cannot use a device that this process has used, and computes no gradient where autograd has started threads
    for devices here. New interpreters find the runs by name. Errors: `Incompatible` for a run without one.
    """
    if not isinstance(engine, Local):
        return engine
    why = fork_obstacles(uses_device=any(may_use_device(spec.options, spec.strategy) for spec in specs))
    if not why:
        return engine
    for spec in specs:
        if not _found_by_name(spec):
            refuse({"forked", *why}, device=current_device(), job=spec.job.name, strategy=spec.strategy)
    say_interpreters("workers are new interpreters (engine=subprocess)", why)
    return Subprocess()


def _found_by_name(spec: RunSpec) -> bool:
    """True if other processes find the same run by name."""
    try:
        RunSpec.from_json(spec.to_json(), jobs.find)
    except ValueError:
        return False
    return True
