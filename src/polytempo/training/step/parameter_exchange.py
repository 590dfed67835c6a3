"""`ParameterExchange`: the transform of a strategy's parameters on one rank, with its state."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from polytempo.collectives import tree
from polytempo.core import Bundle, Port, Program, Promise, State, Strategy
from polytempo.core.arithmetic.kernel_use import KernelUse, Uses
from polytempo.core.bundle import Observed, by_kind
from polytempo.core.state import Saved, anchors, duplicate, equal, nodes, renewed, restored, saved, settled
from polytempo.synchronization.every import RoundState, apply_at_once
from polytempo.training.checkpoint.optimizer_state import moments
from polytempo.training.step.buffers import AppliedTransform

_CHANNEL = 1000

Commit = Callable[[Port], Program[None]]


class _Answer(NamedTuple):
    """The result of exchanging a group: the state after it, and the tensors' new values (None: they stay)."""

    state: State
    answer: Bundle | None


class ParameterExchange:
    """Exchanges `trainable` parameters after steps of `optimizer`, one bundle for each dtype and device.

    With `carries_optimizer` the strategy exchanges the optimizer's moments beside them. `in_float32`: the parameters
    are float32 in this context (`Replica.in_float32`). `commit`: awaited in an exchange after ranks met, before `take`;
    an error in it undoes the exchange. Raises ValueError for several bundles and a transform that needs one.
    """

    def __init__(
        self,
        strategy: Strategy,
        optimizer: Optimizer,
        trainable: Mapping[str, nn.Parameter],
        in_float32: Callable[[], AbstractContextManager[None]] = nullcontext,
        commit: Commit | None = None,
    ) -> None:
        self._strategy, self._optimizer, self._trainable = strategy, optimizer, trainable
        self._in_float32, self._commit = in_float32, commit
        with in_float32():
            layouts = self._layouts()
        if len(layouts) > 1 and Promise.SEPARABLE not in strategy.parameters.promises:
            raise ValueError(f"{strategy} needs all parameters in one dtype, got {len(layouts)} dtypes")
        self.states: list[State] = [strategy.parameters.init(layout) for layout in layouts]
        self.loss: Tensor | None = None
        """This rank's loss of the step, where a rule may look at it."""
        self._frozen: frozenset[str] = frozenset()
        """Parameters that were frozen at the last meeting."""
        self._held: list[_Answer] = []

    def _layouts(self) -> list[Bundle]:
        detached = {name: parameter.detach() for name, parameter in self._trainable.items()}
        return [Bundle(group) for group in by_kind(detached).values()]

    @torch.no_grad()
    def groups(self) -> list[dict[str, Tensor]]:
        """The tensors of the exchange in the model and the optimizer, by dtype and device."""
        tensors = {name: parameter.detach() for name, parameter in self._trainable.items()}
        if self._strategy.carries_optimizer:
            tensors |= moments(self._trainable, self._optimizer)  # each joins the group of its dtype
        return list(by_kind(tensors).values())

    def note(self, loss: Tensor) -> None:
        """Add a part of this step's loss, for a rule that may look at it."""
        if next(nodes(tuple(self.states), RoundState), None) is not None:
            self.loss = loss.detach() if self.loss is None else self.loss + loss.detach()

    async def exchange(self, data: Port, weight: float | None) -> AppliedTransform | None:
        """Run the transform over the present parameters; returns the transform and its state if ranks met."""
        with self._in_float32():
            met = await self._exchange(data, weight, None)
        self.loss = None
        return met

    async def meet_at_once(self, data: Port, step: int) -> None:
        """Exchange after `step` as if the strategy met in it."""
        with self._in_float32():
            await self._exchange(data, None, step)

    async def _exchange(self, data: Port, weight: float | None, at_step: int | None) -> AppliedTransform | None:
        met, transform = None, self._strategy.parameters
        found: list[_Answer] = []
        groups = self.groups()
        for i, group in enumerate(groups):
            bundle, state = Bundle(group, weight), self.states[min(i, len(self.states) - 1)]
            bundle.observed = Observed(self._optimizer.param_groups[0].get("lr", 0.0), self.loss)
            applied = AppliedTransform(transform, state)
            if self._commit is not None:
                state = duplicate(state)  # a rank that is lost undoes the exchange
            port = data.on_channel(_CHANNEL + i)
            if at_step is None:
                answer, after = await transform.apply(port, bundle, state)
            else:
                answer, after = await apply_at_once(transform, port, bundle, state, at_step)
            answered = answer is not None and answer is not bundle
            met = applied if answered and met is None else met
            found.append(_Answer(after, answer if answered else None))
        self._held = found
        if self._commit is not None and (met is not None or at_step is not None):
            await self._commit(data)
        if met is None:
            self.take()
        else:
            await data.compute(self.take, 0.0, uses=_uses(groups))
        return met

    @property
    def holds(self) -> bool:
        """True if the last exchange has an answer that was not taken."""
        return bool(self._held)

    def take(self) -> None:
        """Put the last exchange's answer in the place of the parameters, and of the state."""
        found, self._held = self._held, []
        with self._in_float32():
            for i, (group, (after, answer)) in enumerate(zip(self.groups(), found, strict=True)):
                if i < len(self.states):  # moments of another dtype than any parameter have no state of their own
                    self.states[i] = after
                if answer is not None:
                    self._take(i, group, answer)
        if any(each.answer is not None for each in found):
            self._frozen = frozenset(name for name, p in self._trainable.items() if not p.requires_grad)

    def _take(self, index: int, group: Mapping[str, Tensor], answer: Bundle) -> None:
        """Write the answer into all parameters that are not frozen."""
        if answer.flat.is_meta:  # no values
            return
        resting = self._resting(index)
        moved = [(tensor, answer.views[name]) for name, tensor in group.items() if name not in resting]
        torch._foreach_copy_([tensor for tensor, _ in moved], [view for _, view in moved])
        for anchor in anchors(self.states[index]) if resting else ():
            for name in resting & group.keys() & anchor.views.keys():
                anchor.views[name].copy_(group[name])

    def _resting(self, index: int) -> frozenset[str]:
        """Frozen parameters that ranks have averaged before, and that an anchor could move on."""
        if not self._frozen or index >= len(self.states) or next(anchors(self.states[index]), None) is None:
            return frozenset()
        return frozenset(name for name in self._frozen if not self._trainable[name].requires_grad)

    @torch.no_grad()
    async def renew(self, data: Port, *, changed: bool | None, at_start: bool) -> None:
        """Begin the state again for parameters that came from elsewhere.

        All ranks call it; if they `changed` on one, all begin again from rank 0's. `at_start`, before the first step,
        ranks need not know (None): a change on all ranks shows. Cost: a number to all ranks that know, and a broadcast
        of changed parameters.
        """
        with self._in_float32():
            await self._renew(data, changed, at_start)

    async def _renew(self, data: Port, changed: bool | None, at_start: bool) -> None:
        for i, group in enumerate(self.groups()):
            state = self.states[i] = await settled(self.states[i])
            begun = self._strategy.parameters.init(Bundle(group))
            if not saved(begun, "").tensors:
                continue
            port = data.on_channel(_CHANNEL + i)
            if changed is None:
                anew = at_start and not equal(state, begun)
            else:
                anew = bool((await tree(port, torch.tensor([float(changed)]))).any())
            if anew:
                bundle = Bundle(group).copy()
                begun = self._strategy.parameters.init(bundle.with_flat(await port.broadcast(bundle.flat)))
                self.states[i] = renewed(state, begun)

    async def settle(self) -> None:
        """Wait for exchanges under way."""
        self.states = [await settled(state) for state in self.states]

    def named_states(self) -> list[tuple[str, State]]:
        """The states, each with its path in a checkpoint."""
        return [(_path(i), state) for i, state in enumerate(self.states)]

    def restore(self, source: Saved, residual_sources: Sequence[Saved] | None) -> None:
        """Take over saved states; others begin again."""
        with self._in_float32():
            layouts = self._layouts()
        for i, layout in enumerate(layouts):
            state = self._strategy.parameters.init(layout)
            held = source.holds(_path(i))
            self.states[i] = restored(state, source, _path(i), layout, residual_sources) if held else state


def noted(exchange: ParameterExchange | None, loss: Tensor) -> Tensor:
    """`loss`, or its part of this rank's mean loss, after a rule for periods has seen it."""
    if exchange is not None:
        exchange.note(loss)
    return loss


def _uses(groups: Sequence[Mapping[str, Tensor]]) -> Uses:
    """Kernel uses of packing, of scaling, and of copying the answer back."""
    tensors = [tensor for group in groups for tensor in group.values()]
    num_bytes = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    return (
        KernelUse("scale", len(tensors), num_bytes),
        KernelUse("copy", len(tensors), num_bytes),
        KernelUse("exchange", 1, num_bytes),
    )


def _path(index: int) -> str:
    return f"parameters/{index}"
