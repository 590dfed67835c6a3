"""`ProvisionalStep`: steps of an optimizer that hold for one gradient, and are then undone.

step     1 provisional           2                      3 provisional
from     θ, s                    θ, s                   θ', s'
to       θ̃: the next gradient    θ', s'                 θ̃'
         is of θ̃

The optimizer's state s returns right after a provisional step, the parameters before the next one.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import LBFGS, Optimizer

from polytempo.core import State, Strategy, identity
from polytempo.core.calls.refusals import refuse
from polytempo.core.state import ProvisionalState, Saved, nodes

_PATH = "origin"


def makes_provisional(state: Callable[[], State]) -> bool:
    """True if a transform of gradients with this state makes provisional steps."""
    return any(True for _ in nodes(state(), ProvisionalState))


class ProvisionalStep:
    """Undoes those steps of `optimizer` that `state`, of the gradients' transform, calls provisional.

    Memory: a copy of the parameters until the next step, and of the optimizer's state within a provisional one. An
    optimizer that counts in its parameter groups and not in its state counts both steps. Raises ValueError for an
    optimizer that asks for several gradients in a step, for a strategy that changes parameters in between, and for
    parameters that are `alone`: no other rank has them, so their gradients do not go through the strategy.
    """

    def __init__(
        self,
        strategy: Strategy,
        optimizer: Optimizer,
        trainable: Mapping[str, nn.Parameter],
        state: Callable[[], State],
        in_float32: Callable[[], AbstractContextManager[None]],
        alone: Collection[str] = (),
    ) -> None:
        self._one_gradient = ValueError(
            f"{strategy} undoes provisional steps, and {type(optimizer).__name__} takes several gradients in one; use "
            "an optimizer that makes a step of one gradient, such as SGD or AdamW"
        )
        if isinstance(optimizer, LBFGS):
            raise self._one_gradient
        if strategy.parameters is not identity():
            raise ValueError(
                f"{strategy} undoes provisional steps, and with them an exchange of parameters behind one; leave out "
                "parameters=…"
            )
        if alone:
            refuse({"divided layers", "provisional steps"}, who=f"layer {min(alone)!r} is divided", strategy=strategy)
        self._optimizer, self._trainable = optimizer, trainable
        self._of_gradients, self._in_float32 = state, in_float32
        self.origin: dict[str, Tensor] | None = None
        """The parameters before the last step, where that was provisional."""
        self._begun = False
        """True from the beginning of a step to its end."""
        self._state: Any = None
        """The optimizer's state before a provisional step, which works on a copy."""
        self.changed: Callable[[], bool] = lambda: False
        """True if other parameters were loaded since the last step; then there is nothing to undo."""
        self.hook = optimizer.register_step_pre_hook(self._before_step)

    def _before_step(self, _: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        if closure is None and not self._begun:  # an optimizer's `step` that calls its parent's runs all hooks twice
            self._begin()

    def evaluated(self) -> None:
        """Begin the step after its closure has computed a gradient. Raises ValueError for a second one."""
        if self._begun:
            raise self._one_gradient
        self._begin()

    @torch.no_grad()
    def _begin(self) -> None:
        """Undo the last step, if it was provisional, and remember where a provisional one begins."""
        self._begun = True
        coming = any(each.coming for each in nodes(self._of_gradients(), ProvisionalState))
        with self._in_float32():
            if self.origin is not None and not self.changed():
                torch._foreach_copy_(list(self._trainable.values()), list(self.origin.values()))
            self.origin = {name: p.detach().clone() for name, p in self._trainable.items()} if coming else None
        if coming:
            self._state = self._optimizer.state
            self._optimizer.state = defaultdict(dict, {key: _copied(each) for key, each in self._state.items()})

    def after_step(self) -> None:
        """Put the optimizer's state back after a provisional step."""
        self._begun = False
        if self._state is not None:
            self._optimizer.state, self._state = self._state, None

    def named_states(self) -> list[tuple[str, State]]:
        """The parameters that the next step goes from, with their path in a checkpoint, if they are others than now."""
        return [] if self.origin is None else [(_PATH, self.origin)]

    def restore(self, source: Saved) -> None:
        """Take over the result of `named_states`."""
        found = source.under(_PATH).tensors
        with self._in_float32():
            self.origin = {name: found[name].to(p) for name, p in self._trainable.items()} if found else None


def _copied(entries: Any) -> Any:
    """An optimizer's state of a parameter, in memory of its own."""
    if not isinstance(entries, dict):
        return deepcopy(entries)
    return {key: value.clone() if isinstance(value, Tensor) else deepcopy(value) for key, value in entries.items()}
