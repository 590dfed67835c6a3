"""`Trainer`: a job trained on real processes without a loop of your own."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from copy import deepcopy
from dataclasses import replace
from typing import Any, NamedTuple, Unpack

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from polytempo.core import Port, Strategy
from polytempo.core.calls.refusals import refuse
from polytempo.core.system.files import run_folder
from polytempo.core.system.folder_lock import FolderTaken, Owner, held
from polytempo.core.system.notice import Notice, noticed
from polytempo.data.usage import in_order
from polytempo.diagnosis.pace import RankTimes
from polytempo.large_batch.noise_scale import NoiseProbe
from polytempo.one_host.hogwild import is_hogwild
from polytempo.partition.hybrid.hybrid_model import divided_layers
from polytempo.partition.tensor.split_model import split_models
from polytempo.report.status.event_log import logged
from polytempo.report.status.metrics import MetricsWriter
from polytempo.report.status.records import RunStarted
from polytempo.report.status.row_exchanges import totals_of
from polytempo.report.status.rows import METRIC_KINDS
from polytempo.spec.callbacks.callback import Control
from polytempo.spec.job import Data, Job
from polytempo.spec.job_calls import data_of, optimizer_of
from polytempo.spec.result import Result, parameters_sha256
from polytempo.spec.run_options import OptionKeywords, RunOptions, with_keywords
from polytempo.spec.run_spec import RunSpec
from polytempo.spec.text.catalogue import strategy_from
from polytempo.strategies import sync_sgd
from polytempo.trackers.tracked import tracked
from polytempo.training.checkpoint.checkpoint_files import go_on_from
from polytempo.training.federated.client_turns import tested
from polytempo.training.hooks.attach import AttachOptions, attach_replica
from polytempo.training.hooks.drift_watch import watch
from polytempo.training.hooks.handle import Handle
from polytempo.training.hooks.preemption import PreemptionWatch
from polytempo.training.hooks.speed_balance import SpeedBalance
from polytempo.training.job.context import Observer, TakeStep, TrainingContext, TrainingSummary
from polytempo.training.job.distillation import of_group, shard_of_group
from polytempo.training.job.evaluate import Evaluation, average_of
from polytempo.training.job.gradients import StepGradients
from polytempo.training.job.growth import geometric_growth, norm_growth
from polytempo.training.job.program import train
from polytempo.training.job.run_bound import bound_of
from polytempo.training.job.run_settings import environment_of, settings_of
from polytempo.training.job.start import replica_of, start_facts
from polytempo.training.model.agree import agree, broadcast_model, gather_json, next_series
from polytempo.training.model.epoch_lengths import epoch_steps, schedule_in_run
from polytempo.training.model.ports import mesh_of
from polytempo.training.model.run_device import on_device, run_device
from polytempo.training.observe.background_observer import BackgroundObserver
from polytempo.training.observe.callback_host import host_of
from polytempo.training.observe.collective_observer import CollectiveObserver
from polytempo.training.observe.holding import HeldParts, HeldStage, Holding, Whole
from polytempo.training.observe.resumption import load
from polytempo.training.observe.user_log import note_reads
from polytempo.training.parts.model_parts import ModelParts
from polytempo.training.parts.parted_training import laid_out_run, parted_model
from polytempo.training.parts.staged_training import cut_of, staged, staged_step
from polytempo.training.step.guard import unfinite_names
from polytempo.training.step.pace_store import watch_pace
from polytempo.training.step.replica import Replica
from polytempo.training.step.step_profiler import StepProfiler
from polytempo.wire.memory import keep_memory
from polytempo.worlds import MOST_WRITTEN, ProcessWorld, combined_hash, current, joined, write_chrome_trace
from polytempo.worlds.trace import COMMUNICATION

_TOKEN_BYTES = 8
_MUST_AGREE = (
    *("epochs", "steps", "until", "resume", "checkpoint_every", "ema", "noise_scale", "global_batch_size"),
    *("accumulate", "balance", "batch_growth", "clip_norm", "eval_every", "precision"),
)


class Trainer:
    """Train `job` by `strategy` in the world that `pt.init()` joined, or alone.

        pt.init()
        result = pt.Trainer(job, pt.strategies.local_sgd(period=8), epochs=3).fit()

    Every rank makes one. Options are `RunOptions`, as an object or by name; a `RunSpec` has all. With
    `out`, rank 0 leaves metrics, trace, result and checkpoints there, and `resume` goes on from the newest checkpoint.
    Where SIGTERM comes and there is an `out`, all ranks save the same step and `fit` raises `Preempted` (exit code 75).
    Afterwards `model` holds the final parameters: the ranks' mean where a strategy lets them differ.

    Where `pt.init(mesh=…)` has laid out the ranks, ranks along "data" train one part of a model: the job's `model()`
    makes the part of `world.port.coordinates`, and its `loss` is the part's loss. The result has this rank's part's
    parameters, and the first part's scores.
    """

    def __init__(
        self,
        job: Job | RunSpec,
        strategy: Strategy | str | None = None,
        options: RunOptions | None = None,
        *,
        world: ProcessWorld | None = None,
        **more: Unpack[OptionKeywords],
    ) -> None:
        self.world = world or current()
        self._own_port = self.world.port
        if not isinstance(job, RunSpec):
            made = sync_sgd() if strategy is None else strategy_from(strategy)
            refuse(made.features | {"one world"}, strategy=made)
            job = RunSpec.of(job, made, self.world.size, with_keywords(options, more))
        self.options = options = job.options
        self.world.port = laid_out_run(self.world.port, job.strategy)
        self.device = run_device(options, job.strategy)
        """The device that this rank computes on."""
        spec = on_device(job, self.device)
        self.job = job = spec.job
        self.model, optimizer = replica_of(of_group(spec, self.world.port), self.device)
        if split_models(self.model) or divided_layers(self.model):
            raise ValueError(
                f"job {job.name} splits its model's layers in model(); let that make the whole model, and give the "
                "strategy pt.strategies.split(rules, parts=2), or hybrid(layers)"
            )
        self.data = tested(spec, data_of(job, options.data))
        self.batch_size = spec.batch_size
        self.world.drive(agree(self.world.port, _facts(spec, self.data, self.world.port)))
        part = _part(self.world, spec, self.model, optimizer, self.data)
        self.port = part.port
        shard = shard_of_group(spec, self.data, self.port, device=self.device)
        self.context = TrainingContext(
            spec=spec,
            holding=part.holding,
            shard=shard,
            data=self.data,
            take_step=part.take_step,
            observer=_observer(self.world, job, self.model, self.data, options, part.replica.strategy),
            scheduler=None if spec.strategy.rounds else schedule_in_run(spec, part.replica.optimizer, shard),
            average=average_of(self.model, options),
            host=host_of(options),
            unchecked=unfinite_names(self.model),
            first_steps=len(shard) if options.batch_growth else 0,
            growth=norm_growth(spec, part.replica, shard) or geometric_growth(spec, shard),
            balance=SpeedBalance(shard, part.replica) if options.balance == "speed" else None,
            exchanged=lambda: totals_of(self.world),
        )

    def fit(self, *, on_row: Callable[[dict[str, Any]], None] | None = None) -> Result:
        """Train to the end of the options, and say how it went. `on_row` sees rank 0's rows "train" and "test".

        Rank 0 holds the folder `out` meanwhile: `FolderTaken` on all ranks where another run has it.
        """
        with held_by_first(self.world, self.options), ExitStack() as stack:
            if self.options.out is not None and self.world.rank == 0:
                stack.enter_context(tracked(self.context.spec, "process"))
            return self.fit_logged(on_row=on_row)

    def fit_logged(self, *, on_row: Callable[[dict[str, Any]], None] | None = None) -> Result:
        """`fit` in a folder that the caller holds already, with the run's events in it."""
        out, spec, deaths = self.options.out, self.context.spec, self.world.deaths
        if out is None or self.world.rank != 0:
            return self.fit_held(on_row=on_row)
        settle: dict[str, Any] = {} if deaths is None else {"settle": deaths.settle}
        with logged(out, start_of(spec, "process"), resume=self.options.resume, **settle):
            return self.fit_held(on_row=on_row)

    def fit_held(self, *, on_row: Callable[[dict[str, Any]], None] | None = None) -> Result:
        """`fit` in a folder that the caller holds already; a launcher writes its events."""
        out, world, context = self.options.out, self.world, self.context
        if out is not None:
            run_folder(out)
            if self.options.resume:
                context.resumed_at = world.drive(load(self.port, context, out / "checkpoint"))
        with ExitStack() as files:
            writer, watch = None, None
            notice, host = Notice(self.options.grace_s), context.host if world.rank == 0 else None
            if out is not None:
                if world.rank == 0:
                    writer = files.enter_context(MetricsWriter(out, resumed_at=context.resumed_at))
                notice = files.enter_context(noticed(self.options.grace_s))
            note_reads(context.shard, writer, resumed=context.resumed_at is not None)
            record, asks, leaves = recorder(writer, on_row), context.asks, context.leaves
            if host is not None:
                record = files.enter_context(host.running(record, context.replica.step))
            if out is not None or context.host is not None:
                alone = is_hogwild(context.replica.strategy)  # then ranks hear of each other at the ends of epochs
                wish = Control if host is None else host.take
                watch = PreemptionWatch(
                    world, notice, epoch_steps(context.shard, self.options.steps) if alone else 1, wish
                )
                leaves, asks = watch.agreed, watch.asked
            context = replace(context, record=record, leaves=leaves, asks=asks)
            if context.replica.pace is not None:
                context.replica.pace.tell = context.record
            if self.options.profile is not None and out is not None:
                profiler = files.enter_context(closing(StepProfiler(world, self.options.profile, out)))
                context = replace(context, begins=profiler.begins)
            world.begin(out)
            summary = world.drive(train(self.port, context))
            elapsed_s = world.now_s()
            world.port = self._own_port
            if watch is not None:
                watch.end()
        final = summary.parameters | summary.buffers
        with torch.no_grad(), context.replica.in_float32():
            for name, tensor in [*self.model.named_parameters(), *self.model.named_buffers()]:
                if name in final:
                    tensor.copy_(final[name])
        return self._finish(context, summary, world.waited_s / max(elapsed_s, 1e-9))

    def _finish(self, context: TrainingContext, summary: TrainingSummary, communication_share: float) -> Result:
        """Bring all ranks' traces together, and leave them in the run's folder."""
        world, out = self.world, self.options.out
        mine = {
            **world.trace.excerpt(max(1, MOST_WRITTEN // world.size)),
            "bytes": world.trace.bytes_sent[world.rank] - context.observer.off_bytes,
            "share": communication_share,
            "stage": context.holding.stage_report(),
            "messages": sum(n for (_, op), n in world.trace.messages.items() if op in COMMUNICATION),
            "times": None if context.replica.pace is None else list(context.replica.pace.times),
        }
        ranks = world.drive(gather_json(world.port, mine))
        trace_hash = combined_hash(rank["hash"] for rank in ranks)
        result = result_of(
            context,
            summary,
            world="process",
            num_ranks=world.size,
            num_bytes=sum(rank["bytes"] for rank in ranks),
            communication_share=sum(rank["share"] for rank in ranks) / world.size,
            trace_hash=trace_hash,
            stages=[rank["stage"] for rank in ranks if rank["stage"] is not None],
        )
        found = bound_of(
            *(context, summary, [RankTimes(*rank["times"]) for rank in ranks if rank["times"] is not None]),
            messages=sum(rank["messages"] for rank in ranks) / world.size,
            sent_bytes=sum(rank["bytes"] for rank in ranks) / world.size,
            hosts=len(set(world.port.hosts)),
        )
        slow = None if context.replica.pace is None else context.replica.pace.told
        result = replace(result, bound=found, diagnoses=slow)
        if out is not None:
            result = replace(result, checkpoint=str(out / "checkpoint"))
            if world.rank == 0:
                events, dropped = joined(ranks)
                write_chrome_trace(
                    out / "trace.json", events, title=f"{result.job}, {result.strategy}", dropped=dropped
                )
                result.write(out)
        return result


@contextmanager
def held_by_first(world: ProcessWorld, options: RunOptions) -> Iterator[None]:
    """Inside, rank 0 holds the run's folder. All ranks raise `FolderTaken` where another run has it."""
    out = options.out
    with ExitStack() as stack:
        refused: FolderTaken | None = None
        if out is not None and world.rank == 0:
            try:
                stack.enter_context(held(run_folder(out)))
                if options.resume:
                    go_on_from(out)
            except FolderTaken as error:
                refused = error
        if out is not None:
            mine = None if refused is None else [refused.host, refused.pid, refused.since_s]
            owner = world.drive(gather_json(world.port, mine))[0]
            if owner is not None:
                raise FolderTaken(out, Owner(owner[0], "", owner[1], owner[2], ""))
        yield


def _facts(spec: RunSpec, data: Data, port: Port) -> dict[str, Any]:
    """The settings that all ranks have to agree about."""
    told = spec.options.as_plain()
    facts = {name: told[name] for name in _MUST_AGREE}
    facts |= {"job": spec.job.name, "lr": spec.lr, "batch_size": spec.batch_size}
    facts |= {"samples": getattr(data.train, "__len__", lambda: None)(), "out": spec.options.out is not None}
    start = start_facts(spec.options)
    return facts | {"mesh": str(mesh_of(port)), "first weights": None if start is None else start["sha256"]}


class _Part(NamedTuple):
    """This rank's share of the model, and how it takes a step."""

    port: Port
    holding: Holding
    take_step: TakeStep

    @property
    def replica(self) -> Replica:
        return self.holding.replica


def _part(world: ProcessWorld, spec: RunSpec, model: nn.Module, optimizer: Optimizer, data: Data) -> _Part:
    if spec.strategy.schedule is not None:
        return _one_stage(world, spec, model, data)
    if spec.strategy.parted is not None:
        return _in_parts(world, spec, model, data)
    return _attached(world, spec, model, optimizer)


def _in_parts(world: ProcessWorld, spec: RunSpec, model: nn.Module, data: Data) -> _Part:
    world.drive(broadcast_model(world.port, model))
    own = parted_model(spec, deepcopy(model), data, world.port, world.drive)
    part = _attached(world, spec, own, optimizer_of(spec.job, own, spec.lr))
    names = [name for name, _ in model.named_parameters()]
    return part._replace(holding=HeldParts(ModelParts(own, part.replica, world.port, names)))


def _attached(world: ProcessWorld, spec: RunSpec, model: nn.Module, optimizer: Optimizer) -> _Part:
    if not spec.strategy.synchronized:
        keep_memory()  # of other ranks' models
    handle = attach_replica(
        *(model, optimizer, spec.strategy.between_equals()),  # the layout is made here
        world=world,
        options=AttachOptions(
            seed=spec.seed,
            on_drift=spec.options.on_drift,
            allow_nan=spec.options.allow_nan,
            precision=spec.options.precision,
            noise_scale=None if (every := spec.options.looks_every) is None else NoiseProbe(1, every),
        ),
    )
    return _Part(world.port, Whole(handle.replica), attached_step(handle, spec))


def _one_stage(world: ProcessWorld, spec: RunSpec, model: nn.Module, data: Data) -> _Part:
    keep_memory()  # of activations
    port, parts = world.port, cut_of(spec, model, data)
    world.drive(agree(port, {"strategy": str(spec.strategy), "begins of stages": list(parts.begins)}))
    world.drive(broadcast_model(port, model))
    series = next_series(world)
    stage = staged(spec, model, parts, port, series=series)
    stage.replica.drift = watch(world, stage.ports.data, stage.replica, spec.options.on_drift)
    stage.replica.pace = watch_pace(world, spec.strategy, series, stage.number)
    return _Part(port, HeldStage(stage), staged_step(stage, spec.job))


def attached_step(handle: Handle, spec: RunSpec) -> TakeStep:
    """One step of the plain loop; the hooks that `attach` set do the rest."""
    gradients = StepGradients(handle.replica, spec, handle.no_sync)

    async def take_step(port: Port, batch: Any, samples: int, share: float | None) -> Tensor:
        handle.begin_batch(share)
        await gradients.begin(port, batch)
        loss = gradients.compute(batch, port.world_rank, 1 / port.size if share is None else share)
        await gradients.meet(port)
        handle.clip(spec.options.clip_norm)
        handle.replica.optimizer.step()
        return loss

    return take_step


def start_of(spec: RunSpec, world: str, **more: str) -> RunStarted:
    """The start of a job's run in the "process" or "virtual" world. `more`: settings that are not options of a run."""
    return RunStarted(
        job=spec.job.name,
        strategy=str(spec.strategy),
        world=world,
        workers=spec.workers,
        steps=spec.options.steps,
        epochs=spec.epochs,
        origin=spec.job.origin,
        settings=settings_of(spec) | more,
        environment=environment_of(spec.options, spec.strategy),
    )


def result_of(
    context: TrainingContext,
    summary: TrainingSummary,
    *,
    world: str,
    num_ranks: int,
    num_bytes: float,
    communication_share: float,
    trace_hash: str,
    stages: Sequence[dict[str, Any]] = (),
) -> Result:
    """The result of a run from its summary, its totals over all ranks, and the reports of its stages."""
    first = {each["stage"]: each for each in reversed(stages)}
    score, shard = summary.score, context.shard
    learned, one_model = bool(summary.parameters), context.spec.strategy.groups == 1
    return Result(
        layers=context.holding.layers(),
        precision=None if context.replica.masters is None else context.replica.masters.report(),
        job=context.job.name,
        strategy=str(context.replica.strategy),
        world=world,
        workers=num_ranks,
        steps=summary.steps,
        epochs=summary.epochs,
        samples=summary.samples,
        seconds=summary.seconds,
        samples_per_s=summary.samples / summary.seconds if summary.seconds else 0.0,
        loss=summary.train_loss if score is None else score.loss,
        accuracy=None if score is None else score.accuracy,
        train_loss=summary.train_loss,
        metrics=({} if score is None else dict(score.metrics)) | context.facts_after(summary.steps, summary.epochs)
        or None,
        bytes_sent_per_rank=num_bytes / num_ranks,
        communication_share=communication_share,
        batch_size=context.spec.batch_size,
        seed=context.spec.seed,
        threads=torch.get_num_threads(),
        parameters_sha256=parameters_sha256(summary.parameters.values()) if learned else None,
        trace_hash=trace_hash,
        reached=summary.reached,
        resumed_at=context.resumed_at,
        stages=[first[number] for number in sorted(first)] or None,
        started_from=start_facts(context.options),
        callbacks=None if context.host is None else context.host.report(),
        ledger=in_order(shard.num_samples, shard.epoch, shard.used) if learned and one_model else None,
    )


def _observer(
    world: ProcessWorld, job: Job, model: nn.Module, data: Data, options: RunOptions, strategy: Strategy
) -> Observer:
    """The observer: all ranks together, or, in a run that never waits for another rank, each in the background."""
    evaluation = None if data.test is None else Evaluation(job, model, data, options.precision)
    if is_hogwild(strategy) and world.size > 1:
        return BackgroundObserver(world, evaluation, world.drive(_token(world.port)))
    return CollectiveObserver(world, evaluation)


async def _token(port: Port) -> str:
    """A text that no other run has, the same on all ranks."""
    drawn = torch.tensor(list(secrets.token_bytes(_TOKEN_BYTES)), dtype=torch.uint8)
    return bytes((await port.broadcast(drawn)).tolist()).hex()


def recorder(
    writer: MetricsWriter | None, on_row: Callable[[dict[str, Any]], None] | None
) -> Callable[[dict[str, Any]], None]:
    """A function that writes a row of metrics and hands it on, as far as there is someone to take it."""

    def record(row: dict[str, Any]) -> None:
        if writer is not None:
            writer.write(row)
        if on_row is not None and row["kind"] in METRIC_KINDS:
            on_row(row)

    return record
