"""`simulate`: a job in a virtual world, with as many workers as you like, on the cluster that you describe."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from copy import deepcopy
from dataclasses import replace
from functools import partial
from random import Random
from typing import Any, NamedTuple, Unpack

import torch
from torch import nn

from polytempo.cluster import Cluster
from polytempo.core import Port, Strategy
from polytempo.core.arithmetic.slice_tree import subtree
from polytempo.core.port import world_port
from polytempo.core.suspension import drive
from polytempo.core.system.url_path import Place
from polytempo.data.shard import DataShard
from polytempo.data.source import Gathered
from polytempo.engines.processes.capacity import check_simulated
from polytempo.one_host.hogwild import Updates, is_hogwild, share_storage
from polytempo.partition.cut import Cut
from polytempo.partition.tensor.parted_model import PartedModel
from polytempo.report.status.progress import Progress, shown_progress
from polytempo.runs.frame.arguments import check_batches, check_workers, checked_job
from polytempo.runs.frame.chain import chained
from polytempo.runs.frame.folder import began
from polytempo.runs.frame.run_frame import torch_threads
from polytempo.runs.frame.run_page import simulated, virtual_rows
from polytempo.runs.simulated.asked_device import on_asked_device, on_suited_device
from polytempo.runs.simulated.bucket_rounds import in_bucket
from polytempo.runs.simulated.in_step import groups_in_step, groups_in_turn
from polytempo.runs.simulated.priced_parts import priced_parts, priced_stages
from polytempo.runs.simulated.simulation_checks import check_simulation
from polytempo.runs.simulated.virtual_paces import bound_of_outcome, watch_paces
from polytempo.spec.job import Data, Job
from polytempo.spec.job_calls import data_of, optimizer_of
from polytempo.spec.result import Result
from polytempo.spec.run_options import OptionKeywords, RunOptions, with_keywords
from polytempo.spec.run_spec import RunSpec
from polytempo.spec.text.catalogue import cluster_from, strategy_from
from polytempo.trackers.table import check_libraries
from polytempo.trackers.tracked import tracked
from polytempo.training.federated.client_turns import tested
from polytempo.training.hooks.speed_balance import SpeedBalance
from polytempo.training.job.context import TrainingContext, TrainingSummary, check_length
from polytempo.training.job.distillation import of_group, shard_of_group
from polytempo.training.job.evaluate import average_of, evaluation_of
from polytempo.training.job.growth import geometric_growth, norm_growth
from polytempo.training.job.program import train
from polytempo.training.job.start import replica_of, with_start
from polytempo.training.model.epoch_lengths import schedule_in_run
from polytempo.training.model.ports import ports_of
from polytempo.training.model.randomness import caller_state_kept, in_turn
from polytempo.training.model.run_device import on_device, run_device
from polytempo.training.observe.callback_host import host_of
from polytempo.training.observe.holding import HeldParts, HeldStage, Holding, Whole
from polytempo.training.parts.model_parts import ModelParts
from polytempo.training.parts.parted_training import laid_out_run, parted_model
from polytempo.training.parts.staged_training import cut_of, staged, staged_step
from polytempo.training.precision.masters import masters_of
from polytempo.training.step.guard import unfinite_names
from polytempo.training.step.noise_post import VirtualNoiseBoard
from polytempo.training.step.noise_watch import NoiseWatch
from polytempo.training.step.replica import Replica
from polytempo.training.step.step_cost import StepCost, cost_without_values, meta_model, step_cost
from polytempo.training.trainer import result_of
from polytempo.training.virtual.batched_step import BatchedReplicas
from polytempo.training.virtual.virtual_observer import VirtualObserver
from polytempo.training.virtual.virtual_step import meta_step, priced_step
from polytempo.training.virtual.workers_in_step import WorkersInStep
from polytempo.training.virtual.workers_in_turn import WorkersInTurn
from polytempo.worlds import Outcome, VirtualWorld
from polytempo.worlds.trace import COMMUNICATION
from polytempo.worlds.trace_tail import tail_of
from polytempo.worlds.virtual.rare_collection import collecting_rarely
from polytempo.worlds.virtual.symmetry import run_priced

_HOST_WORKERS = 64
_Together = BatchedReplicas | WorkersInStep | WorkersInTurn
"""Computes for many workers together."""


@in_turn()
@caller_state_kept()
def simulate(
    job: Job | str,
    strategy: Strategy | str,
    workers: int = 8,
    cluster: Cluster | str | None = None,
    options: RunOptions | None = None,
    *,
    meta: bool = False,
    batched: bool = False,
    progress: Progress | None = None,
    **more: Unpack[OptionKeywords],
) -> Result:
    """Train `job` by `strategy` with `workers` virtual workers on `cluster`.

        pt.simulate(job, pt.strategies.local_sgd(period=8), workers=256, cluster=pt.cluster.ethernet(gbit_per_s=1))

    Gradients are real, each worker's computed separately, and so are loss and accuracy. Time is virtual: computations
    cost their floating-point operations at the cluster's speed, messages the time of its links. The same arguments give
    the same trace, to the bit. With `meta` nothing is computed but the time; it needs `steps` (default 10), and there
    may be more workers than samples.

    With `batched` the gradients of all workers are computed in one pass (`torch.func.vmap`), and their optimizer steps
    in one, for one model where workers are in step (`runs.in_step`): the same times and messages, and the same numbers
    up to rounding. ValueError where that is not possible: batch norm with running statistics, parameter servers, …

    Scores, rows and checkpoints (only where `checkpoint_every` asks for them) cost no virtual time and change nothing.
    A checkpoint is as in a real run: `run` can resume it.

    `cluster` defaults to `ethernet()`, and to `one_host()` for strategies with one copy of the parameters. Where
    workers write to that copy on their own (Hogwild!), steps take up to a tenth longer or shorter, drawn from the
    seed: each seed is one interleaving of their updates.

    On `bucket(…)` workers meet in an object store alone: rounds cost its requests, and have the bits of a real one.

    With a parameter server shards' copies and the coordinator have hosts of their own, unless cores are counted.

    Memory: one model and one optimizer state for each worker, except workers that share one.
    """
    job, strategy = checked_job(job), strategy_from(strategy)
    check_workers(strategy, workers)
    options = with_keywords(options, more)
    check_simulation(strategy, options, meta=meta, batched=batched)
    spec = RunSpec.of(job, strategy, workers, options)
    found = _simulated(spec, cluster, shown_progress(progress), meta=meta, batched=batched)
    return found.made_by(job, spec.options.out)


def _simulated(
    spec: RunSpec, cluster: Cluster | str | None, progress: Progress | None, *, meta: bool, batched: bool
) -> Result:
    """The run, after the run that it starts from."""
    given, cluster = cluster, cluster_from(cluster or default_cluster(spec.strategy, spec.workers))
    if cluster.in_bucket:
        spec = in_bucket(spec)
    job, strategy, workers, options = spec.job, spec.strategy, spec.workers, spec.options
    check_simulation(strategy, options, meta=meta, batched=batched)
    together = BatchedReplicas(job, strategy, workers) if batched else None
    cluster = on_suited_device(on_asked_device(cluster, options.device), strategy)
    num_hosts = len(set(cluster.hosts(workers)))
    if is_hogwild(strategy) and num_hosts > 1:
        raise ValueError(
            f"{strategy} has one copy of the parameters in the memory of one host, but on {cluster.name} {workers} "
            f"workers are on {num_hosts} hosts; use the cluster one_host(workers={workers})"
        )
    check_batches(spec)
    check_libraries(options.trackers)
    first = partial(_simulated, cluster=given, progress=progress, meta=meta, batched=batched)
    with (
        torch_threads(options.threads or 1),
        collecting_rarely(),
        began(options.out),
        chained(spec, first) as spec,
        tracked(spec, "virtual"),
    ):
        spec = with_start(spec)
        if strategy.server is not None:
            return _served(spec, cluster, progress, meta=meta)
        return _priced(spec, cluster) if meta else _trained(spec, cluster, progress, together)


def _served(spec: RunSpec, cluster: Cluster, progress: Progress | None, *, meta: bool) -> Result:
    from polytempo.runs.simulated.simulate_served import simulate_served

    return simulate_served(spec, cluster, progress, meta=meta)


def default_cluster(strategy: Strategy, workers: int) -> str:
    """The cluster that `simulate` takes where none is given, as it is written on the command line."""
    return "ethernet" if strategy.one_copy is None else f"one_host(workers={max(_HOST_WORKERS, workers)})"


def _trained(spec: RunSpec, cluster: Cluster, progress: Progress | None, together: _Together | None) -> Result:
    job, workers, options = spec.job, spec.workers, spec.options
    data = tested(spec, data_of(job, options.data))
    device = run_device(options, spec.strategy)
    spec = on_device(spec, device)
    job = spec.job
    model, _ = replica_of(spec, device)
    gathered, test_parts = (None, None) if together is None else (Gathered(), 1)
    if together is None:
        groups = groups_in_turn(spec, cluster, data, model)
        together = WorkersInTurn(job, groups, spec.seed) if groups else None
    else:
        groups = groups_in_step(spec, cluster, data, {p.dtype for p in model.parameters()})
        together = WorkersInStep(job, groups) if groups else together
    acting = [group.start for group in groups] or list(range(workers))
    check_simulated(model, data, workers, models=len(acting))
    world = VirtualWorld(cluster, workers, seed=spec.seed, groups=groups)
    world.trace.show_in(tail_of(options.out, 0, all_ranks=True))
    cost = step_cost(spec, model, data, cluster)
    test = evaluation_of(spec, model, data)
    observer = VirtualObserver(workers, test, parts=test_parts)
    updates = {rank: _updates(spec, rank) for rank in acting}
    whole = None if spec.strategy.schedule is None else (model, cut_of(spec, model, data))
    hosts = cluster.hosts(workers)
    ports = {rank: laid_out_run(world_port(rank, hosts), spec.strategy) for rank in acting}
    dealing = Dealing(gathered, groups)
    contexts = {
        rank: _context(spec, device, data, observer, cost, updates[rank], port, deepcopy(whole), together, dealing)
        for rank, port in ports.items()
    }
    _measure(spec, contexts.values(), ports.values())
    watch_paces(contexts, world)
    if is_hogwild(spec.strategy):
        share_storage([context.replica.model for context in contexts.values()])

    async def program(port: Port) -> TrainingSummary:
        summary = await train(laid_out_run(port, spec.strategy), contexts[port.rank])
        await updates[port.rank].settle()
        return summary

    host = host_of(spec.options)
    settings = {"cluster": cluster.name} | ({"batched": "true"} if isinstance(together, BatchedReplicas) else {})
    with (
        virtual_rows(spec, progress, **settings) as record,
        nullcontext(record) if host is None else host.running(record) as seen,
    ):
        contexts[0].record = observer.record = seen
        observer.host, observer.replicas = host, [context.replica for context in contexts.values()]
        for rank, context in contexts.items():
            context.host, context.asks = host, partial(observer.asks, rank)
        outcome = world.run(program)
    summary = outcome.results[0]
    assert summary is not None
    reports = [context.holding.stage_report() for context in contexts.values()]
    stages = [report for report in reports if report is not None]
    return _finish(cluster, contexts[0], summary, outcome, options.out, stages)


def _measure(spec: RunSpec, contexts: Iterable[TrainingContext], ports: Iterable[Port]) -> None:
    """Let each rank's gradients be looked at, where the options ask for it: a board for each group."""
    if (every := spec.options.looks_every) is None:
        return
    boards: dict[tuple[int, ...], VirtualNoiseBoard] = {}
    for context, port in zip(contexts, ports, strict=True):
        data, replica = ports_of(port).data, context.replica
        board = boards.setdefault(tuple(data.members), VirtualNoiseBoard(data.size))
        replica.measure(NoiseWatch(board.of(data.rank), replica.strategy, replica.trainable, every=every))
        context.growth = norm_growth(spec, replica, context.shard)


def _context(
    spec: RunSpec,
    device: torch.device,
    data: Data,
    observer: VirtualObserver,
    cost: StepCost,
    updates: Updates,
    port: Port,
    whole: tuple[nn.Module, Cut] | None,
    together: _Together | None,
    dealing: Dealing,
) -> TrainingContext:
    """`whole`: the model of this rank, and its stages, where it is cut."""
    holding: Holding
    if whole is None:
        model, optimizer = replica_of(of_group(spec, port), device)
        names = [name for name, _ in model.named_parameters()]
        if together is not None:
            together.place(port.rank, model, optimizer)
        if spec.strategy.parted is not None:
            model = parted_model(spec, model, data, port, drive)
            optimizer = optimizer_of(spec.job, model, spec.lr)
            cost = cost.part(spec.strategy.parted.ranks)
        masters = masters_of(model, optimizer, spec.options.precision)
        replica = Replica(
            model, optimizer, spec.strategy, spec.replicas, allow_nan=spec.options.allow_nan, masters=masters
        )
        replica.clip_norm = spec.options.clip_norm
        if masters is not None:
            masters.watch()
        holding = Whole(replica)
        if isinstance(model, PartedModel):
            holding = HeldParts(ModelParts(model, replica, port, names))
        if together is None:
            take_step = priced_step(replica, spec, cost, updates)
        else:
            take_step = together.step(port.rank, replica, cost, updates)
    else:
        model, found = whole
        stage = staged(spec, model, found, port, cost.flops_per_sample)
        holding, take_step = HeldStage(stage), staged_step(stage, spec.job)
    together_with = next((len(group) for group in dealing.groups if group.start == port.rank), 1)
    shard = shard_of_group(spec, data, port, gathered=dealing.gathered, together=together_with, device=device)
    return TrainingContext(
        spec=spec,
        holding=holding,
        shard=shard,
        data=data,
        take_step=take_step,
        observer=observer,
        scheduler=None if spec.strategy.rounds else schedule_in_run(spec, holding.replica.optimizer, shard),
        average=average_of(model, spec.options),
        unchecked=unfinite_names(model),
        first_steps=len(shard) if spec.options.batch_growth else 0,
        growth=geometric_growth(spec, shard),
        balance=SpeedBalance(shard, holding.replica) if spec.options.balance == "speed" else None,
    )


class Dealing(NamedTuple):
    """The deal of batches: rows for all ranks, and groups of ranks that get their batches together."""

    gathered: Gathered | None
    groups: Sequence[range]


def _priced(spec: RunSpec, cluster: Cluster) -> Result:
    """Only the time: one model on the meta device, which all workers share, as there are no values."""
    job, workers, options = spec.job, spec.workers, spec.options
    steps = options.steps or 10
    data = data_of(job, options.data)
    if spec.strategy.schedule is not None:
        outcome, stages = priced_stages(spec, cluster, data, steps)
        reports = [stage.report() for stage in stages]
        return _only_time(spec, cluster, data, Whole(stages[0].replica), outcome, steps, reports)
    cost = cost_without_values(spec, data, cluster)
    if spec.strategy.parted is not None:
        found, parts = priced_parts(spec, cluster, data, cost, steps, partial(_updates, spec))
        return _only_time(spec, cluster, data, HeldParts(parts), found, steps)
    global_batch = options.global_batch_size or workers * spec.batch_size
    model = meta_model(job)
    optimizer = optimizer_of(job, model, spec.lr)
    masters = masters_of(model, optimizer, options.precision)

    async def program(port: Port) -> None:
        replica = Replica(model, optimizer, spec.strategy, workers, masters=masters)
        updates = _updates(spec, port.rank)
        passes = [global_batch * _part(spec, port.rank) / options.accumulate] * options.accumulate
        for step in range(steps):
            await port.mark(step)
            await meta_step(port, replica, cost, passes, updates)
        await replica.settle()
        await updates.settle()

    priced = run_priced(cluster, workers, program, seed=spec.seed, alike=_equal_parts(spec))
    replica = Replica(model, optimizer, spec.strategy, workers, masters=masters)
    return _only_time(spec, cluster, data, Whole(replica), priced, steps)


def _only_time(
    spec: RunSpec,
    cluster: Cluster,
    data: Data,
    holding: Holding,
    outcome: Outcome[Any],
    steps: int,
    stages: Sequence[dict[str, Any]] = (),
) -> Result:
    """The result of so many steps without computations."""
    shard = DataShard(
        data.training(), rank=0, size=1, batch_size=spec.batch_size, seed=spec.seed
    )  # its length; not dealt
    context = TrainingContext(spec, holding, shard, data, _no_step, VirtualObserver(spec.workers, None))
    samples = steps * (spec.options.global_batch_size or spec.replicas * spec.batch_size)
    summary = TrainingSummary(
        steps=steps,
        epochs=samples / check_length(shard),
        samples=samples,
        seconds=outcome.seconds,
        score=None,
        train_loss=None,
        reached=None,
        parameters={},
        buffers={},
    )
    return _finish(cluster, context, summary, outcome, spec.options.out, stages)


def _part(spec: RunSpec, rank: int) -> float:
    """The share of a global batch that `rank` computes."""
    slices = spec.strategy.slices
    return 1 / spec.workers if slices is None else len(subtree(slices, spec.workers, rank)) / slices


def _equal_parts(spec: RunSpec) -> bool:
    """True if all ranks compute equally much of a global batch."""
    return spec.strategy.slices is None or len({_part(spec, rank) for rank in range(spec.workers)}) == 1


def _finish(
    cluster: Cluster,
    context: TrainingContext,
    summary: TrainingSummary,
    outcome: Outcome[Any],
    out: Place | None,
    stages: Sequence[dict[str, Any]] = (),
) -> Result:
    workers, trace = len(outcome.results), outcome.trace
    computing_s = sum(seconds for (_, op), seconds in trace.seconds.items() if op not in COMMUNICATION)
    result = result_of(
        context,
        summary,
        world="virtual",
        num_ranks=workers,
        num_bytes=sum(trace.bytes_sent.values()),
        communication_share=1 - computing_s / (workers * outcome.seconds) if outcome.seconds else 0.0,
        trace_hash=trace.hash,
        stages=stages,
    )
    told = context.replica.pace
    bound = bound_of_outcome(cluster, context, summary, outcome)
    result = replace(result, bound=bound, diagnoses=None if told is None else told.told)
    return simulated(result, trace, out)


def _updates(spec: RunSpec, rank: int) -> Updates:
    random = Random(f"{spec.seed}/{rank}/interleaving") if is_hogwild(spec.strategy) else None
    return Updates(spec.strategy.one_copy, random)


async def _no_step(port: Port, batch: Any, samples: int, share: float | None) -> Any:
    raise AssertionError("a priced run takes no steps on data")
