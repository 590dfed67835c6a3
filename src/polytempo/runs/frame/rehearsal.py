"""A rehearsal: before a run starts its workers, one process makes all parts of a worker, and one gradient.

So a mistake in a job is one error in the launcher, before there is a folder, instead of an error in each worker. The
process keeps its random numbers, threads and memory away from the launcher.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import replace
from math import inf
from pathlib import Path
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch

from polytempo.data.shard import DataShard
from polytempo.data.streams.repeated_reads import RepeatedReads, repeated_reads
from polytempo.device import accelerator_in_use, gradients_after_fork
from polytempo.engines.collective import RunTimedOut
from polytempo.engines.processes.failures import WorkerDied
from polytempo.partition.branches import Threads
from polytempo.runs.frame.short_fork import in_fork
from polytempo.runs.served.served_program import ServedProgram
from polytempo.spec.job import Job
from polytempo.spec.job_calls import data_of, model_of, move_model, next_batch, optimizer_of
from polytempo.spec.objective import batch_weight, loss_of
from polytempo.spec.run_spec import RunSpec
from polytempo.training.federated.client_turns import cohorts_of, tested
from polytempo.training.job.evaluate import Evaluation, check_goals, check_plateau, tensors_of
from polytempo.training.model.epoch_lengths import check_stream, schedule_in_run
from polytempo.training.model.requirements import check_loss, check_model, fitted
from polytempo.training.model.run_device import beside, devices_of, on_device, run_device
from polytempo.training.parts.parted_training import check_parted_model
from polytempo.training.parts.staged_training import cut_of
from polytempo.training.precision.masters import masters_of

_PATIENCE_S = 60.0
"""A longer rehearsal, of large data for example, is given up, and the run begins."""
_SMAPS = Path("/proc/self/smaps_rollup")
_KNOWN: WeakKeyDictionary[Job, dict[Any, Rehearsed]] = WeakKeyDictionary()
_FITTED: WeakKeyDictionary[Job, set[Any]] = WeakKeyDictionary()
"""Job -> options and names of strategies that have been rehearsed with it."""


class Rehearsed(NamedTuple):
    """The findings of a rehearsal."""

    samples: int | None
    """Samples of the training data; None if the rehearsal came to no end, or the data have no length."""
    private_bytes: int
    """Memory that the process did not share with the launcher; 0 if it is unknown."""
    warned: tuple[str, ...]
    """Warnings of the model, the loss and the optimizer."""
    devices: int = 0
    """Devices that the workers of this host share; 0 if they compute on the CPU, or on other hosts."""
    reads: RepeatedReads = RepeatedReads(None, inf)
    """The facts that decide how often the data are read."""


def rehearse(specs: Sequence[RunSpec], *, here: bool = True) -> Rehearsed:
    """Make the job's parts in a process of its own, and the gradient of one batch. `specs` have one strategy each.

    `here`: the run's processes are on this host, so the gradient is computed on their device. The rehearsal is forked:
    the gradient, or the device, is left out where forks of this process cannot compute it.

    Errors: ValueError and JobFailed of `spec.job_calls`, for wrong functions of the job and for a strategy that does
    not fit; ValueError for a device that is not there. A process that dies, or takes a minute, fails in the run and not
    here. Cost: a worker's start (the data are read once more) and one step; the same job, options and strategies are
    rehearsed once in a process.
    """
    spec, options = specs[0], specs[0].options
    known = _KNOWN.setdefault(spec.job, {})
    key = (
        options.data,
        spec.seed,
        spec.batch_size,
        spec.lr,
        tuple(options.until),
        str(options.callbacks),
        options.threads,
        options.inter_threads,
        str(options.precision),
        options.device if here else "",
        options.clients,
        options.sampling,
        options.client_test,
    )
    fitted_before = _FITTED.setdefault(spec.job, set())
    new = [each for each in specs if (key, str(each.strategy)) not in fitted_before]
    if new or key not in known:
        known[key] = _tried(new or specs, here=here)
        fitted_before.update((key, str(each.strategy)) for each in new)
    return known[key]


def _tried(specs: Sequence[RunSpec], *, here: bool) -> Rehearsed:
    on_device, backward = here and not accelerator_in_use(), gradients_after_fork()

    def work() -> list[Any]:
        return list(_rehearsed(specs, here=on_device, backward=backward))

    try:
        told = in_fork(work, threads=specs[0].options.threads, timeout_s=_PATIENCE_S)
    except (WorkerDied, RunTimedOut):
        return Rehearsed(None, 0, ())
    samples, private_bytes, warned, devices, reads = told
    return Rehearsed(samples, private_bytes, tuple(warned), devices, RepeatedReads(*reads))


def _rehearsed(specs: Sequence[RunSpec], *, here: bool = True, backward: bool = True) -> Rehearsed:
    spec = specs[0]
    job = spec.job
    torch.manual_seed(spec.seed)
    model = model_of(job)
    data = tested(spec, data_of(job, spec.options.data))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        for each in specs:
            fitted(each.strategy, optimizer_of(job, model, spec.lr))
            check_model(model, each.strategy)
            if job.weight is None:
                check_loss(job.loss, each.strategy)
            if each.strategy.rounds is not None:
                cohorts_of(each, data)
            if each.strategy.schedule is not None and not backward:
                pass  # a cut counts the operations of a backward pass
            elif each.strategy.server is not None:
                ServedProgram(replace(each, job=replace(job, data=lambda path: data)))
            elif each.strategy.schedule is not None:
                cut_of(each, model, data)
            if each.strategy.parted is not None:
                check_parted_model(each, model, data)
        shard = DataShard(data.training(), rank=0, size=1, batch_size=spec.batch_size, seed=spec.seed)
        for each in specs:
            check_stream(each, shard)
            schedule = schedule_in_run(each, optimizer_of(job, model, spec.lr), shard)
            check_plateau(each, schedule, has_test=data.test is not None, more=data.more)
        check_goals(job, spec.options, has_test=data.test is not None, more=data.more)
        batch = next_batch(job, iter(shard))
        if here:
            device = run_device(spec.options, spec.strategy)
            move_model(model, device)
            job = on_device(spec, device).job
        if job.weight is not None:
            batch_weight(job, batch)
        batch = beside(model, batch)
        Threads(inter=spec.options.inter_threads).apply(model)
        masters_of(model, optimizer_of(job, model, spec.lr), spec.options.precision)
        loss = loss_of(job, model, batch)
        if backward:
            loss.backward()
        if data.test is not None:
            evaluation = Evaluation(job, model, data)
            evaluation.sums(tensors_of(model), 0, evaluation.length)  # of a few samples
    own = dict.fromkeys(str(each.message) for each in caught if issubclass(each.category, UserWarning))
    devices = devices_of(spec.options, spec.strategy) if here else 0
    return Rehearsed(shard.num_samples, _private_bytes(), tuple(own), devices, repeated_reads(shard))


def _private_bytes() -> int:
    """Memory of this process that it shares with no other process."""
    try:
        lines = _SMAPS.read_text(encoding="ascii").splitlines()
    except OSError:
        return 0
    return 1024 * sum(int(line.split()[1]) for line in lines if line.startswith("Private_"))
