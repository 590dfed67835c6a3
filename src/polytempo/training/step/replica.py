"""`Replica`: a model, its optimizer and its strategy's state on one rank, for both worlds.

    backward ──▶ gradients, in buckets ──▶ strategy.gradients ──▶ .grad ──▶ optimizer.step
                                                                                │
    next forward ◀── parameters ◀── strategy.parameters ◀──────────────────────┘

A replica performs nothing itself: its exchanges are coroutines over `data`, the port of the ranks that hold the same
parameters and see other samples.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from polytempo.collectives import tree
from polytempo.core import Bundle, NotFinite, Port, Promise, State, Strategy, averaging, identity, is_idle, native
from polytempo.core.bundle import by_kind
from polytempo.core.calls.refusals import refuse
from polytempo.core.state import Saved, restored, saved_states, settled
from polytempo.partition.hybrid.hybrid_model import divided_layers
from polytempo.partition.tensor.split_model import split_models
from polytempo.synchronization.every import has_turn
from polytempo.training.checkpoint.optimizer_state import begin_states, steps_each_by_itself
from polytempo.training.federated.client_states import ClientStates
from polytempo.training.model.parted_parameters import (
    check_optimizer,
    clip_grad_norm_,
    counted_elsewhere,
    gradient_norm,
    own_parameters,
    shared_elsewhere,
)
from polytempo.training.model.provisional_step import ProvisionalStep, makes_provisional
from polytempo.training.model.requirements import fitted
from polytempo.training.model.trainable_parameters import sparse_tables, trainable
from polytempo.training.precision.masters import Masters
from polytempo.training.precision.wide_bucket import ScaleNow, WideBucket
from polytempo.training.step.bucket import Bucket, Empty
from polytempo.training.step.bucket_cuts import DEFAULT_BUCKET_BYTES, buckets
from polytempo.training.step.buffers import BUFFER_CHANNEL, AppliedTransform, BufferRule, MemberWeight, ModelBuffers
from polytempo.training.step.guard import Guard
from polytempo.training.step.loss_scale import LossScale
from polytempo.training.step.noise_watch import NoiseWatch
from polytempo.training.step.pace_watch import PaceWatch
from polytempo.training.step.parameter_exchange import Commit, ParameterExchange

_UNUSED_CHANNEL = 1020


class Replica:
    """One rank's training state.

    `empty` makes the memory of exchanged gradients, if it needs a certain kind. Without `allow_nan` tensors that are
    not finite are refused before another rank gets them. `masters`: the float32 parameters of a 16-bit model. `commit`:
    see `ParameterExchange`.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        strategy: Strategy,
        num_ranks: int,
        *,
        bucket_bytes: int = DEFAULT_BUCKET_BYTES,
        buffer_rule: BufferRule = "average",
        empty: Empty | None = None,
        allow_nan: bool = True,
        masters: Masters | None = None,
        commit: Commit | None = None,
    ) -> None:
        refuse(strategy.features | {"trainer"}, strategy=strategy)
        strategy = fitted(strategy, optimizer)
        self.masters = masters
        """The float32 parameters, where the model computes in 16 bits."""
        self.model, self.optimizer, self.strategy = model, optimizer, strategy
        self.splits = split_models(model)
        """Models in it with layers on several ranks."""
        self.own = own_parameters(model)
        """Names of parameters without a copy on another rank."""
        check_optimizer(optimizer, self.splits, self.own)
        self.step = 0
        self._data_groups = {layer.data_group for layer in divided_layers(model).values()}
        self.clip_norm: float | None = None
        """The bound of a simulated step's gradient; hooks of real ranks clip by the handle."""
        self.member = MemberWeight()
        self.loss_scale: LossScale | None = None
        """The GradScaler's factor, which a transform must not see."""
        self.trainable = trainable(model, optimizer)
        self.numel = sum(parameter.numel() for parameter in self.trainable.values())
        self.guard = None if allow_nan else Guard(model, self.trainable, overflow=self._may_overflow)
        self.buffers = ModelBuffers(model, buffer_rule)
        self.exchanges_gradients = bool(self.trainable) and not is_idle(strategy.gradients, num_ranks)
        self.exchanges_parameters = bool(self.trainable) and not is_idle(strategy.parameters, num_ranks)
        self.buckets = self._made_buckets(bucket_bytes, empty) if self.exchanges_gradients else []
        self.parameters: ParameterExchange | None = None
        if self.exchanges_parameters:
            self.parameters = ParameterExchange(strategy, optimizer, self.trainable, self.in_float32, commit)
        self.restored = False
        """True from a restore to the next step."""
        self._applied: AppliedTransform | None = None
        """The transform of a meeting since the last step that did not use `exchange`."""
        self._tentative: AppliedTransform | None = None
        """The transform of the last exchange, which counts if the optimizer steps on it."""
        self.drift: ExchangeListener | None = None
        self.clients: ClientStates | None = None
        """The states of clients, in rounds of clients that keep some."""
        self.noise: NoiseWatch | None = None
        self.pace: PaceWatch | None = None
        self.hooks: list[RemovableHandle] = []
        self._stateless: set[int] = set()
        if self.exchanges_parameters and strategy.carries_optimizer:
            self.hooks.append(optimizer.register_step_pre_hook(self.begin_states))
        self.provisional: ProvisionalStep | None = None
        """Undoes steps, where the strategy makes provisional ones."""
        if makes_provisional(state := lambda: tuple(bucket.state for bucket in self.buckets[:1])):
            self.provisional = ProvisionalStep(strategy, optimizer, self.trainable, state, self.in_float32, self.own)
            self.hooks.append(self.provisional.hook)

    @property
    def computes_together(self) -> bool:
        """True if layers are divided over ranks that see other samples: a pass needs all of these ranks."""
        return bool(self._data_groups)

    def exchanges_next(self) -> bool:
        """True if ranks exchange gradients of the coming step, also within divided layers; the same on all ranks."""
        transform, buckets = self.strategy.gradients, self.buckets
        return self.computes_together or (self.exchanges_gradients and has_turn(transform, buckets[0].state))

    def weigh_layers(self, share: float | None) -> None:
        """Give divided layers the batch's share before a forward pass; it weighs the ranks' gradients in them."""
        for group in self._data_groups:
            group.share = share

    def _made_buckets(self, bucket_bytes: int, empty: Empty | None) -> list[Bucket]:
        transform = self.strategy.gradients
        wide = self.masters is not None and Promise.LINEAR not in transform.promises
        make = partial(WideBucket, scale=self._scale_now) if wide else partial(Bucket, empty=empty)
        shared = {name: p for name, p in self.trainable.items() if name not in self.own}
        sparse = sparse_tables(self.model)
        tables = {name for name in sparse & shared.keys() if self._travels_by_rows(shared[name])}
        size = bucket_bytes if Promise.SEPARABLE in transform.promises else None
        with self.in_float32() if wide else nullcontext():
            made = buckets(shared, size, make, tables)
        for bucket in made:
            with self.in_float32():
                bucket.begin(transform.init(Bundle(bucket.parameters)))
            bucket.sparse_tables = sparse
        return made

    def in_float32(self) -> AbstractContextManager[None]:
        """Inside, the parameters are float32, also of a 16-bit model."""
        return nullcontext() if self.masters is None else self.masters.in_float32()

    def scaled(self, loss: Tensor) -> Tensor:
        """The loss for `backward`: times the loss scale, if there is one."""
        return loss if self.masters is None else self.masters.scaled(loss)

    def _scale_now(self) -> ScaleNow:
        assert self.masters is not None
        return ScaleNow(self.masters.scaling.scale, self.masters.scaling.dynamic)

    def _travels_by_rows(self, table: nn.Parameter) -> bool:
        """True if an answer for some rows depends on nothing but these rows of this step."""
        transform = self.strategy.gradients
        alone = (Promise.LINEAR | Promise.SEPARABLE) in transform.promises and self.strategy.slices is None
        return alone and table.device.type != "meta" and transform.init(Bundle({"table": table})) is None

    # ------------------------------------------------------------------ exchanges

    async def exchange(self, data: Port, bucket: Bucket, share: float | None = None) -> bool:
        """Run the gradients' transform over one bucket, and point its parameters' `.grad` at the answer.

        `share`: the weight of this rank's batch in the mean (None: equal parts). The transform's new state is
        tentative: `finish_step` keeps it, and another exchange before that begins again from the state of the last
        step. Returns True if the transform did something.
        """
        state = await bucket.spendable()
        port = data.on_channel(bucket.index)
        await bucket.agree(port)
        bundle = bucket.gathered(share)
        if self.guard is not None:
            self.guard.bundle(bundle, self.step, data.world_rank)
        if self.loss_scale is not None:
            self.loss_scale.take_off_(bundle)
        if self.noise is not None:
            self.noise.look(self.step, bucket.index, bundle)
        applied = AppliedTransform(self.strategy.gradients, state)
        try:
            answer, after = await applied.transform.apply(port, bundle, state)
        except NotFinite as error:  # of a codec, which knows no steps
            raise error.at(self.step) from None
        answered = answer is not bundle
        if answered:
            self._tentative = applied
        bucket.propose(after, answered=answered)
        bucket.withheld = answer is None
        if answered:
            # a transform that reaches some ranks only has its own `beside`
            alike = self.strategy.synchronized or self.strategy.gradients.beside is None
            bucket.listen(answer, alike=alike)
        if self.loss_scale is not None:  # a scaler wants to see a gradient, also before a step that has none
            answer = bundle.map(torch.zeros_like) if answer is None else self.loss_scale.put_on_(answer)
        if answered or bundle.packed:
            bucket.place(answer, answered=answered)
        for name in () if answered else bucket.unused:
            bucket.leave(name)
        return answered

    async def leave_unused(self, data: Port) -> None:
        """Leave parameters without a gradient on any rank alone, as plain torch does. Call it after a step's exchanges.

        An exchanged gradient of 0 would make optimizers decay weights and move by their momentum. Late gradients and
        residuals in answers still move such a parameter. Where models differ, only the ranks count that the answer is
        from. Cost: nothing if answers have a number that is not 0 for each parameter; else one more exchange with a
        number for each of the others.
        """
        asked = [(bucket, name) for bucket in self.buckets if bucket.answered for name in bucket.silent]
        if not asked:
            return
        used = torch.tensor([float(name not in bucket.unused) for bucket, name in asked])
        if data.size > 1:
            port, applied = data.on_channel(_UNUSED_CHANNEL), self._tentative
            beside = None if self.strategy.synchronized or applied is None else applied.transform.beside
            if applied is None or beside is None:
                used = await native(port, used)
            else:
                used = (await beside(port, Bundle({"used": used}), applied.state)).flat
        for (bucket, name), count in zip(asked, used.tolist(), strict=True):
            if not count:
                bucket.leave(name)

    def drop_stand_in(self, share: float | None) -> None:
        """Zero the gradient of a batch that counts nothing (`share` 0), where no exchange has left it out: a rank
        without samples then trains on no copy of another's. Call it before `agree_to_step`."""
        if share == 0.0 and not any(bucket.answered for bucket in self.buckets):
            for parameter in self.trainable.values():
                if parameter.grad is not None:
                    parameter.grad.zero_()

    async def agree_to_step(self, port: Port) -> None:
        """Agree before `optimizer.step` if gradients of any rank of `port` overflowed, so that all leave the step out.

        Only for a dynamic loss scale. Cost: a pass over the gradients, and one number to all ranks that do not see the
        same gradients.
        """
        if self.masters is None or not self._may_overflow:
            return
        overflowed = any(bucket.overflowed for bucket in self.buckets if isinstance(bucket, WideBucket))
        overflowed = overflowed or not self.masters.finite()
        if port.size > 1 and not (self.exchanges_gradients and Promise.LINEAR in self.strategy.gradients.promises):
            overflowed = bool((await tree(port, torch.tensor([float(overflowed)]))).any())
        self.masters.overflowed = overflowed
        self.masters.scaling.check(self.step)

    @property
    def _may_overflow(self) -> bool:
        return self.masters is not None and self.masters.scaling.dynamic

    async def clip_grad_norm_(
        self, holders: Port, parameters: Collection[nn.Parameter], max_norm: float, again: Collection[nn.Parameter] = ()
    ) -> Tensor:
        """Clip the optimizer's gradients as `clipping.clip_grad_norm_` does; with masters the step does the scaling."""
        if self.masters is None:
            return await clip_grad_norm_(holders, parameters, max_norm, again)
        return self.masters.clip(await gradient_norm(holders, parameters, again), max_norm)

    async def clip_whole(self, data: Port, model: Port, max_norm: float) -> Tensor:
        """Clip by the whole model's norm. Ranks of `model` hold its parts; ranks of `data` divide layers."""
        parameters, holders, again = self.trainable.values(), model, counted_elsewhere(self.splits)
        if self.own:
            holders, again = data, shared_elsewhere(self.trainable, self.own, data.rank)
        return await self.clip_grad_norm_(holders, parameters, max_norm, again)

    async def finish_step(self, data: Port) -> None:
        """Finish a step after `optimizer.step`: keep the exchanges' states, run the parameters' transform, let buffers
        meet.

        If all ranks left out the step, the gradients' transforms keep their states from before.
        """
        self.step += 1
        self.restored = False
        if self.provisional is not None:
            self.provisional.after_step()
        left_out = self.masters is not None and self.masters.left_out
        committed = [] if left_out else [bucket.commit() for bucket in self.buckets]
        applied = self._applied or (self._tentative if any(committed) else None)
        self._applied = self._tentative = None
        if self.parameters is not None:
            if self.guard is not None:
                with self.in_float32():
                    self.guard.parameters(self.step - 1, data.world_rank)
            applied = await self.parameters.exchange(data, self.member.weight) or applied
        await self.buffers.meet(data, applied, self.member)
        if self.noise is not None:
            self.noise.after_step(self.step, met=applied is not None)
        if self.pace is not None:
            self.pace.after_step(self.step)

    def measure(self, noise: NoiseWatch) -> None:
        """Let `noise` see the gradients of each step before they are reduced."""
        self.noise = noise
        if not self.exchanges_gradients:
            self.hooks.append(self.optimizer.register_step_pre_hook(self._look_at_gradients))

    def _look_at_gradients(self, _: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if kwargs.get("closure") is not None or len(args) > 1:
            raise ValueError(
                f"{self.strategy} exchanges no gradients, and a step that calls a closure has none before it, so the "
                "noise scale cannot be measured; leave noise_scale out"
            )
        if self.noise is not None:
            self.noise.look_at_gradients(self.step)

    def has_met(self) -> None:
        """Gradients were exchanged without `exchange`, so buffers meet after this step."""
        self._applied = AppliedTransform(identity(), None)

    def begin_states(self, *_: Any) -> None:
        """Begin the optimizer's state of parameters that had no gradient yet, so that all ranks' states have one
        layout.

        With an optimizer that mixes parameters in its step, a missing gradient counts as zero.
        """
        sparse, state = sparse_tables(self.model), self.optimizer.state
        unused = {
            parameter: torch.sparse_coo if name in sparse else torch.strided
            for name, parameter in self.trainable.items()
            if parameter.grad is None and parameter.requires_grad
        }
        if not steps_each_by_itself(self.optimizer):
            for parameter, layout in unused.items():
                parameter.grad = torch.zeros_like(parameter, layout=layout)
            return
        fresh = {p: layout for p, layout in unused.items() if not state.get(p) and id(p) not in self._stateless}
        if fresh:
            begin_states(self.optimizer, fresh, self.in_float32)
            self._stateless |= {id(p) for p in fresh if not state.get(p)}

    async def consensus(self, data: Port, instead: Mapping[str, Tensor] | None = None) -> dict[str, Tensor]:
        """The model to evaluate or hand out: the mean of the ranks' models, in memory of its own.

        Frozen parameters are left out of the mean, and are not copied.

        `instead`: tensors in place of this rank's parameters, by name.
        """
        with self.in_float32():
            tensors = {name: p.detach() for name, p in self.model.named_parameters()} | dict(instead or {})
        out = {name: tensor for name, tensor in tensors.items() if name not in self.trainable}
        for group in by_kind({name: tensors[name] for name in self.trainable}).values():
            bundle = Bundle(group, self.member.weight).copy()
            if data.size > 1 and not self.strategy.synchronized:
                bundle = await averaging(tree)(data.on_channel(BUFFER_CHANNEL), bundle, None)
            out |= bundle.views
        return {name: out[name] for name in tensors}

    def tensors(self) -> dict[str, Tensor]:
        """Parameters, float32 if there are masters, and buffers of the model, by name."""
        averaged, others = self.averaged_tensors()
        return averaged | others

    @property
    def row(self) -> dict[str, float]:
        """Values for rows of metrics."""
        return {} if self.masters is None else self.masters.row

    def averaged_tensors(self) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Parameters and buffers of the model by name: first the tensors that differ between ranks and are averaged,
        then the rest, frozen parameters included."""
        with self.in_float32():
            parameters = {name: p.detach() for name, p in self.model.named_parameters()}
        averaged = {} if self.strategy.synchronized else {name: parameters[name] for name in self.trainable}
        if self.buffers.passed or not self.strategy.synchronized:
            averaged = averaged | self.buffers.averaged()
        every = parameters | dict(self.model.named_buffers())
        return averaged, {name: tensor for name, tensor in every.items() if name not in averaged}

    async def consensus_buffers(self, data: Port) -> dict[str, Tensor]:
        """The buffers that belong to `consensus`, by name and in memory of their own; other buffers are this rank's.

        Batch-norm's running statistics if models, or these alone, differ between meetings, else none.
        """
        equal = self.strategy.synchronized and not self.buffers.passed
        if data.size == 1 or equal or self.buffers.rule == "leave":
            return {}
        return await self.buffers.agreed(data, None, self.member)

    # ------------------------------------------------------------------ saving

    async def settle(self) -> None:
        """Wait for exchanges under way, so that the state can be saved. All ranks must call it."""
        for bucket in self.buckets:
            bucket.state = await settled(bucket.state)
        if self.parameters is not None:
            await self.parameters.settle()

    def state(self) -> Saved:
        """The strategy's state by parameter, for any buckets; settle first."""
        return saved_states(self.states(), self.step)

    def states(self) -> list[tuple[str, State]]:
        """The strategy's states, each with its path in a checkpoint."""
        gradients: list[tuple[str, State]] = [("gradients", bucket.state) for bucket in self.buckets]
        gradients += [] if self.provisional is None else self.provisional.named_states()
        return gradients if self.parameters is None else gradients + self.parameters.named_states()

    def restore(self, source: Saved, residual_sources: Sequence[Saved] | None = None) -> None:
        """Take over the result of `state`. A transform that was idle then, because a rank was alone, begins again.

        `residual_sources`: states with the `Residual` that this rank takes over (default: `source`).
        """
        with self.in_float32():
            for bucket in self.buckets:
                layout = Bundle(bucket.parameters)
                state = self.strategy.gradients.init(layout)
                held = source.holds("gradients")
                bucket.begin(restored(state, source, "gradients", layout, residual_sources) if held else state)
        if self.parameters is not None:
            self.parameters.restore(source, residual_sources)
        if self.provisional is not None:
            self.provisional.restore(source)
        step = source.scalars["step"]
        assert isinstance(step, int)
        self.step, self.restored = step, True


class ExchangeListener(Protocol):
    """All ranks call its methods at the same places of their exchanges."""

    def after_exchange(self) -> None:
        """All ranks have exchanged something."""

    def after_step(self) -> None:
        """This rank has finished a step."""

    def check(self, *, buffers: bool) -> None:
        """A checkpoint is about to be written; `buffers`: it is right after a step."""

    def end(self) -> None:
        """No more steps will come."""
