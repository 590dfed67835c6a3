"""`StepHooks`: what an attached optimizer's `step` does before and after torch's own.

before    checks ── `.grad` is the strategy's answer          or, with one copy of the parameters, the step itself
after     the parameters' transform ── buffers meet ── drift is looked for
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import LBFGS, Optimizer
from torch.utils.hooks import RemovableHandle

from polytempo.collectives import tree
from polytempo.one_host.one_copy import OneCopy
from polytempo.training.hooks.backward import Backward
from polytempo.training.hooks.join import JoinMembership
from polytempo.training.hooks.step_checks import StepChecks
from polytempo.training.model.ports import Ports
from polytempo.training.model.replicated_parameters import align
from polytempo.training.step.loaded_parameters import Loaded
from polytempo.training.step.replica import Replica
from polytempo.worlds import ProcessWorld


class StepHooks:
    """The hooks of one replica's optimizer. `copy`: the one copy of the parameters, where ranks share it."""

    def __init__(
        self,
        world: ProcessWorld,
        ports: Ports,
        replica: Replica,
        checks: StepChecks,
        members: JoinMembership,
        backward: Backward,
        copy: OneCopy | None,
    ) -> None:
        self._world, self._ports, self._replica = world, ports, replica
        self._checks, self._members, self._backward, self._copy = checks, members, backward, copy
        self._loaded = Loaded(replica)
        self._exchanges = replica.exchanges_gradients or replica.exchanges_parameters
        self._begun = False

    def before(self) -> list[RemovableHandle]:
        """Hook the beginning of a step. Hooks run in the order in which they were made."""
        hooks, register = [*self._loaded.hooks], self._replica.optimizer.register_step_pre_hook
        hooks.append(register(self._begin))
        if self._replica.guard is not None and not self._exchanges:
            hooks.append(register(self._look_at_gradients))
        scaled = self._replica.masters is not None and self._replica.masters.scaling.dynamic
        if self._copy is not None or self._exchanges or self._checks.feels_scales or scaled:
            hooks.append(register(self._before_step))
        return hooks

    def _begin(self, *_: Any) -> None:
        self._begun = True

    def ends(self) -> bool:
        """Whether a step ends now. An optimizer whose `step` calls its parent's runs all hooks twice for one step."""
        begun, self._begun = self._begun, False
        return begun

    def _look_at_gradients(self, *_: Any) -> None:
        """Where nothing is exchanged, so that no exchange looks at them."""
        if self._replica.guard is not None:
            self._replica.guard.gradients(self._replica.step, self._world.rank)

    def _before_step(self, _: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._checks.parameters()
        self._checks.scaler(exchanged=self._backward.exchanged, one_copy=self._copy is not None)
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        if self._copy is not None:
            return self._step_together(self._copy, args, closure)
        if self._replica.exchanges_parameters:
            self._loaded.honour(self._world, self._ports.data)
        if closure is None:
            self._complete()
            self._world.drive(self._replica.agree_to_step(self._ports.whole))
            return None
        evaluated = self._evaluated(closure, self._backward.exchanged)
        return (args[0], evaluated), {name: value for name, value in kwargs.items() if name != "closure"}

    def _complete(self) -> None:
        """Let `.grad` be what the step is made of."""
        if not self._replica.exchanges_gradients:
            self._members.agree_on_share()
            return
        self._backward.complete()
        for bucket in self._replica.buckets if self._replica.loss_scale is not None else ():
            if bucket.withheld:
                bucket.place(None, answered=False)

    def _evaluated(self, closure: Callable[[], Any], exchanged: bool) -> Callable[[], Any]:
        """The closure, followed by the exchange of what it has computed, each time that the optimizer calls it.

        The first time, gradients may have been `exchanged` before the step, and the closure just says their loss.
        """

        def evaluate() -> Any:
            nonlocal exchanged
            before = self._backward.num_exchanges
            loss = closure()
            if self._backward.num_exchanges == before and not exchanged:
                self._backward.exchanged = False
            exchanged = False
            self._complete()
            if self._replica.exchanges_parameters and self._replica.strategy.carries_optimizer:
                self._replica.begin_states()
            searches = isinstance(self._replica.optimizer, LBFGS)  # by the loss, which must be the same on all ranks
            return self._mean(loss) if searches and self._backward.answered and self._ports.data.size > 1 else loss

        return evaluate

    def _mean(self, loss: Any) -> Tensor:
        weight = self._members.share
        share = 1 / self._ports.data.size if weight is None else weight
        own = share * torch.as_tensor(loss, dtype=torch.float64).detach().reshape(1)
        return self._world.drive(tree(self._ports.data, own.cpu()))[0]

    def _step_together(self, copy: OneCopy, args: tuple[Any, ...], closure: Callable[[], Any] | None) -> Any:
        """Make the step on the one copy. A closure is called first, for torch would call it after the step."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self._ports.data.size > 1:
            self._world.record("compute", self._backward.mark_s)
        self._members.agree_on_share()
        start_s = self._world.now_s()
        copy.step(self._members.share)
        self._world.record("step", start_s)
        self._replica.has_met()
        return None if closure is None else ((args[0], lambda: loss), {})

    def after_step(self) -> None:
        """Torch has made the step: exchange what is exchanged behind it."""
        if _skipped(self._replica.optimizer):
            return
        if self._copy is None and not self._exchanges:
            self._replica.step += 1
            self._end_step()
            return
        if self._copy is not None:
            self._copy.end_step()
        if self._ports.data.size > 1 and self._replica.exchanges_parameters:
            self._world.record("compute", self._backward.mark_s)
        self._world.drive(self._replica.finish_step(self._ports.data))
        if self._replica.splits:
            with self._replica.in_float32():
                self._world.drive(align(self._replica.splits))
        if self._replica.drift is not None:
            if not self._replica.exchanges_gradients:
                self._replica.drift.after_exchange()
            self._replica.drift.after_step()
        self._end_step()

    def _end_step(self) -> None:
        self._world.step = self._replica.step
        self._backward.end_step()

    def shadow_step(self) -> None:
        """The step of a rank that has left a `join`: it takes part in the others' exchanges, and brings nothing."""
        if self._replica.exchanges_gradients:
            self._replica.optimizer.zero_grad()
            self._backward.finish()
            self._replica.optimizer.step()
        elif self._copy is not None or self._replica.strategy.carries_optimizer:
            self._replica.optimizer.zero_grad()
            self._replica.optimizer.step()  # its slice of the one copy; or so that there is state for a mean
        else:
            self.after_step()


def _skipped(optimizer: Optimizer) -> bool:
    """Whether a fused optimizer has left out the step, because a `GradScaler` found an infinity."""
    found = getattr(optimizer, "found_inf", None)
    return found is not None and bool(found)
