"""`StepHooks`: hooks before and after an attached optimizer's `step`.

before    checks ── `.grad` is the strategy's answer          or, with one copy of the parameters, the step itself
after     the parameters' transform ── buffers meet ── drift is looked for

`StepChecks` and `Loaded` notice changes since `attach`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import LBFGS, Optimizer
from torch.utils.hooks import RemovableHandle

from polytempo.collectives import tree
from polytempo.core import Port
from polytempo.core.state import anchors
from polytempo.one_host.one_copy import OneCopy
from polytempo.training.hooks.backward import Backward
from polytempo.training.hooks.join import JoinMembership
from polytempo.training.hooks.weak_hook import WeakHook
from polytempo.training.model.parted_parameters import align
from polytempo.training.model.ports import Ports
from polytempo.training.step.loss_scale import calls_step
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
        self.loaded = Loaded(replica)
        self._exchanges = replica.exchanges_gradients or replica.exchanges_parameters
        self._begun = False
        self.on_end: Callable[[int], None] = lambda step: None
        """Called with the number of steps so far, after each step of all ranks."""

    def before(self) -> list[RemovableHandle]:
        """Hook the beginning of a step. Hooks run in the order of their registration."""
        hooks, register = [*self.loaded.hooks], self._replica.optimizer.register_step_pre_hook
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
        """True if a step ends now. An optimizer's `step` that calls its parent's `step` runs all hooks twice."""
        begun, self._begun = self._begun, False
        return begun

    def _look_at_gradients(self, *_: Any) -> None:
        """Check gradients that no exchange checks."""
        if self._replica.guard is not None:
            self._replica.guard.gradients(self._replica.step, self._world.rank)

    def _before_step(self, _: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._checks.parameters()
        self._checks.scaler(exchanged=self._backward.exchanged, one_copy=self._copy is not None)
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        if self._copy is not None:
            return self._step_together(self._copy, args, closure)
        if self._replica.exchanges_parameters or self._replica.provisional is not None:
            self.loaded.honour(self._world, self._ports.data)
        if closure is None:
            self._complete()
            self._world.drive(self._replica.agree_to_step(self._ports.whole))
            return None
        evaluated = self._evaluated(closure, self._backward.exchanged)
        return (args[0], evaluated), {name: value for name, value in kwargs.items() if name != "closure"}

    def _complete(self) -> None:
        """Finish the step's gradients in `.grad`."""
        if not self._replica.exchanges_gradients:
            self._members.agree_on_share()
            self._replica.drop_stand_in(0.0 if self._members.stands_in else None)
            return
        self._backward.complete()
        self._replica.drop_stand_in(0.0 if self._members.stands_in else None)
        for bucket in self._replica.buckets if self._replica.loss_scale is not None else ():
            if bucket.withheld:
                bucket.place(None, answered=False)

    def _evaluated(self, closure: Callable[[], Any], exchanged: bool) -> Callable[[], Any]:
        """The closure, followed at each call by the exchange of its gradients.

        At the first call gradients may have been `exchanged` before the step; then the closure only computes their
        loss.
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
            if self._replica.provisional is not None:
                self._replica.provisional.evaluated()
            searches = isinstance(self._replica.optimizer, LBFGS)  # by the loss, which must be the same on all ranks
            return self._mean(loss) if searches and self._backward.answered and self._ports.data.size > 1 else loss

        return evaluate

    def _mean(self, loss: Any) -> Tensor:
        weight = self._members.share
        share = 1 / self._ports.data.size if weight is None else weight
        own = share * torch.as_tensor(loss, dtype=torch.float64).detach().reshape(1)
        return self._world.drive(tree(self._ports.data, own.cpu()))[0]

    def _step_together(self, copy: OneCopy, args: tuple[Any, ...], closure: Callable[[], Any] | None) -> Any:
        """Make the step on the one copy. A closure is called first: torch would call it after the step."""
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
        """Run the exchanges behind torch's step."""
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
        if self._world.dealing is not None:
            self._world.dealing.after_step(self._replica, self._ports)
        self.on_end(self._replica.step)

    def shadow_step(self) -> None:
        """The step of a rank that has left a `join`: it takes part in the others' exchanges with weight 0."""
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
    """True if a fused optimizer has left out the step, because a `GradScaler` found an infinity."""
    found = getattr(optimizer, "found_inf", None)
    return found is not None and bool(found)


class Loaded:
    """Notices parameters that `load_state_dict` has changed, and lets the strategy's memory of the old ones begin
    again.

    `from_anchor` has such a memory (DiLoCo, and local SGD with a codec). A loop that loads others for a while and then
    its own again has changed nothing.
    """

    def __init__(self, replica: Replica) -> None:
        self._replica = replica
        self._before: bytes | None = None
        """A hash of the parameters before the first load since the last step."""
        self._began = False
        self._on_change: Callable[[], None] | None = None
        self.hooks: list[RemovableHandle] = []
        if replica.provisional is not None:
            replica.provisional.changed = self._changed
        before, after = WeakHook(self._before_load), WeakHook(self._after_load)
        for module in replica.model.modules():
            self.hooks.append(module.register_load_state_dict_pre_hook(before))
            self.hooks.append(module.register_load_state_dict_post_hook(after))

    def _fingerprint(self) -> bytes:
        digest = hashlib.sha256()
        with self._replica.in_float32():
            for parameter in self._replica.trainable.values():
                digest.update(parameter.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        return digest.digest()

    def _before_load(self, *_: Any) -> None:
        parameters, provisional = self._replica.parameters, self._replica.provisional
        anchored = parameters is not None and any(True for _ in anchors(tuple(parameters.states)))
        anchored |= self._on_change is not None
        if self._before is None and (anchored or (provisional is not None and provisional.origin is not None)):
            self._before = self._fingerprint()

    def _changed(self) -> bool:
        return not self._replica.restored and self._before is not None and self._before != self._fingerprint()

    def _after_load(self, *_: Any) -> None:
        now = {id(parameter) for parameter in self._replica.model.parameters()}
        if any(id(parameter) not in now for parameter in self._replica.trainable.values()):
            raise RuntimeError(
                "load_state_dict(assign=True) has put other parameters into the model, which neither the optimizer nor "
                "the strategy knows; leave out assign, or make the optimizer and attach after loading"
            )

    def call(self, on_change: Callable[[], None]) -> None:
        """Call `on_change` before a step in place of a new beginning, where parameters have changed: between now and
        the first step, or by loading others later."""
        self._on_change, self._before = on_change, self._fingerprint()

    def honour(self, world: ProcessWorld, data: Port) -> None:
        """Begin again before an optimizer step, if need be. All ranks must have loaded something, or none."""
        before, self._before = self._before, None
        if self._on_change is not None:
            if before is not None and before != self._fingerprint():
                self._on_change()
            return
        first, self._began = not self._began, True
        parameters = self._replica.parameters
        if parameters is None or self._replica.restored or not (first or before is not None):
            return
        changed = None if before is None else before != self._fingerprint()
        world.drive(parameters.renew(data, changed=changed, at_start=self._replica.step == 0))


class StepChecks:
    """Raises RuntimeError before a step that would let ranks differ.

    `feels_scales`: whether scaled losses, or a step that one rank skips, would change more than `.grad`. `has_scaler`:
    whether `attach` was given the GradScaler.
    """

    def __init__(self, replica: Replica, *, feels_scales: bool, has_scaler: bool) -> None:
        self._replica, self.feels_scales, self._has_scaler = replica, feels_scales, has_scaler
        self.lends = False
        """True inside `consensus`, which lends the model other tensors."""
        held = [p for group in replica.optimizer.param_groups for p in group["params"]]
        self._held, self._frozen = [id(p) for p in held], [p for p in held if not p.requires_grad]
        self._dtypes = [p.dtype for p in replica.trainable.values()]

    def parameters(self) -> None:
        """Parameters that began to train after `attach` would train on every rank apart."""
        held = [id(p) for group in self._replica.optimizer.param_groups for p in group["params"]]
        thawed = self._frozen and any(parameter.requires_grad for parameter in self._frozen)
        if thawed or held != self._held:
            what = "a frozen parameter needs gradients now" if thawed else "the optimizer was given other parameters"
            raise RuntimeError(f"{what}, which no hook exchanges; call detach() on the handle and attach again")
        if [p.dtype for p in self._replica.trainable.values()] != self._dtypes:
            raise RuntimeError(
                "parameters have another dtype than at attach, and gradients travel in that; convert the model first, "
                "then attach, or call detach() on the handle and attach again"
            )
        if self.lends:
            raise RuntimeError("inside consensus() the model is not this rank's; leave it before optimizer.step()")

    def scaler(self, *, exchanged: bool, one_copy: bool) -> None:
        """Ranks skip a GradScaler's steps alike, once all that was computed has been `exchanged`."""
        if not self.feels_scales:
            return
        if not self._has_scaler and calls_step():
            raise RuntimeError(
                f"{self._replica.strategy} must know of a GradScaler: the scale of losses changes, and all ranks must "
                "skip the same steps; write attach(model, optimizer, strategy, scaler=scaler)"
            )
        if self._has_scaler and not exchanged:
            raise RuntimeError(
                "with scaler= ranks agree on infinities at the end of a backward pass; let the last one of a step be "
                "outside of no_sync()"
            )
        if one_copy and hasattr(self._replica.optimizer, "found_inf"):
            raise RuntimeError(
                "a GradScaler leaves it to a fused optimizer to unscale gradients, and shared_memory() makes the step "
                "in its place; make the optimizer with fused=False"
            )
