"""`ElasticTraining`: one process of an elastic run, through all its groups of ranks.

a view ──▶ enter: finish or undo the step in hand ──▶ the group is formed ──▶ begin: state for newcomers
  ▲                                                                              │
  └── report ◀── a member is lost, or all stop at a border of steps ◀── train ◀──┘

Model, optimizer and data are made once, and stay. Each group of ranks has its own hooks, buckets and data part.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler

from polytempo.core import PolytempoError, Port, is_idle
from polytempo.core.calls.refusals import refuse
from polytempo.core.state import Saved
from polytempo.data.sample_account import SampleAccount
from polytempo.data.shard import DataShard
from polytempo.data.spans import PlaceSpan
from polytempo.membership.member import ElasticMember
from polytempo.membership.message import GroupView
from polytempo.report.status.row_exchanges import totals_of
from polytempo.spec.callbacks.callback import Control
from polytempo.spec.job_calls import data_of, schedule_of
from polytempo.spec.rates.plateau import Plateau
from polytempo.spec.rates.schedules import has_ended
from polytempo.spec.run_spec import RunSpec
from polytempo.training.checkpoint.optimizer_state import schedule_restore, schedule_saved
from polytempo.training.elastic.commit_point import Committed, Wishes, commit_point
from polytempo.training.elastic.elastic_state import broadcast_json
from polytempo.training.elastic.elastic_strategies import check_elastic
from polytempo.training.elastic.group_replica import attached, given_to_newcomers, left_behind, numbers_of, shard_of
from polytempo.training.elastic.island_member import IslandMember, island_member
from polytempo.training.elastic.local_round import LocalRound, Met, give_mean, met, models_differ
from polytempo.training.hooks.handle import Handle
from polytempo.training.hooks.speed_balance import SpeedBalance
from polytempo.training.job.context import TakeStep, TrainingContext, TrainingSummary, check_length
from polytempo.training.job.evaluate import evaluation_of
from polytempo.training.job.gradients import StepGradients
from polytempo.training.job.program import train
from polytempo.training.job.start import replica_of
from polytempo.training.model.agree import gather_json
from polytempo.training.model.run_device import on_device, run_device
from polytempo.training.observe.callback_host import host_of
from polytempo.training.observe.collective_observer import CollectiveObserver
from polytempo.training.observe.holding import Whole
from polytempo.training.observe.resumption import load
from polytempo.training.step.guard import unfinite_names
from polytempo.training.step.replica import Replica
from polytempo.worlds import ProcessWorld


class Stopped(PolytempoError):
    """All ranks stop before the same step, for the group of ranks is to change."""


class ElasticTraining:
    """One process's model, optimizer and data. `wishes` returns its requests; `record` takes rows of metrics."""

    def __init__(
        self, spec: RunSpec, life: int, wishes: Callable[[], Wishes], record: Callable[[dict[str, Any]], None]
    ) -> None:
        self._device = run_device(spec.options, spec.strategy, local=life)
        self.spec = spec = on_device(spec, self._device)
        self.member = ElasticMember(life)
        self.model, self.optimizer = replica_of(spec, self._device)
        self.data = data_of(spec.job, spec.options.data)
        self._wishes, self._record = wishes, record
        self._evaluation = evaluation_of(spec, self.model, self.data)
        self._unchecked = unfinite_names(self.model)
        self._rates = [group["lr"] for group in self.optimizer.param_groups]
        self._scheduler: LRScheduler | None = None
        self._seconds = 0.0
        self._place: dict[str, Any] = {}
        """Position in the data after the last step, or round of steps, that was applied."""
        self._next_place: dict[str, Any] = {}
        """Position after the step with a held answer."""
        self._round = LocalRound()
        """Since the last commit point, where ranks exchange parameters after their steps."""
        self._spans: list[PlaceSpan] | None = None
        """The places of the step in hand, where they are not this rank's alone."""
        self._island = island_member(spec.strategy)
        self._left: Replica | None = None
        """The replica of the last group, with a step that the island finishes or undoes."""
        self._uncounted = False
        """True if the step in hand is not in the round yet."""
        self._meets: Met | None = None
        """The ranks' meeting at a group's beginning, while it lasts."""
        self._saved: Saved | None = None
        """The strategy's state of this process, between two groups."""
        self._buffers: dict[str, Tensor] = {}
        """The model's buffers as they were before the step in hand."""
        self._inherited: Saved | None = None
        """Residuals of members that have left politely, which this one has taken over."""
        self._stop = self._some_leave = self._leaves = self._save = False
        self._asked = Control()
        """Requests of callbacks that all ranks follow after this step."""
        self._host = host_of(spec.options)
        self._on_step: Callable[[], None] | None = None
        self._handle: Handle | None = None
        self._begun = False
        """True if the state of the training is in the present group's replica."""
        self.context: TrainingContext | None = None
        self.account: SampleAccount | None = None
        self._open_account: list[list[int]] | None = None
        """The account before the last round, which ends with the training and not with an exchange."""
        self.other_bytes = 0.0
        """Bytes that this process has sent in earlier groups, for training."""

    # ------------------------------------------------------------------ between two groups

    def enter(self, view: GroupView) -> None:
        """Finish or undo the step in hand, as `view` says, and let go of the last group's hooks."""
        verdict = self.member.enter(view)
        handle, self._handle = self._handle, None
        if self._open_account is not None and self.account is not None:
            self.account.load_plain(self._open_account)
            self._open_account = None
        if handle is None:
            return
        handle.detach()
        if not self._begun:
            return
        replica = handle.replica
        holds = self._island is not None and self._island.holds
        if verdict == "finish":
            self._finish_step(replica)
        elif self._buffers and not holds:
            self._restore_buffers()
        if holds:
            self._left = replica
        else:
            self._keep_state(replica)
        assert self.context is not None
        world = handle.world
        self._seconds = self.context.seconds + world.now_s() - self.context.observer.off_s
        self.other_bytes += world.trace.bytes_sent[world.rank] - getattr(self.context.observer, "off_bytes", 0)

    def _finish_step(self, replica: Replica) -> None:
        if replica.parameters is not None and replica.parameters.holds:
            replica.parameters.take()
            replica.step = self.member.applied + self.member.holds
        else:
            self._step(replica)
        self._applied(None)

    def _step(self, replica: Replica) -> None:
        self.optimizer.step()
        for bucket in replica.buckets:
            bucket.commit()
        replica.step += 1

    def _join_island(self, world: ProcessWorld, island: IslandMember, stateful: int) -> None:
        """Finish or undo the step in hand with the others of the island, and be in an island of the new group."""
        holds = island.holds
        found = world.drive(island.deal(world.port, stateful, self._round))
        if not holds:
            return
        replica, self._left = self._left, None
        assert replica is not None
        if found is None:
            self._restore_buffers()
        else:
            self._step(replica)
            self._round, self._buffers = found, {}
        self._keep_state(replica)

    def _keep_state(self, replica: Replica) -> None:
        self._catch_up(replica)
        self._saved = replica.state()

    def _catch_up(self, replica: Replica) -> None:
        """Let the schedule be where the steps are."""
        own = None if isinstance(self._scheduler, Plateau) else self._scheduler  # scores move a plateau
        while own is not None and own.last_epoch < replica.step and not has_ended(own):
            own.step()

    def _applied(self, committed: Committed | None) -> None:
        """A step or a round is in the model; `committed` where this member came back from its commit point."""
        self.member.stepped()
        self._buffers = {}
        self._place, self._round = self._next_place, LocalRound()
        if committed is not None:
            assert self.account is not None
            self._stop, self._some_leave, self._save = committed.stop, committed.leaving > 0, committed.save
            self._asked = committed.asked
            self.account.add(committed.counted)
            self._goes_on()

    def _goes_on(self) -> None:
        if self._on_step is not None:
            self._on_step()
            self._on_step = None

    def _restore_buffers(self) -> None:
        with torch.no_grad():
            for name, buffer in self.model.named_buffers():
                buffer.copy_(self._buffers[name])
        self._buffers = {}

    # ------------------------------------------------------------------ a group

    def begin(self, world: ProcessWorld, view: GroupView) -> None:
        """Make this group's hooks, buckets and shard, and give newcomers their state."""
        port, spec = world.port, self.spec
        self._begun, self._meets = False, None
        if self._scheduler is None:
            self._scheduler = schedule_of(spec.job, self.optimizer, len(self._shard(0, spec.workers)))
        self._stop = self._some_leave = self._save = False
        if self._island is not None:
            self._join_island(world, self._island, view.stateful)
        given = (world, view, spec, self.model, self.optimizer)
        handle = self._handle = attached(*given, commit=self._commit_round, island=self._island)
        check_elastic(handle.replica.strategy)
        shard = self._shard(port.rank, port.size)
        self.context = TrainingContext(
            spec=spec,
            holding=Whole(handle.replica),
            shard=shard,
            balance=SpeedBalance(shard, handle.replica) if spec.options.balance == "speed" else None,
            data=self.data,
            take_step=self._take_step(handle),
            observer=CollectiveObserver(world, self._evaluation),
            scheduler=self._scheduler,
            unchecked=self._unchecked,
            leaves=lambda step: self._save,
            record=self._record if self._host is None else self._host.recording(self._record),
            host=self._host,
            asks=self._taken_requests,
            exchanged=lambda: totals_of(world),
        )
        if view.stateful:
            world.drive(self._share(port, view, self.context))
        else:
            self._start(world, self.context)
            self._begun = True
        if spec.options.scaling == "local":
            for group, rate in zip(self.optimizer.param_groups, self._rates, strict=True):
                group["lr"] = rate * port.size / spec.workers
        self._begin_callbacks(world, view)
        world.step = handle.replica.step

    def _taken_requests(self, step: int) -> Control:
        asked, self._asked = self._asked, Control()
        return asked

    def _begin_callbacks(self, world: ProcessWorld, view: GroupView) -> None:
        """Tell the callbacks on rank 0 of the run's start, or of the new group."""
        if self._host is None:
            return
        if not view.stateful and world.rank == 0:
            assert self.context is not None
            self._host.started(self.context.replica.step)
        elif world.rank == 0:
            self._host.faulted(f"the group of workers has changed: {world.size} go on")
        if view.stateful:
            world.drive(self._host.agreed(world.port))

    def _shard(self, rank: int, size: int) -> DataShard:
        return shard_of(self.spec, self.data, rank, size, self._device)

    def _start(self, world: ProcessWorld, context: TrainingContext) -> None:
        """The beginning of the run, or where a checkpoint goes on."""
        options, shard = self.spec.options, context.shard
        if options.resume:
            assert options.out is not None
            world.drive(load(world.port, context, options.out / "checkpoint"))
            self._scheduler = context.scheduler  # another one than saved is made again
        self.account = SampleAccount(check_length(shard))
        self.account.begin_at(shard.epoch, shard.consumed, shard.left)
        self._place, self._seconds = shard.state_dict(), context.seconds
        self.member.taken_over(context.replica.step)

    async def _share(self, port: Port, view: GroupView, context: TrainingContext) -> None:
        """Rank 0 says where the training stands; newcomers take it over."""
        newcomer, replica = port.rank >= view.stateful, context.replica
        if self.account is None:
            self.account = SampleAccount(check_length(context.shard))
        schedule = None if self._scheduler is None or newcomer else schedule_saved(self._scheduler)
        mine = self._saved or replica.state()
        told = await broadcast_json(
            port,
            {
                "place": self._place,
                "seconds": self._seconds,
                "schedule": schedule,
                "account": self.account.to_plain(),
                "scalars": mine.scalars,
            },
        )
        if not newcomer and self._place != told["place"]:
            raise AssertionError(f"rank {port.rank} goes on at {self._place}, and rank 0 at {told['place']}")
        mine = Saved(mine.tensors, told["scalars"] | {"step": view.step + self._round.steps})
        mine = await given_to_newcomers(port, mine, view.stateful, self._island)
        inherited, self._inherited = self._inherited, None
        replica.restore(mine, [] if newcomer else [mine] if inherited is None else [mine, inherited])
        context.shard.load_state_dict(told["place"])
        context.seconds = self._seconds = told["seconds"]
        self._place = told["place"]
        self.account.load_plain(told["account"])
        if self._scheduler is not None and (newcomer or isinstance(self._scheduler, Plateau)):
            schedule_restore(self._scheduler, told["schedule"])
        if isinstance(self._scheduler, Plateau):  # a member may have been lost while some had the score already
            self._scheduler.set_rates()
        self._begun = not newcomer
        if replica.parameters is not None:
            with replica.in_float32():
                await self._meet_at_once(port, view, context)
        elif newcomer:
            self.member.taken_over(view.step)
        self._begun = True

    async def _meet_at_once(self, port: Port, view: GroupView, context: TrainingContext) -> None:
        """Newcomers get the mean of the others' models, and the round that these are in ends here."""
        parameters = context.replica.parameters
        assert parameters is not None
        found = met(self._place, await gather_json(port, self._round.to_plain()))
        if view.stateful < port.size and await models_differ(port, parameters.groups(), view.stateful):
            await give_mean(port, parameters.groups(), view.stateful, numbers_of(self._island, port))
        newcomer = port.rank >= view.stateful
        if found.steps:
            self._meets = found
            self.member.applied = view.step
            await parameters.meet_at_once(port, view.step + found.steps)
            context.replica.step = view.step + found.steps
            context.shard.load_state_dict(self._place)
            self._catch_up(context.replica)
        if newcomer:  # not before: its model has steps that count for no one if all the others are lost
            self.member.taken_over(context.replica.step)

    # ------------------------------------------------------------------ training

    def train(self, world: ProcessWorld, on_step: Callable[[], None] | None = None) -> TrainingSummary:
        """Train to the end. `on_step`: called once, after the next step that is applied.

        Raises `PeerLost` or `TimedOut` where a member is lost, `Stopped` at a border.
        """
        assert self.context is not None
        self._on_step = on_step
        world.begin(self.spec.options.out)
        summary = world.drive(train(world.port, self.context))
        world.drive(self._close_account(world.port))
        if self._host is not None and world.rank == 0:
            self._host.finished()
        return summary

    async def _close_account(self, port: Port) -> None:
        """The final model is the mean of all, so that the steps since ranks met last count in it.

        They are not applied: if a rank is lost with its part of the result, the others have to meet after all.
        """
        assert self.account is not None
        assert self.context is not None
        if self.context.replica.parameters is not None:
            self._open_account, shard = self.account.to_plain(), self.context.shard
            own = self._round.counted(self._place, shard.state_dict())
            self.account.add((await commit_point(port, Wishes(), own)).counted)

    def _take_step(self, handle: Handle) -> TakeStep:
        """One step: the plain loop with the hooks of `attach`, and the commit point before the optimizer, or between
        the exchange of parameters and their change."""
        model, optimizer, replica = self.model, self.optimizer, handle.replica
        gradients = StepGradients(replica, self.spec, handle.no_sync)

        async def take_step(port: Port, batch: Any, samples: int, share: float | None) -> Tensor:
            if self._stop:
                if self._some_leave:
                    self._inherited = await left_behind(port, replica, self._island, leaves=self._leaves)
                raise Stopped(f"rank {port.rank} stops before step {replica.step}: the group of ranks is to change")
            if replica.parameters is not None and self._wishes().broken:
                raise Stopped(f"rank {port.rank} stops before step {replica.step}: another rank is lost")
            handle.begin_batch(share)
            self._buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
            self._spans = None
            loss = gradients.compute(batch, port.world_rank)
            await gradients.meet(port)
            handle.complete()
            handle.clip(self.spec.options.clip_norm)
            before, committed = replica.step, None
            if self._agrees_before(replica, port):
                committed = await self._commit_step(port)
            elif self._island is not None and _answered(replica):
                assert self.context is not None
                self._spans = await self._island.step(port, self._round, self.context.shard.spans)
            elif self.context is not None and not self.context.shard.spans:
                optimizer.zero_grad(set_to_none=False)  # a stand-in for samples that the others have
            self._uncounted = committed is None
            try:
                optimizer.step()
            finally:  # a member may be lost when buffers meet after the step, which stands nevertheless
                if replica.step > before:
                    self._applied(committed) if committed is not None else self._count()
            return loss

        return take_step

    def _agrees_before(self, replica: Replica, port: Port) -> bool:
        """True if ranks agree on this step before the optimizer makes it, or a rank that is alone does with itself."""
        if replica.parameters is None or (self._island is None and _answered(replica)):
            return True
        return port.size == 1 and is_idle(replica.strategy.parameters, 1)

    async def _commit_step(self, port: Port) -> Committed:
        assert self.context is not None
        if self._round.steps:
            refuse({"elastic", "both transforms"}, strategy=self.context.replica.strategy)
        shard, step = self.context.shard, LocalRound()
        step.stepped(shard.spans, shard.state_dict())
        return await self._commit(port, step, 1, shard.state_dict())

    async def _commit_round(self, port: Port) -> None:
        assert self.context is not None
        found, self._meets = self._meets, None
        if found is None:
            if not self._uncounted and port.size == 1:
                return  # it has agreed with itself before the step
            if not self._uncounted:
                refuse({"elastic", "both transforms"}, strategy=self.context.replica.strategy)
            self._count()
            found = Met(self._round.steps, self.context.shard.state_dict())
        self._applied(await self._commit(port, self._round, *found))

    async def _commit(self, port: Port, own: LocalRound, steps: int, place: dict[str, Any]) -> Committed:
        self._next_place = place
        self.member.exchanged(steps)
        wishes = self._wishes()
        if self._host is not None and port.rank == 0:
            wishes = wishes._replace(asked=self._host.take())
        self._leaves = wishes.leave
        return await commit_point(port, wishes, own.counted(self._place, place))

    def _count(self) -> None:
        """The step in hand is in this rank's model."""
        assert self.context is not None
        if self._uncounted:
            self._uncounted, self._buffers = False, {}
            shard = self.context.shard
            self._round.stepped(shard.spans if self._spans is None else self._spans, shard.state_dict())
            if self._island is not None:
                self._island.holds = False
            self._goes_on()


def _answered(replica: Replica) -> bool:
    return any(bucket.answered for bucket in replica.buckets)
