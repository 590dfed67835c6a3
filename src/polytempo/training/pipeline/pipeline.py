"""`Pipeline`: one rank's part of a model with layers on several ranks, trained in a loop of one's own."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

from torch import Tensor, nn
from torch.optim import Optimizer

from polytempo.core import Port, Strategy
from polytempo.core.state import Saved
from polytempo.core.strategy import InStages
from polytempo.partition.cut import Cut, unbalanced
from polytempo.partition.cutting import By, cut
from polytempo.partition.schedules.action import Schedule
from polytempo.partition.schedules.facts import steps_late
from polytempo.partition.staged_strategy import over_stages
from polytempo.partition.wires import AS_THEY_ARE, Wires, sent_bytes
from polytempo.spec.callbacks.callback import Control
from polytempo.spec.callbacks.reading import NO_CALLBACKS, Callbacks
from polytempo.spec.text.catalogue import strategy_from
from polytempo.strategies import sync_sgd
from polytempo.training.checkpoint.optimizer_state import optimizer_restore, optimizer_saved
from polytempo.training.hooks.drift_watch import watch
from polytempo.training.hooks.loop_callbacks import LoopCallbacks
from polytempo.training.model.agree import agree, broadcast_model, gather_json, next_series, share_of
from polytempo.training.model.ports import mesh_of
from polytempo.training.observe.callback_host import CallbackHost
from polytempo.training.observe.loop_folder import LoggingHandle
from polytempo.training.pipeline.pipeline_stage import Loss, PipelineStage, laid_out, of_parameters, schedule_of
from polytempo.training.step.pace_store import watch_pace
from polytempo.wire.memory import keep_memory
from polytempo.worlds import ProcessWorld


class Pipeline(LoggingHandle):
    """One rank's stage. `model` holds its parts, `optimizer` trains them.

    `watch` and `begin_callbacks` come before the first step; all ranks call them. The first replica's last stage, which
    gets the loss, `writes` the loop's folder.
    """

    def __init__(
        self,
        world: ProcessWorld,
        model: nn.Module,
        optimizer: Callable[[Iterable[nn.Parameter]], Optimizer],
        loss: Loss,
        strategy: Strategy,
        sample: Any,
        by: By | Sequence[str],
        max_norm: float | None,
        seed: int,
        callbacks: Callbacks = NO_CALLBACKS,
    ) -> None:
        super().__init__(lambda: world)
        keep_memory()  # of activations
        self._world, self.schedule = world, schedule_of(strategy)
        _check_max_norm(max_norm, self.schedule)
        ranks = 1 if strategy.parted is None else strategy.parted.ranks
        whole = laid_out(world.port, self.schedule.stages, ranks)
        self.cut, self._told = agreed_cut(world, whole, model, strategy, sample, by, seed, max_norm, callbacks)
        if world.size > 1:
            world.drive(broadcast_model(whole, model, frozenset()))
        make = of_parameters(optimizer)
        series = next_series(world)
        options: dict[str, Any] = {"seed": seed, "max_norm": max_norm, "series": series}
        self._stage = PipelineStage(model, self.cut, make, loss, strategy, whole, **options)
        self._stage.replica.pace = watch_pace(world, strategy, series, self._stage.number)
        self.stage, self.ports = self._stage.number, self._stage.ports
        self.model, self.optimizer = self._stage.model, self._stage.optimizer
        self._steps = 0
        self._callbacks: LoopCallbacks | None = None

    def begin_callbacks(self, host: CallbackHost) -> None:
        """Call `on_start`, and the other callbacks in the steps to come."""
        self._callbacks = LoopCallbacks(self._world, self.model, host)

    @property
    def steps(self) -> int:
        """Steps so far, with the steps before it was resumed."""
        return self._steps

    @property
    def writes(self) -> bool:
        """True on the rank that writes the loop's folder."""
        return self.stage == self.schedule.stages - 1 and self.ports.data.rank == self._stage.holders.rank == 0

    def step(self, *batch: Any) -> Tensor | None:
        """Train on one batch: the model's inputs, then the target. All stages of a replica are given the same.

        A batch of `pt.shard` has its share of all replicas' samples as its weight, others count alike. ValueError where
        `pt.shard` deals other batches to the stages of a replica.

        Returns the batch's mean loss on the last stage, None on the others. With a schedule that does not wait the
        update by this batch's gradient comes `delay` steps later.
        """
        if len(batch) != len(self.cut.inputs) + 1:
            names = ", ".join((*self.cut.inputs, "target"))
            raise ValueError(f"step takes the model's inputs and the target, ({names}); got {len(batch)} arguments")
        loss: Tensor | None = self._world.drive(self._stage.step(batch[:-1], batch[-1], self._share_of(batch)))
        if self._world.dealing is not None:
            self._world.dealing.after_step(self._stage.replica, self.ports)
        self._steps += 1
        if self.profiler is not None:
            self.profiler.begins(self._steps)
        if self._callbacks is not None:
            self._callbacks.stepped(self._steps)
        return loss

    def _share_of(self, batch: Sequence[Any]) -> float | None:
        dealt, own = self._world.shares.given(*batch), self.ports.data
        if dealt is None:
            return None
        if dealt.ranks != own.members:
            raise ValueError(
                f"pt.shard deals batches of their own to the ranks {list(dealt.ranks)}, and the replicas of this stage "
                f"are on {list(own.members)}; stages of a replica take the same batch: lay the ranks out before both, "
                f"by pt.init(mesh={mesh_of(self.ports.whole).lengths})"
            )
        return dealt.share if dealt.weight is None else self._world.drive(share_of(own, dealt.weight))

    def sent_bytes(self, *batch: Any) -> list[int]:
        """Bytes that each stage of a replica sends to the others in a step with a batch of these sizes.

        Exchanges between replicas of a stage are not among them: see `Strategy.gradients.cost`.
        """
        split = self._stage.micro_batches(batch[:-1], batch[-1])
        each = [sent_bytes(self.cut, part.layouts, self.schedule.stages, self.schedule.wires) for part in split]
        return [sum(column) for column in zip(*each, strict=True)]

    def finish(self) -> None:
        """Take the gradients that are under way back through all stages, and update by them. All ranks call it.

        Raises `Drifted` where replicas of a stage differ that must be equal.
        """
        self._world.drive(self._stage.finish())
        if self._stage.replica.drift is not None:
            self._stage.replica.drift.check(buffers=False)

    def detach(self) -> None:
        """End the loop: its folder, profile, and `on_finish` of callbacks. All ranks call it; a second call does
        nothing."""
        if self._callbacks is not None:
            self._callbacks.finish()
        if self.profiler is not None:
            self.profiler.close(self._steps)
        self.loop_log.close()

    # ------------------------------------------------------------------ callbacks

    def asked(self) -> Control:
        """The requests of callbacks since the last call, the same on all ranks; a request to stop stays.

        if pipe.asked().save:
            torch.save(pipe.training_state(), f"rank-{rank}.pt")
        """
        return Control() if self._callbacks is None else self._callbacks.asked()

    @property
    def stopped(self) -> bool:
        """True once a callback has asked for the end; all ranks see it after the same step, and `pt.shard` ends."""
        return self._callbacks is not None and self._callbacks.stopped

    def evaluated(self, values: Mapping[str, float]) -> None:
        """Give callbacks the loop's own scores (`on_evaluation`). All ranks call it, and hear the requests here; rank
        0's values count."""
        if self._callbacks is not None:
            self._callbacks.evaluated(values)

    def watch(self, on_drift: Literal["stop", "ignore"]) -> None:
        """Compare this stage with its replicas from now on; see `pipeline`. All ranks call it before the first step."""
        self._stage.replica.drift = watch(self._world, self.ports.data, self._stage.replica, on_drift)

    @property
    def delay(self) -> int:
        """Updates of this stage between a batch's forward pass and the update by its gradient."""
        return self._stage.facts.delay

    @property
    def diagnoses(self) -> list[dict[str, Any]]:
        """Slow stages that were found so far, on rank 0; see docs/diagnosis.md."""
        return [] if self._stage.replica.pace is None else list(self._stage.replica.pace.told)

    def state_dict(self) -> dict[str, Tensor]:
        """The whole model's parameters and buffers, by its own names, on every rank. All ranks call it."""
        return self._world.drive(self._stage.state_dict())

    def training_state(self) -> dict[str, Any]:
        """The state that this rank needs to go on after the last step, to the same bits, for `torch.save`. All ranks
        call it.

        It has the stage's parameters and buffers, its optimizer, the state of the strategy between replicas, batches
        under way with the versions of the parameters that they began with, and sent messages that are not used yet.
        """
        stage = self._stage
        self._world.drive(stage.replica.settle())
        strategy = stage.replica.state()
        parts = {
            "model": Saved(dict(stage.model.state_dict()), {}),
            "optimizer": optimizer_saved(self.optimizer),
            "strategy": Saved(*strategy),
            "stage": stage.state(),
        }
        plain = {
            name: {"tensors": _copied(part.tensors), "scalars": dict(part.scalars)} for name, part in parts.items()
        }
        called = {} if self._callbacks is None else {"callbacks": [self._steps, self._callbacks.state()]}
        return {"of": self._identity, **plain, **called}

    def load_training_state(self, state: Mapping[str, Any]) -> None:
        """Go on from this rank's `training_state`, in a pipeline that has made no step yet.

        Errors: ValueError where it was saved by another rank, schedule, cut or strategy; the whole model's
        `state_dict`, loaded into the model before it is cut, goes on in other stages.
        """
        if self._stage.program.step_number:
            raise ValueError(
                f"this pipeline has made {self._stage.program.step_number} steps, whose messages are under way; load "
                "the state into a new one"
            )
        if others := [f"{k} {state['of'].get(k)!r}" for k, own in self._identity.items() if state["of"].get(k) != own]:
            raise ValueError(
                f"the state was saved by a pipeline with {', '.join(others)}, and this one differs; make it as it was, "
                "or load state_dict() of the saved one into the model before it is cut"
            )
        model, optimizer, strategy, stage = (
            Saved(_copied(state[name]["tensors"]), state[name]["scalars"])
            for name in ("model", "optimizer", "strategy", "stage")
        )
        self.model.load_state_dict(model.tensors)
        optimizer_restore(self.optimizer, optimizer)
        self._stage.replica.restore(strategy)
        self._stage.restore(stage)
        self._steps, states = state.get("callbacks", (self._stage.program.step_number, ""))
        self.loop_log.resumed(self._steps)
        if self._callbacks is not None and states:
            self._callbacks.restore(states, self._steps)

    @property
    def _identity(self) -> dict[str, Any]:
        return self._told | {"rank": self._world.rank, "ranks": self._world.size}


def _check_max_norm(max_norm: float | None, schedule: Schedule) -> None:
    """Raise ValueError where a stage would wait in its step for the norm of gradients of later steps."""
    if max_norm is not None and steps_late(schedule):
        raise ValueError(
            f"max_norm={max_norm:g} clips by the norm of the whole model's gradient, and in {schedule.name} the first "
            f"stage has its part {steps_late(schedule)} steps after the last one; use a schedule that waits (gpipe, "
            "one_f_one_b, interleaved, zero_bubble), or leave max_norm out"
        )


def _copied(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in tensors.items()}


def agreed_cut(
    world: ProcessWorld,
    port: Port,
    model: nn.Module,
    strategy: Strategy,
    sample: Any,
    by: By | Sequence[str],
    seed: int,
    max_norm: float | None,
    callbacks: Callbacks = NO_CALLBACKS,
) -> tuple[Cut, dict[str, Any]]:
    """The same cut on all ranks of `port`, and the facts that they have agreed on, but the callbacks. All call it.
    Errors: `Mismatch`."""
    schedule = schedule_of(strategy)
    found = cut(model, schedule.stages * schedule.parts, sample=sample, by=by)
    if not isinstance(by, str) and port.rank == 0:
        _warn_unbalanced(found)
    if by == "time" and port.size > 1:  # each rank has measured for itself
        begins = world.drive(gather_json(port, list(found.begins)))[0]
        found = cut(model, sample=sample, by=begins)
    told = {"schedule": str(schedule), "stages": schedule.stages, "micro_batches": schedule.micro_batches}
    told |= {"strategy": str(strategy), "begins": list(found.begins), "seed": seed, "max_norm": max_norm}
    told |= {"wires": str(schedule.wires)}
    world.drive(agree(port, told | {"callbacks": str(callbacks)}))
    return found, told


def _warn_unbalanced(found: Cut) -> None:
    if said := unbalanced(found.costs, [cost.operations for cost in found.costs], most=1.5):
        warnings.warn(f"{said}, by the operations counted; cut by other names, or by='operations'", stacklevel=5)


def strategy_of(schedule: Schedule | Strategy | str, inner: Strategy | None, wires: Wires = AS_THEY_ARE) -> Strategy:
    """The strategy of a pipeline: given as one, or as its schedule, the `inner` strategy of a stage's replicas, and
    codecs between stages. ValueError for a strategy that cuts nothing, and for a double answer."""
    return _wired(_staged(schedule if isinstance(schedule, Schedule) else strategy_from(schedule), inner), wires)


def _staged(schedule: Schedule | Strategy, inner: Strategy | None) -> Strategy:
    if isinstance(schedule, Schedule):
        between = inner or sync_sgd()
        return over_stages(f"{schedule}, {between} between replicas", schedule, between)
    if schedule.schedule is None:
        raise ValueError(
            f"{schedule} leaves the model whole, and a pipeline cuts it; give a strategy with stages, such as "
            "one_f_one_b(stages=2), or use pt.attach"
        )
    if inner is not None:
        raise ValueError(f"{schedule} says itself what replicas do; give it inner={inner} there, and leave out inner")
    return schedule


def _wired(strategy: Strategy, wires: Wires) -> Strategy:
    """The strategy with these codecs between stages. ValueError where it has codecs itself, too."""
    schedule = schedule_of(strategy)
    if wires == AS_THEY_ARE:
        return strategy
    if schedule.wires != AS_THEY_ARE:
        raise ValueError(
            f"{strategy} says itself by which codecs tensors pass between stages; leave out activations and gradients "
            "there, or here"
        )
    assert isinstance(strategy.layout, InStages)
    return replace(strategy, layout=replace(strategy.layout, schedule=replace(schedule, wires=wires)))
