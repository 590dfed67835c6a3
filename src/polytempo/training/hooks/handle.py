"""`Handle`: the hooks of `attach` on a loop's optimizer, and methods to pause, join, score, save and end."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from torch.amp import GradScaler
from torch.utils.hooks import RemovableHandle

import polytempo
from polytempo.core import Promise, Strategy
from polytempo.core.calls.refusals import refuse
from polytempo.core.port import barrier
from polytempo.core.state import Saved
from polytempo.core.system.notice import Notice, preempting_signals
from polytempo.large_batch.noise_scale import NoiseScale
from polytempo.one_host.hogwild import TurnHooks
from polytempo.one_host.one_copy import OneCopy, own_parameters
from polytempo.partition.branches import ThreadedModel
from polytempo.spec.callbacks.callback import Control
from polytempo.training.hooks.backward import Backward
from polytempo.training.hooks.join import JoinMembership
from polytempo.training.hooks.loop_callbacks import LoopCallbacks
from polytempo.training.hooks.preemption import PreemptionWatch
from polytempo.training.hooks.step_hooks import StepChecks, StepHooks
from polytempo.training.hooks.weak_hook import WeakHook
from polytempo.training.model.ownership import Ownership, called_modules
from polytempo.training.model.ports import Ports
from polytempo.training.observe.loop_folder import LoggingHandle
from polytempo.training.observe.loop_score import evaluating, scored
from polytempo.training.step.loss_scale import LossScale
from polytempo.training.step.parameter_exchange import noted
from polytempo.training.step.replica import Replica
from polytempo.worlds import ProcessWorld

STATE_VERSION = 1
"""The version of `Handle.state_dict`: one more where a state of before means something else, or lacks something."""


def _check_state(state: Mapping[str, Any], strategy: Strategy, size: int) -> None:
    """`Incompatible` where `Handle.load_state_dict` would misunderstand the state."""
    if (version := state.get("version")) != STATE_VERSION:
        found = "no version" if version is None else f"version {version} of Polytempo {state.get('polytempo')}"
        here = f"version {STATE_VERSION} of Polytempo {polytempo.__version__}"
        names = ", ".join(map(str, state)) or "nothing"
        refuse({"own loop", "state of another version"}, found=found, here=here, names=names)
    if state["strategy"] != str(strategy):
        refuse({"own loop", "state of another strategy"}, saved=state["strategy"], strategy=strategy)
    if state["ranks"] != size and state["tensors"]:
        refuse({"own loop", "other ranks"}, saved=state["ranks"], size=size, strategy=strategy)


class Handle(LoggingHandle):
    """The answer of `attach`: the replica, the hooks, and methods to pause, join, score, save and end."""

    def __init__(
        self,
        world: ProcessWorld,
        ports: Ports,
        replica: Replica,
        *,
        copy: OneCopy | None = None,
        turns: TurnHooks | None = None,
        scaler: GradScaler | None = None,
    ) -> None:
        self.world, self.ports, self.replica = world, ports, replica
        self.attached = True
        """True while the hooks are on."""
        super().__init__(lambda: world)
        self.callbacks: LoopCallbacks | None = None
        """The loop's callbacks, where `attach` was given some."""
        self.threaded: ThreadedModel | None = None
        """The model's branches on several threads, where `attach` was given `threads`."""
        self.one_copy, self._turns = copy, turns
        self._members = JoinMembership(world, ports.data, replica, sums_at_step=copy is not None)
        feels_scales = _feels_scales(replica, copy, turns) or ports.model.size > 1 or bool(replica.own)
        scale = LossScale(scaler) if scaler is not None and scaler.is_enabled() else None
        self._has_scaler = scale is not None
        if replica.exchanges_gradients and Promise.LINEAR not in replica.strategy.gradients.promises:
            replica.loss_scale = scale
        agreed_scale = scale if feels_scales else None
        self._backward = Backward(world, ports, replica, self._members, scale=agreed_scale)
        self._watch: PreemptionWatch | None = None
        self._asked = 0
        self._checks = StepChecks(replica, feels_scales=feels_scales, has_scaler=self._has_scaler)
        self._step = StepHooks(world, ports, replica, self._checks, self._members, self._backward, copy)
        self._hooks: list[RemovableHandle] = self._step.before()
        if replica.masters is not None:
            self._hooks += replica.masters.watch()
        self._ownership = Ownership(replica.model, replica.optimizer) if _meets(replica, copy, turns) else None
        if turns is not None:
            turns.watch()
        self._hooks += [replica.optimizer.register_step_post_hook(self._after_step), *self._backward.watch()]
        hook = WeakHook(self._members.given_to)
        for module in called_modules(replica.model):
            self._hooks.append(module.register_forward_pre_hook(hook, with_kwargs=True))

    @property
    def step(self) -> int:
        """Optimizer steps since the start (of the first run, where one was resumed)."""
        return self.replica.step

    @property
    def noise_scale(self) -> NoiseScale | None:
        """The noise scale as measured so far, the same on all ranks; None unless `attach` was asked to measure it."""
        return None if self.replica.noise is None else self.replica.noise.noise

    @property
    def diagnoses(self) -> list[dict[str, Any]]:
        """Slow ranks that were found so far, on rank 0, each with its `text` and `values`; see docs/diagnosis.md."""
        return [] if self.replica.pace is None else list(self.replica.pace.told)

    def _after_step(self, *_: Any) -> None:
        """The hook that keeps an optimizer's handle alive."""
        if self._step.ends():
            self._step.after_step()
            if self.profiler is not None:
                self.profiler.begins(self.step)

    # ------------------------------------------------------------------ contexts

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward passes inside accumulate gradients locally; the next one outside exchanges their sum.

        Each batch of `pt.shard` counts by its own share, also where they are uneven, and where several share a backward
        pass (then terms of the loss beside the model's outputs count by the first one's); in a compiled model, and of
        gradients that are added to some that were exchanged, all count by the last batch's. With a weight of
        `pt.shard` their mean is exchanged, and not their sum.
        """
        before, self._backward.silent = self._backward.silent, True
        try:
            yield
        finally:
            self._backward.silent = before

    @contextmanager
    def consensus(self) -> Iterator[None]:
        """Lend the ranks' common model to the block, to be scored or saved: their mean.

            with handle.consensus():
                evaluate(model)

        Where models differ between their meetings (`local_sgd`, `gossip`, …) its parameters, and the buffers that meet,
        are the means over the ranks, in memory of their own; afterwards the rank's own are there again. All ranks must
        call it. Training does not notice. `optimizer.step()` inside raises RuntimeError.

        Cost: one mean over the parameters, and memory for it; nothing where all ranks hold the same model anyway.
        """
        replica, port = self.replica, self.ports.data
        self._catch_up()
        if replica.strategy.synchronized or port.size == 1:
            yield
            return
        if self._turns is not None:
            self.world.drive(barrier(port))  # so that no rank writes while others read
        agreed = self.world.drive(replica.consensus(port)) | self.world.drive(replica.consensus_buffers(port))
        named = [*replica.model.named_parameters(), *replica.model.named_buffers()]
        with replica.in_float32():
            own = [(tensor, tensor.data) for name, tensor in named if name in agreed]
            for name, tensor in named:
                if name in agreed:
                    tensor.data = agreed[name]
            self._checks.lends = True
            try:
                yield
            finally:
                self._checks.lends = False
                for tensor, data in own:
                    tensor.data = data

    def evaluate(
        self, function: Callable[[Any], Any], data: Any, metrics: Mapping[str, Any] | None = None
    ) -> dict[str, float]:
        """Score `data` on the ranks' common model, each rank on a part: one process's numbers, the same on all ranks.

            found = handle.evaluate(lambda batch: {"accuracy": model(batch[0]).argmax(-1) == batch[1]}, test)

        It is `pt.score` inside `consensus`, with the model in the mode of evaluation; training does not notice. Ranks
        that hold parts of one model take the same batches. All ranks must call it. Callbacks get the numbers
        (`on_evaluation`), and all ranks hear their requests here. Errors: as `pt.score`.
        """
        with self.consensus(), evaluating(self.replica.model):
            found = self.world.drive(scored(self.ports.data, function, data, metrics))
        if self.callbacks is not None:
            self.callbacks.evaluated(found)
        return found

    @contextmanager
    def join(self) -> Iterator[None]:
        """Let ranks leave the loop inside after different numbers of steps; no rank hangs.

        A rank that leaves takes part with weight zero until all have left; the active ranks count the same, for any
        share from `pt.shard`. All end with the same parameters and running statistics: where a strategy lets models
        differ, with the mean of the ranks that trained to the last step. Each step costs one more all-reduce of one
        number for each rank, which tells the active ranks.

        Raises ValueError where the strategy would hear ranks that have left (gossip, adasum, robust merges), and with
        `scaler=`; RuntimeError for a backward pass without a step, because ranks that have left take it for a step's
        pass.
        """
        masters = self.replica.masters
        if self._has_scaler or (masters is not None and masters.scaling.dynamic):
            who = "a GradScaler" if self._has_scaler else f"precision={masters.precision}" if masters else ""
            raise ValueError(
                f"{who} skips steps, which ranks that have left join() do not see; give all ranks equally many "
                "batches, as pt.shard does"
            )
        if self.replica.noise is not None:
            raise ValueError(
                "the noise scale is measured between ranks that all train; leave out join(), or noise_scale"
            )
        if self.replica.own:
            raise ValueError(
                "layers of the model are divided over the ranks by pt.hybrid, so a rank that has left join() would be "
                "missing in the others' passes; give all ranks equally many batches, as pt.shard does"
            )
        with self._members.join(self._step.shadow_step):
            yield

    def begin_batch(self, share: float | None) -> None:
        """The next step is made of a batch with this share; batches of `pt.shard` are recognised without a call."""
        self._members.begin_batch(share)

    def begin_inputs(self, *inputs: Any) -> None:
        """The next gradients are of this batch of `pt.shard`, which a library hands to a method of the model."""
        self._members.given_to(self.replica.model, inputs, {})

    def complete(self) -> None:
        """Exchange the next step's gradients now, as `optimizer.step()` would do, unless that has been done."""
        if self.replica.exchanges_gradients:
            self._backward.complete()

    def scaled(self, loss: Tensor) -> Tensor:
        """The loss times the loss scale of `precision`; call `backward()` on it under fp16.

            handle.scaled(loss).backward()

        Without a loss scale it is the loss.
        """
        return self.replica.scaled(noted(self.replica.parameters, loss))

    # ------------------------------------------------------------------ callbacks

    def on_step(self, heard: Callable[[int], None]) -> None:
        """Call `heard(step)` after each step and its exchanges; a loop with callbacks has them in its place."""
        self._step.on_end = heard

    def on_loaded(self, heard: Callable[[], None]) -> None:
        """Call `heard()` before a step with parameters that were replaced since the last step, or since now."""
        self._step.loaded.call(heard)

    def begin_callbacks(self, callbacks: LoopCallbacks) -> None:
        """Let `callbacks` see the steps from now on."""
        self.callbacks, self._step.on_end = callbacks, callbacks.stepped

    def asked(self) -> Control:
        """The requests of callbacks since the last call, the same on all ranks; a request to stop stays.

            asked = handle.asked()
            if asked.evaluate:
                handle.evaluate(score, test)
            if asked.save:
                save()

        Ask it after `optimizer.step()`, on all ranks. Without callbacks nothing is asked for.
        """
        return Control() if self.callbacks is None else self.callbacks.asked()

    @property
    def stopped(self) -> bool:
        """True once a callback has asked for the end; all ranks see it after the same step.

        `pt.shard` ends there; a loop over another loader breaks: `if handle.stopped: break`.
        """
        return self.callbacks is not None and self.callbacks.stopped

    # ------------------------------------------------------------------ saving and ending

    def preempted(self) -> bool:
        """True if the loop should save and leave now, because SIGTERM has come to this process or to another rank.

            if handle.preempted():
                save()
                raise pt.errors.Preempted(handle.step)     # exit code 75

        All ranks call it at the same places of their loop, once a step, and get the same answer. From the first call on
        SIGTERM does not end this process; a second one, a second later, does. Cost: 40 bytes a rank each quarter of a
        second, without waiting.
        """
        if self._watch is None:
            notice = Notice(float(os.environ.get("POLYTEMPO_GRACE_S", "30")))
            notice.watch(preempting_signals())
            self._watch = PreemptionWatch(self.world, notice)
        self._asked += 1
        return self._watch.agreed(self._asked)

    def state_dict(self) -> dict[str, Any]:
        """The strategy's state of this rank after the last step, by parameter: save it beside the model's and the
        optimizer's.

        All ranks must call it, because exchanges that are under way are finished first.
        """
        self._catch_up()
        self.world.drive(self.replica.settle())
        if self.replica.drift is not None:
            self.replica.drift.check(buffers=False)
        tensors, scalars = self.replica.state()
        if self.replica.masters is not None:
            scalars |= self.replica.masters.saved()
        state = {
            "version": STATE_VERSION,
            "polytempo": polytempo.__version__,
            "strategy": str(self.replica.strategy),
            "ranks": self.world.size,
            "tensors": {k: t.clone() for k, t in tensors.items()},
            "scalars": scalars,
        }
        return state if self.callbacks is None else state | {"callbacks": self.callbacks.state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from this rank's `state_dict`.

        Errors: `Incompatible` for anything but a `state_dict` of this version (PT1117), of this strategy (PT1118) and
        of as many ranks, unless there are no tensors in it (PT1119); ValueError for a state of another model.
        """
        _check_state(state, self.replica.strategy, self.world.size)
        self.replica.restore(Saved(state["tensors"], state["scalars"]))
        self.loop_log.resumed(self.replica.step)
        if self.callbacks is not None and "callbacks" in state:
            self.callbacks.restore(state["callbacks"], self.replica.step)
        if self.replica.masters is not None:
            self.replica.masters.restore(state["scalars"])
        self.world.step = self.replica.step

    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Limit the norm of the coming step's gradient to `max_norm`; returns its present norm.

        The norm is the norm of the ranks' mean gradient. `.grad` holds it where the strategy exchanges gradients in
        `backward`, and is scaled as `torch.nn.utils.clip_grad_norm_` does. Where several ranks hold parts of a model,
        it is the norm of all parts, and all of these ranks call this. Under `shared_memory()` `.grad` is this rank's
        own: all ranks call this, and the step does the scaling. So does a step of float32 masters: `.grad` does not
        change, and the norm is of the optimizer's gradients, without the loss scale.
        """
        if self.one_copy is None:
            return self.world.drive(self.replica.clip_whole(self.ports.data, self.ports.model, max_norm))
        if self._members.joining:
            raise ValueError(
                "inside join() ranks that have left could not take part in clip_grad_norm_(); leave it out"
            )
        self._members.agree_on_share()
        return self.one_copy.clip_grad_norm_(max_norm, self._members.share)

    def clip(self, max_norm: float | None) -> None:
        """`clip_grad_norm_` in a job's step, once all gradients are there, are exchanged and were looked at."""
        if max_norm is None:
            return
        self.complete()
        if self.replica.guard is not None and not (self.replica.exchanges_gradients or self.one_copy):
            self.replica.guard.gradients(self.replica.step, self.world.rank)
        self.clip_grad_norm_(max_norm)

    def detach(self) -> None:
        """Take the hooks off; the loop is an ordinary one again.

        Exchanges under way are dropped (`delayed_sgd`): call `state_dict` first to finish them, where the ranks are to
        exchange something else afterwards. Where ranks share one copy of the parameters all must call it, and each gets
        parameters of its own. Raises NotFinite for values of the last step on a device, where `allow_nan` is False.
        """
        for hook in [*self._hooks, *self.replica.hooks, *self._members.hooks]:
            hook.remove()
        if self.replica.masters is not None:
            self.replica.masters.end()
        if self.threaded is not None:
            self.threaded.remove()
        if self._watch is not None:
            self._watch.close()
        if self.callbacks is not None:
            self.callbacks.finish()
        if self.replica.drift is not None:
            self.replica.drift.end()
        if self.replica.noise is not None:
            self.replica.noise.finish()
        if self.replica.pace is not None:
            self.replica.pace.finish()
        self.loop_log.close()
        self._hooks = []
        if self._ownership is not None:
            self._ownership.end()
        if self._turns is not None:
            self._turns.remove()
            own_parameters(self.world, self.replica.trainable, self._turns.common)
        if self.one_copy is not None:
            self.one_copy.detach()
        if self.profiler is not None:
            self.profiler.close(self.step)
        self.attached = False
        self._catch_up()

    def _catch_up(self) -> None:
        """Read the looks for NaN that are under way on a device."""
        if self.replica.guard is not None:
            self.replica.guard.catch_up(self.world.rank)


def _meets(replica: Replica, copy: OneCopy | None, turns: TurnHooks | None) -> bool:
    return copy is not None or turns is not None or replica.exchanges_gradients or replica.exchanges_parameters


def _feels_scales(replica: Replica, copy: OneCopy | None, turns: TurnHooks | None) -> bool:
    """True if scaled losses, or a step that one rank skips, would change more than `.grad`."""
    strategy = replica.strategy
    linear = Promise.LINEAR in strategy.gradients.promises
    means = replica.exchanges_gradients and linear and not replica.exchanges_parameters
    free = turns is not None and strategy.one_copy != "in_turn"
    return _meets(replica, copy, turns) and not means and not free
