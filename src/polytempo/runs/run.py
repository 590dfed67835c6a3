"""`run` and `join`: a job on real worker processes."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import ExitStack
from importlib import import_module
from typing import Unpack

from polytempo.core import Strategy
from polytempo.core.calls.refusals import refuse
from polytempo.core.system.notice import Preempted
from polytempo.core.system.url_path import Place
from polytempo.data.plan import check_enough
from polytempo.engines.engine import EngineSetup, checked_engine
from polytempo.engines.join.init import init
from polytempo.engines.local_engine import Local
from polytempo.engines.processes.capacity import batch_notes, check_memory, check_processes, cores_notes
from polytempo.engines.subprocess_engine import Subprocess
from polytempo.report.status.progress import Progress, shown_progress
from polytempo.runs.elastic.run_elastic import Available, check_elastic_spec, run_elastic
from polytempo.runs.frame.arguments import (
    check_batches,
    check_workers,
    checked_job,
)
from polytempo.runs.frame.chain import chained
from polytempo.runs.frame.divergence import left_result, saved_step
from polytempo.runs.frame.folder import began
from polytempo.runs.frame.forked_workers import fitting_engine
from polytempo.runs.frame.rehearsal import rehearse
from polytempo.runs.frame.run_page import reported, show_rows
from polytempo.runs.run_collective import run_collective
from polytempo.runs.served.run_served import run_served
from polytempo.spec.job import Job
from polytempo.spec.result import Result
from polytempo.spec.run_options import OptionKeywords, RunOptions, with_keywords
from polytempo.spec.run_spec import RunSpec
from polytempo.spec.text.catalogue import strategy_from
from polytempo.trackers.table import check_libraries
from polytempo.trackers.tracked import tracked
from polytempo.training.checkpoint.checkpoint_files import go_on_from
from polytempo.training.job.start import with_start
from polytempo.training.model.randomness import caller_state_kept
from polytempo.training.model.run_device import may_use_device
from polytempo.training.observe.callback_host import bring_states
from polytempo.training.trainer import Trainer, held_by_first


def run(
    job: Job | str,
    strategy: Strategy | str,
    workers: int = 2,
    options: RunOptions | None = None,
    *,
    engine: EngineSetup | str | None = None,
    progress: Progress | None = None,
    available: Available | None = None,
    **more: Unpack[OptionKeywords],
) -> Result:
    """Train `job` by `strategy` with `workers` processes.

        result = pt.run(job, pt.strategies.local_sgd(period=8), workers=2, epochs=3, out="runs/first")

    Job, strategy, engine and options may also be given as text, as on the command line: `pt.run("digits", "ssp")`.

    `engine` starts the processes: `pt.engines.local()` (the default) forks them from this one;
    `pt.engines.subprocess()` starts new interpreters, and `pt.engines.ssh(hosts)` and its like processes on other
    hosts; those find the job by its name (`pt.jobs.find`). Where forks could not compute, because this process has used
    a device, or has computed gradients beside one, `local()` becomes `subprocess()` (PT1904 and PT1905 otherwise).

    Options are `RunOptions`, as an object or by name. With `out`, the folder holds `metrics.jsonl`,
    `trace.json`, `checkpoint/`, `result.json`, `logs/` and `report.html` afterwards.

    In a notebook the cell shows the run while it goes on: a bar, its numbers and a chart of the loss. Elsewhere
    `progress=Progress()` shows a bar on standard error.

    With `min_workers` or `max_workers` the run is elastic: workers that are killed are replaced while the others go on
    from the same step, and `available`, called a few times a second, says how many there may be (see
    `docs/elastic.md`).

    Errors: `NotFinite` names the step, the rank and the parameter where a loss, a gradient or a parameter was NaN or
    infinite. `WorkerDied` names the first worker that failed and quotes its log. With a parameter server, workers may
    be killed and the run goes on (see `run_served`). `Preempted`, a SystemExit with code 75, where this process or a
    worker got SIGTERM and there is an `out`: the run is saved there, and `resume` goes on from it. After Ctrl-C it
    is the same with code 130, and a KeyboardInterrupt, too.
    """
    job, strategy, setup = checked_job(job), strategy_from(strategy), checked_engine(engine)
    check_workers(strategy, workers)
    spec = RunSpec.of(job, strategy, workers, with_keywords(options, more))
    if available is not None and not spec.options.elastic:
        raise ValueError(
            "available says how many workers an elastic run may have; give min_workers or max_workers, too"
        )
    setup = prepare(in_order([spec]), setup)
    result = performed(spec, setup, shown_progress(progress), available)
    _say_missed(spec, result)
    bring_states(spec.options, result)
    return result.made_by(job, spec.options.out)


@caller_state_kept()  # imports draw from Python's generator
def prepare(specs: Sequence[RunSpec], engine: EngineSetup) -> EngineSetup:
    """Refuse impossible runs before anything is started or written, and print notes on surprising settings.

    `specs` are of one job with the same options, by one strategy after the other. Returns the engine that they need:
    `engine`, or new interpreters where forks could not compute.
    """
    workers, replicas = specs[0].workers, max(spec.replicas for spec in specs)
    check_libraries(specs[0].options.trackers)
    for spec in specs:
        check_workers(spec.strategy, workers)
        check_batches(spec)
        if spec.options.elastic:
            check_elastic_spec(spec)
    engine = fitting_engine(engine, specs)
    here = isinstance(engine, Local | Subprocess)
    if here:
        check_processes(max(spec.topology().num_nodes for spec in specs), workers)
    import_module("torch._dynamo")  # optimizers need it: a second here instead of in each worker
    found = rehearse(specs, here=here)
    if found.samples is not None:
        check_enough(found.samples, replicas)
        for slices in {spec.strategy.slices for spec in specs} - {None}:
            check_enough(found.samples, slices or 1, "slices")
    notes = [*found.warned, *batch_notes(found.samples, replicas, specs[0].batch_size)]
    notes += [note] if (note := found.reads.note(replicas)) else []
    if 0 < found.devices < workers:
        notes.append(f"{workers} workers share {found.devices} device{'s' * (found.devices > 1)}")
    if here:
        check_memory(found.private_bytes, workers)
        notes = [*cores_notes(workers), *notes]
    for note in notes:
        print(f"note: {note}", file=sys.stderr)
    return engine


def in_order(specs: Sequence[RunSpec]) -> list[RunSpec]:
    """All runs that are to come, with each run that another one starts from before that."""
    return [each for spec in specs for each in (*(in_order([spec.first]) if spec.first else ()), spec)]


@caller_state_kept()
def performed(
    spec: RunSpec,
    engine: EngineSetup,
    progress: Progress | None,
    available: Available | None = None,
    chain: Place | None = None,
) -> Result:
    """The run itself, after the run that it starts from. `chain`: the folder to resume, if it is another one."""
    out = spec.options.out

    def first(before: RunSpec) -> Result:
        return performed(before, engine, progress, available, chain or out)

    with began(out), chained(spec, first) as spec, tracked(spec, "process"):
        spec = with_start(spec)
        try:
            if out is not None and spec.options.resume and spec.strategy.server is None:
                go_on_from(out)
            if spec.options.elastic:
                return run_elastic(spec, engine, progress, available)
            if spec.strategy.server is not None:
                return run_served(spec, engine, progress)
            return run_collective(spec, engine, progress)
        except Preempted as error:
            assert out is not None
            folder = chain or out
            told = type(error)(error.step, str(folder))
            page = reported(left_result(spec, told), out).report
            print(f"polytempo: {told} (--resume --out {folder}); the run so far: {page}", file=sys.stderr)
            raise told from None
        except KeyboardInterrupt:
            if out is not None and (step := saved_step(spec, out)) is not None:
                print(
                    f"polytempo: {out} holds step {step:,}: go on with --resume --out {chain or out}", file=sys.stderr
                )
            raise


def _say_missed(spec: RunSpec, result: Result) -> None:
    """Tell of steps of a profile that the run has not made."""
    profile = spec.options.profile
    if profile is not None and (missed := profile.missed(result.resumed_at or 0, result.steps)) is not None:
        print(f"note: {missed}", file=sys.stderr)


@caller_state_kept()
def join(
    job: Job | str,
    strategy: Strategy | str,
    options: RunOptions | None = None,
    *,
    progress: Progress | None = None,
    **more: Unpack[OptionKeywords],
) -> Result:
    """Train `job` as one worker of the world that this process was started in (torchrun, Slurm, …)."""
    job, strategy, options = checked_job(job), strategy_from(strategy), with_keywords(options, more)
    refuse(strategy.features | {"one world"}, strategy=strategy)
    world = init(timeout_s=options.timeout_s, device=options.device if may_use_device(options, strategy) else "cpu")
    spec = RunSpec.of(job, strategy, world.size, options)
    shown = progress if world.rank == 0 else None
    with held_by_first(world, options), ExitStack() as stack:
        if world.rank == 0:
            stack.enter_context(tracked(spec, "process"))
        with show_rows(shown, spec) as show:
            result = Trainer(spec, world=world).fit_logged(on_row=show)
        if world.rank == 0:
            _say_missed(spec, result)
        return reported(result, options.out) if options.out is not None and world.rank == 0 else result
