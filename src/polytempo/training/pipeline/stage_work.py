"""`StageWork`: the computations of one part of a model for its micro-batches. It neither sends nor receives."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from polytempo.device import kept_random_states
from polytempo.partition.cut import Layout, Stage
from polytempo.partition.schedules.action import Schedule
from polytempo.training.pipeline.late.parameter_versions import ParameterVersions, as_it_is
from polytempo.training.pipeline.weight_gradients import Gradient, apart, at_once, layers_of

Head = Callable[[Any], Tensor]
"""Loss of the model's own output; only the last part has one."""
LayoutsOf = Callable[[int], Mapping[str, Layout]]
"""Layouts of every tensor of a micro-batch that crosses a cut."""


@dataclass
class UnderWay:
    """A micro-batch between its forward and its backward pass."""

    inputs: tuple[Any, ...]
    taken: list[Tensor]
    """Tensors from other parts; leaves of the graph, as soon as the forward pass has begun."""
    version: int
    seeded: Callable[[], None]
    """Sets the random state that the forward pass begins with."""
    head: Head | None = None
    given: list[Tensor] = field(default_factory=list)
    """Tensors for other parts, with their graph; empty if it is computed again."""
    loss: Tensor | None = None
    later: deque[Gradient] = field(default_factory=deque)
    saved: list[Tensor] | None = None
    """Tensors that autograd keeps; None: they can be computed again, with the held parameters of the forward pass."""
    buffers: Mapping[str, Tensor] = field(default_factory=dict)
    """Buffers that its forward pass has changed, with their former values, if it may be computed again."""


class PartWork(Protocol):
    """The interface of `StageWork` and `PricedWork`."""

    under_way: dict[int, UnderWay]
    last_version: int

    def forward(self, number: int, kept: UnderWay) -> tuple[list[Tensor], Tensor | None]:
        """See `StageWork.forward`."""

    def backward(self, number: int, gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
        """See `StageWork.backward`."""

    def weight_gradients(self, number: int) -> None:
        """See `StageWork.weight_gradients`."""

    def resume(self, number: int, kept: UnderWay) -> None:
        """See `StageWork.resume`."""


MakeWork = Callable[[Stage, ParameterVersions, Schedule, LayoutsOf], PartWork]


def splits(schedule: Schedule, part: Stage) -> bool:
    """True if the part's backward passes leave the weights' gradients to an action of their own."""
    return any(action.kind == "weight" for action in schedule.actions(part.index % schedule.stages))


def computed(part: Stage, versions: ParameterVersions, schedule: Schedule, layouts: LayoutsOf) -> PartWork:
    """The part's computations, for real."""
    sums = schedule.micro_batches > 1
    return StageWork(part.module, versions, recomputes=schedule.recomputes, splits=splits(schedule, part), sums=sums)


class StageWork:
    """Forward and backward passes of one part, of several micro-batches at a time, in any order.

    `recomputes`: a forward pass keeps its inputs only. `splits`: a backward pass leaves the weights' gradients to
    `weight_gradients`. `sums`: gradients of several micro-batches make one update.
    """

    def __init__(
        self, module: nn.Module, versions: ParameterVersions, *, recomputes: bool = False, splits: bool, sums: bool
    ) -> None:
        self.module, self._versions = module, versions
        self._recomputes, self._splits = recomputes, splits
        self._layers = layers_of(module) if splits or sums else []
        if not versions.stashes:  # a checkpoint has autograd's tensors, and late convolutions keep their own
            self._layers = [layer for layer in self._layers if isinstance(layer, nn.Linear)]
        self.under_way: dict[int, UnderWay] = {}
        self.last_version = 0
        """The version that the last gradient was computed with."""

    def forward(self, number: int, kept: UnderWay) -> tuple[list[Tensor], Tensor | None]:
        """The tensors of micro-batch `number` for other parts, and, at the last part, its loss."""
        kept.taken = [t.detach().requires_grad_(t.is_floating_point() or t.is_complex()) for t in kept.taken]
        keep = as_it_is
        if not (self._recomputes or self._versions.stashes):
            kept.saved = []
            keep = partial(_noted, kept.saved)
        again = self._recomputes or (self._versions.overtaken and kept.saved is None)  # by a run that is resumed
        before = {name: (b, b._version, b.clone()) for name, b in _buffers(self.module) if again}
        with self._versions.forward(kept.version, keep), torch.set_grad_enabled(not self._recomputes):
            given, loss = self._computed(kept)
        now = {name: (id(b), b._version) for name, b in _buffers(self.module)}
        kept.buffers = {name: copy for name, (b, number, copy) in before.items() if now.get(name) != (id(b), number)}
        if not self._recomputes:
            kept.given, kept.loss = given, loss
        self.under_way[number] = kept
        return [g.detach() for g in given], None if loss is None else loss.detach()

    def backward(self, number: int, gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
        """The gradient of everything that was taken. `gradients`: of everything that was given, None for none.

        The parameters' gradients are added to `.grad`, or kept for `weight_gradients`.
        """
        kept = self.under_way[number]
        if self._recomputes:
            with self._versions.seen(kept.version), torch.enable_grad(), _lent_buffers(self.module, kept.buffers):
                kept.given, kept.loss = self._computed(kept)
        answers = list(zip(kept.given, gradients, strict=True))
        roots: list[tuple[Tensor, Tensor | None]] = [
            (tensor, gradient) for tensor, gradient in answers if tensor.requires_grad and gradient is not None
        ]
        if kept.loss is not None and kept.loss.requires_grad:
            roots.append((kept.loss, None))
        if roots:
            with self._versions.backward():
                torch.autograd.backward([tensor for tensor, _ in roots], [gradient for _, gradient in roots])
        kept.given, kept.loss = [], None
        if not self._splits:
            self._done(number)
        return [leaf.grad for leaf in kept.taken]

    def weight_gradients(self, number: int) -> None:
        """The second half of a backward pass: add the weights' gradients to `.grad`."""
        later = self.under_way[number].later
        with torch.no_grad():
            while later:
                later.popleft()()  # its memory is free afterwards
        self._done(number)

    def resume(self, number: int, kept: UnderWay) -> None:
        """Go on as behind the forward pass that saved `kept`: its graph is made again. Buffers stay."""
        keep = as_it_is if kept.saved is None else partial(_next_of, iter(kept.saved))
        with self._versions.forward(kept.version, keep):
            if not self._recomputes:
                with torch.enable_grad(), _lent_buffers(self.module, kept.buffers):
                    kept.given, kept.loss = self._computed(kept)
        self.under_way[number] = kept

    def _done(self, number: int) -> None:
        self.last_version = self.under_way.pop(number).version
        self._versions.done(self.last_version)

    def _computed(self, kept: UnderWay) -> tuple[list[Tensor], Tensor | None]:
        take = kept.later.append if self._splits else at_once
        own = apart(self._layers, take) if self._layers else nullcontext()
        with kept_random_states(), own:  # the loop's own random numbers go on
            kept.seeded()
            answer = list(self.module(*kept.inputs, *kept.taken))
            loss = None if kept.head is None else kept.head(answer.pop())
        return answer, loss


def _noted(into: list[Tensor], tensor: Tensor) -> Tensor:
    into.append(tensor)
    return tensor


def _next_of(saved: Iterator[Tensor], tensor: Tensor) -> Tensor:
    return next(saved)


def _buffers(module: nn.Module) -> list[tuple[str, Tensor]]:
    return list(module.named_buffers(remove_duplicate=False))


@contextmanager
def _lent_buffers(module: nn.Module, values: Mapping[str, Tensor]) -> Iterator[None]:
    """Inside, buffers are copies, of `values` where these have them; afterwards they are as if nothing had been."""
    own = _buffers(module)
    copies = {id(buffer): values.get(name, buffer).clone() for name, buffer in own}
    _set_buffers(module, [(name, copies[id(buffer)]) for name, buffer in own])
    try:
        yield
    finally:
        _set_buffers(module, own)


def _set_buffers(module: nn.Module, buffers: list[tuple[str, Tensor]]) -> None:
    for name, buffer in buffers:
        owner, _, field_name = name.rpartition(".")
        module.get_submodule(owner)._buffers[field_name] = buffer
