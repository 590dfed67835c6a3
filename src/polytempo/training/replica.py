"""`Replica`: a model, its optimizer and its strategy's state on one rank. What both worlds drive.

    backward ──▶ gradients, in buckets ──▶ strategy.gradients ──▶ .grad ──▶ optimizer.step
                                                                                │
    next forward ◀── parameters ◀── strategy.parameters ◀──────────────────────┘

A replica performs nothing itself: its exchanges are coroutines over `data`, the port of the ranks that hold the same
parameters and see other samples.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from polytempo.aggregation.outer import anchors
from polytempo.collectives import tree
from polytempo.core import Bundle, NotFinite, Port, State, Strategy, Transform, averaging, identity, is_idle, native
from polytempo.core.state import Saved, equal, renewed, restored, saved, settled
from polytempo.training.bucket import DEFAULT_BUCKET_BYTES, Bucket, Empty, buckets
from polytempo.training.exchange_listener import ExchangeListener
from polytempo.training.guard import Guard
from polytempo.training.loss_scale import LossScale
from polytempo.training.requirements import fitted
from polytempo.training.trainable_parameters import sparse_tables, trainable

BufferRule = Literal["average", "broadcast", "leave"]

_PARAMETER_CHANNEL = 1000
_BUFFER_CHANNEL = 1010


class _Contact(NamedTuple):
    """What let ranks meet, and the state in which it did."""

    transform: Transform
    state: State


class Replica:
    """One rank's training state. `share` is its part of the present global batch (None: equal parts).

    `empty` makes the memory that gradients are exchanged in, where it has to be of a certain kind. Without `allow_nan`
    what is not finite is refused before another rank gets it.
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
    ) -> None:
        _check(strategy, buffer_rule)
        strategy = fitted(strategy, optimizer)
        self.model, self.optimizer, self.strategy = model, optimizer, strategy
        self.step = 0
        self.share: float | None = None
        self.weight: float | None = None
        """This rank's part of a mean over models (None: equal parts): 0 once it has left a `join`."""
        self.source = 0
        """The rank whose buffers count where they cannot be averaged: the first that has not left a `join`."""
        self.buffer_rule = buffer_rule
        self.loss_scale: LossScale | None = None
        """What losses were multiplied by, where a transform must not see it."""
        self._norms = {name: module for name, module in model.named_modules() if isinstance(module, _NormBase)}
        self.trainable = trainable(model, optimizer)
        self.guard = None if allow_nan else Guard(model, self.trainable)
        self.exchanges_gradients = not is_idle(strategy.gradients, num_ranks)
        self.exchanges_parameters = not is_idle(strategy.parameters, num_ranks)
        self.buckets: list[Bucket] = []
        if self.exchanges_gradients:
            separable = strategy.gradients.separable
            self.buckets = buckets(self.trainable, bucket_bytes if separable else None, empty)
            for bucket in self.buckets:
                bucket.begin(strategy.gradients.init(Bundle(bucket.parameters)))
                bucket.sparse_tables = sparse_tables(model)
        self.parameter_states: list[State] = []
        if self.exchanges_parameters:
            groups = list(_by_kind({name: p.detach() for name, p in self.trainable.items()}).values())
            if len(groups) > 1 and not strategy.parameters.separable:
                raise ValueError(f"{strategy} needs all parameters in one dtype, got {len(groups)} dtypes")
            self.parameter_states = [strategy.parameters.init(Bundle(group)) for group in groups]
        self._rests: frozenset[str] = frozenset()
        """Parameters that were frozen when ranks met last."""
        self.restored = False
        """Whether the state was taken over from a saved one since the last step."""
        self._met: _Contact | None = None
        """By what ranks met since the last step, if they did by another way than `exchange`."""
        self._tentative: _Contact | None = None
        """By what they met in the last exchange, which counts if the optimizer steps on it."""
        self._buffers_met = False
        self.drift: ExchangeListener | None = None
        self.hooks: list[RemovableHandle] = []
        if self.exchanges_parameters and strategy.carries_optimizer:
            self.hooks.append(optimizer.register_step_pre_hook(self.fill_gradients))

    # ------------------------------------------------------------------ exchanges

    async def exchange(self, data: Port, bucket: Bucket) -> bool:
        """Run the gradients' transform over one bucket, and point its parameters' `.grad` at the answer.

        What the transform remembers is tentative: `finish_step` keeps it, and another exchange before that begins
        again from the state of the last step. Returns whether the transform did something.
        """
        state = await bucket.spendable()
        bundle = bucket.gathered(self.share)
        if self.guard is not None:
            self.guard.bundle(bundle, self.step, data.world_rank)
        if self.loss_scale is not None:
            self.loss_scale.take_off_(bundle)
        contact = _Contact(self.strategy.gradients, state)
        try:
            answer, after = await contact.transform.apply(data.on_channel(bucket.index), bundle, state)
        except NotFinite as error:  # of a codec, which knows no steps
            raise error.at(self.step) from None
        answered = answer is not bundle
        if answered:
            self._tentative = contact
        bucket.propose(after, answered=answered)
        bucket.withheld = answer is None
        if self.loss_scale is not None:  # a scaler wants to see a gradient, also before a step that has none
            answer = bundle.map(torch.zeros_like) if answer is None else self.loss_scale.put_on_(answer)
        if answered or bundle.packed:
            bucket.place(answer, answered=answered)
        return answered

    async def finish_step(self, data: Port) -> None:
        """After `optimizer.step`: keep what exchanges left, run the parameters' transform; then buffers meet."""
        self.step += 1
        self.restored = False
        committed = [bucket.commit() for bucket in self.buckets]
        met = self._met or (self._tentative if any(committed) else None)
        self._met = self._tentative = None
        if self.exchanges_parameters:
            if self.guard is not None:
                self.guard.parameters(self.step - 1, data.world_rank)
            met = await self._exchange_parameters(data) or met
        self._buffers_met = met is not None and data.size > 1 and self.buffer_rule != "leave"
        if self._buffers_met:
            agreed = await self._met_buffers(data.on_channel(_BUFFER_CHANNEL), met)
            for name, buffer in self._buffers().items():
                buffer.copy_(agreed[name])

    def equal_buffers(self) -> dict[str, Tensor]:
        """The buffers that ranks in step hold equal right after this step, by name: those that met in it."""
        found = self._buffers() if self._buffers_met else {}
        return {name: b for name, b in found.items() if self.buffer_rule == "broadcast" or b.is_floating_point()}

    def has_met(self) -> None:
        """Gradients were exchanged by another way than `exchange`, so buffers meet after this step."""
        self._met = _Contact(identity(), None)

    def fill_gradients(self, *_: Any) -> None:
        """No gradient counts as zero: optimizers keep no state for it, and all ranks' states must have one layout."""
        sparse = sparse_tables(self.model)
        for name, parameter in self.trainable.items():
            if parameter.grad is None and parameter.requires_grad:
                layout = torch.sparse_coo if name in sparse else torch.strided
                parameter.grad = torch.zeros_like(parameter, layout=layout)

    @torch.no_grad()
    def _parameter_groups(self) -> list[dict[str, Tensor]]:
        tensors = {name: parameter.detach() for name, parameter in self.trainable.items()}
        if self.strategy.carries_optimizer:
            tensors |= _moments(self.trainable, self.optimizer)  # each joins the group of its dtype
        return list(_by_kind(tensors).values())

    async def _exchange_parameters(self, data: Port) -> _Contact | None:
        met, states = None, list(self.parameter_states)
        for i, group in enumerate(self._parameter_groups()):
            bundle = Bundle(group, self.weight)
            contact = _Contact(self.strategy.parameters, states[min(i, len(states) - 1)])
            answer, after = await contact.transform.apply(
                data.on_channel(_PARAMETER_CHANNEL + i), bundle, contact.state
            )
            if i < len(states):  # moments of another dtype than any parameter have no state of their own
                self.parameter_states[i] = after
            if answer is not None and answer is not bundle:
                resting = self._resting(i)
                moved = [(tensor, answer.views[name]) for name, tensor in group.items() if name not in resting]
                torch._foreach_copy_([tensor for tensor, _ in moved], [view for _, view in moved])
                for anchor in anchors(self.parameter_states[i]) if resting else ():
                    for name in resting & group.keys():
                        anchor.views[name].copy_(group[name])
                met = met or contact
        if met is not None:
            self._rests = frozenset(name for name, p in self.trainable.items() if not p.requires_grad)
        return met

    def _resting(self, index: int) -> frozenset[str]:
        """Frozen parameters that ranks have brought together since, and that something remembered could move on."""
        if not self._rests or next(anchors(self.parameter_states[index]), None) is None:
            return frozenset()
        return frozenset(name for name in self._rests if not self.trainable[name].requires_grad)

    @torch.no_grad()
    async def renew(self, data: Port, *, changed: bool | None) -> None:
        """Parameters may have come from elsewhere: let what is remembered of them refer to them as they are now.

        All ranks call it; if they `changed` on one, all begin anew from rank 0's, at the step at which they are. Before
        the first step ranks need not know (None): what all have changed shows. Cost: a number to all where they know,
        and a broadcast of the parameters where they changed.
        """
        for i, group in enumerate(self._parameter_groups()):
            state = self.parameter_states[i] = await settled(self.parameter_states[i])
            begun = self.strategy.parameters.init(Bundle(group))
            if not saved(begun, "").tensors:
                continue
            channel = data.on_channel(_PARAMETER_CHANNEL + i)
            if changed is None:
                anew = self.step == 0 and not equal(state, begun)
            else:
                anew = bool((await tree(channel, torch.tensor([float(changed)]))).any())
            if anew:
                bundle = Bundle(group).copy()
                begun = self.strategy.parameters.init(bundle.with_flat(await channel.broadcast(bundle.flat)))
                self.parameter_states[i] = renewed(state, begun)

    def _buffers(self) -> dict[str, Tensor]:
        """The buffers that meet. Only running statistics are averaged; others are constants or the model's affair."""
        if self.buffer_rule != "average":
            return dict(self.model.named_buffers())
        return {
            f"{path}.{name}".lstrip("."): buffer
            for path, module in self._norms.items()
            for name, buffer in module.named_buffers(recurse=False)
        }

    async def _met_buffers(self, data: Port, met: _Contact | None) -> dict[str, Tensor]:
        """What ranks make of their buffers by the rule, in memory of its own.

        `met`: they meet beside it, by its messages' way, and talk to no other ranks. Counts of batches, which grow
        alike, stay as they are. Else, and in a `join`, where ranks have counted differently, all hear one rank's.
        """
        out: dict[str, Tensor] = {}
        average = averaging(tree) if met is None else met.transform.beside or averaging(native)
        for kind, group in _by_kind(self._buffers()).items():
            bundle = Bundle(group, self.weight)
            if self.buffer_rule == "average" and kind[0].is_floating_point:
                bundle = await average(data, bundle, None if met is None else met.state)
            elif self.buffer_rule == "broadcast" or met is None or self.weight is not None:
                bundle = bundle.with_flat(await data.broadcast(bundle.flat, self.source))
            out |= bundle.views
        return out

    async def consensus(self, data: Port) -> dict[str, Tensor]:
        """The model to evaluate or hand out: the mean of the ranks' models, in memory of its own."""
        tensors = {name: p.detach() for name, p in self.model.named_parameters()}
        out: dict[str, Tensor] = {}
        for group in _by_kind(tensors).values():
            bundle = Bundle(group, self.weight).copy()
            if data.size > 1 and not self.strategy.synchronized:
                bundle = await averaging(tree)(data.on_channel(_BUFFER_CHANNEL), bundle, None)
            out |= bundle.views
        return {name: out[name] for name in tensors}

    def averaged_tensors(self) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Parameters and buffers as they lie in the model, by name: those that `consensus` averages, and the others."""
        averaged = {name: p.detach() for name, p in self.model.named_parameters()}
        if self.buffer_rule == "average":
            averaged |= {name: buffer for name, buffer in self._buffers().items() if buffer.is_floating_point()}
        return averaged, {name: b for name, b in self.model.named_buffers() if name not in averaged}

    async def consensus_buffers(self, data: Port) -> dict[str, Tensor]:
        """The buffers that belong to `consensus`, by name and in memory of their own; those left out are this rank's.

        Batch-norm's running statistics where the models differ between their meetings, else none.
        """
        if data.size == 1 or self.strategy.synchronized or self.buffer_rule == "leave":
            return {}
        return await self._met_buffers(data.on_channel(_BUFFER_CHANNEL), None)

    # ------------------------------------------------------------------ saving

    async def settle(self) -> None:
        """Wait for exchanges that are under way, so that the state can be saved. All ranks must call it."""
        for bucket in self.buckets:
            bucket.state = await settled(bucket.state)
        self.parameter_states = [await settled(state) for state in self.parameter_states]

    def state(self) -> Saved:
        """The strategy's state by parameter, whatever the buckets; settle first."""
        return saved_states(self.states(), self.step)

    def states(self) -> list[tuple[str, State]]:
        """The strategy's state as it is, part by part, with the path that each is saved under."""
        gradients = [("gradients", bucket.state) for bucket in self.buckets]
        return gradients + [(f"parameters/{i}", state) for i, state in enumerate(self.parameter_states)]

    def restore(self, source: Saved, debts: Sequence[Saved] | None = None) -> None:
        """Take over what `state` returned. A transform that was idle then, for want of other ranks, begins anew.

        `debts`: the states whose `Residual` this rank takes over; without them, those of `source`.
        """
        for bucket in self.buckets:
            layout = Bundle(bucket.parameters)
            state = self.strategy.gradients.init(layout)
            bucket.begin(restored(state, source, "gradients", layout, debts) if _holds(source, "gradients") else state)
        for i, group in enumerate(_by_kind({n: p.detach() for n, p in self.trainable.items()}).values()):
            if i < len(self.parameter_states):
                layout = Bundle(group)
                self.parameter_states[i] = self.strategy.parameters.init(layout)
                if _holds(source, f"parameters/{i}"):
                    begun = self.parameter_states[i]
                    self.parameter_states[i] = restored(begun, source, f"parameters/{i}", layout, debts)
        step = source.scalars["step"]
        assert isinstance(step, int)
        self.step, self.restored = step, True


def _check(strategy: Strategy, buffer_rule: str) -> None:
    if buffer_rule not in ("average", "broadcast", "leave"):
        raise ValueError(f"buffers must be 'average', 'broadcast' or 'leave', got {buffer_rule!r}")
    if strategy.server is not None:
        raise ValueError(
            f"{strategy} has a parameter server, which a loop of your own does not start; make a job of it and "
            "use pt.run(job, strategy, workers=4) or `polytempo train`"
        )


def saved_states(states: Sequence[tuple[str, State]], step: int) -> Saved:
    """What `Replica.states` returned after `step`, settled, as leaves by path."""
    found = Saved({}, {"step": step})
    for path, state in states:
        tensors, scalars = saved(state, path)
        found.tensors.update(tensors)
        found.scalars.update(scalars)
    return found


async def take_over(
    port: Port,
    model: nn.Module,
    shared: frozenset[str] = frozenset(),
    *,
    source: int = 0,
    into: frozenset[int] | None = None,
) -> None:
    """Give the parameters and buffers of `source` to the ranks in `into` (None: to all); not parameters in `shared`."""
    parameters = {name: p.detach() for name, p in model.named_parameters() if name not in shared}
    everything = parameters | dict(model.named_buffers())
    for group in _by_kind(everything).values():
        bundle = Bundle(group)
        flat = await port.broadcast(bundle.flat, source)
        if port.rank != source and (into is None or port.rank in into):
            torch._foreach_copy_(list(group.values()), list(bundle.with_flat(flat).views.values()))


def _holds(source: Saved, path: str) -> bool:
    return any(name == path or name.startswith(f"{path}/") for name in [*source.tensors, *source.scalars])


def _moments(parameters: Mapping[str, nn.Parameter], optimizer: Optimizer) -> dict[str, Tensor]:
    """The optimizer's state tensors, as `name|key`, whatever their dtype and shape.

    Counts of steps and other single numbers, the same on all ranks, are none of them. Raises ValueError for state that
    has no mean: codes, and lists of tensors.
    """
    found: dict[str, Tensor] = {}
    for name, parameter in parameters.items():
        for key, value in optimizer.state.get(parameter, {}).items():
            if isinstance(value, Tensor) and (key == "step" or (value.ndim == 0 and parameter.ndim)):
                continue
            if isinstance(value, Tensor) and value.is_floating_point():
                found[f"{name}|{key}"] = value
            elif isinstance(value, Tensor | list):
                what = str(value.dtype) if isinstance(value, Tensor) else "a list"
                raise ValueError(
                    f"{type(optimizer).__name__} keeps {key!r} as {what}, of which there is no mean; use "
                    "parameter_averaging(optimizer_state=False), or an optimizer whose state is floating-point tensors"
                )
    return found


def _by_kind(tensors: Mapping[str, Tensor]) -> dict[tuple[torch.dtype, torch.device], dict[str, Tensor]]:
    """Tensors grouped by dtype and device, each group in its first appearance's order."""
    groups: dict[tuple[torch.dtype, torch.device], dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        groups.setdefault((tensor.dtype, tensor.device), {})[name] = tensor
    return groups
