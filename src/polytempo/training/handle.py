"""`Handle`: what `attach` hangs on a loop's optimizer, and the ways to pause, join, score, save and end."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import LBFGS, Optimizer

from polytempo.collectives import tree
from polytempo.core import Port
from polytempo.core.state import Saved
from polytempo.one_host.hogwild import TurnHooks
from polytempo.one_host.one_copy import OneCopy, own_parameters
from polytempo.training.backward import Backward
from polytempo.training.clipping import clip_grad_norm_
from polytempo.training.join import JoinMembership
from polytempo.training.loaded_parameters import Loaded
from polytempo.training.loss_scale import LossScale, calls_step
from polytempo.training.ownership import Ownership
from polytempo.training.ports import Ports
from polytempo.training.replica import Replica
from polytempo.training.weak_hook import WeakHook
from polytempo.worlds import ProcessWorld


class Handle:
    """What `attach` returns: the replica, the hooks, and the ways to pause, join, score, save and end."""

    def __init__(
        self,
        world: ProcessWorld,
        ports: Ports,
        replica: Replica,
        *,
        find_unused: bool,
        copy: OneCopy | None = None,
        turns: TurnHooks | None = None,
        scaler: GradScaler | None = None,
    ) -> None:
        self.world, self.ports, self.replica = world, ports, replica
        self.attached = True
        """Whether the hooks are on."""
        self.one_copy, self._turns = copy, turns
        self._members = JoinMembership(world, ports.data, replica)
        self._lends = False
        strategy, optimizer = replica.strategy, replica.optimizer
        means = replica.exchanges_gradients and strategy.gradients.linear and not replica.exchanges_parameters
        free = turns is not None and strategy.one_copy != "in_turn"
        meets = copy is not None or turns is not None or replica.exchanges_gradients or replica.exchanges_parameters
        self._feels_scales = (meets and not means and not free) or ports.model.size > 1
        """Whether scaled losses, or a step that one rank skips, would change more than `.grad`."""
        scale = LossScale(scaler) if scaler is not None and scaler.is_enabled() else None
        self._has_scaler = scale is not None
        if replica.exchanges_gradients and not strategy.gradients.linear:
            replica.loss_scale = scale
        self._scale = scale if self._feels_scales else None
        self._backward = Backward(world, ports, replica, self._members, find_unused=find_unused, scale=self._scale)
        self._loaded = Loaded(replica)
        held = [p for group in optimizer.param_groups for p in group["params"]]
        self._held, self._frozen = [id(p) for p in held], [p for p in held if not p.requires_grad]
        self._dtypes = [p.dtype for p in replica.trainable.values()]
        self._hooks: list[Any] = []
        self._idle = copy is None and not (replica.exchanges_gradients or replica.exchanges_parameters)
        if replica.guard is not None and not (replica.exchanges_gradients or replica.exchanges_parameters):
            self._hooks.append(optimizer.register_step_pre_hook(self._look_at_gradients))
        if not self._idle or self._feels_scales:
            self._hooks.append(optimizer.register_step_pre_hook(self._before_step))
        self._ownership = Ownership(replica.model, optimizer) if meets else None
        if turns is not None:
            turns.watch()
        self._hooks.append(optimizer.register_step_post_hook(self._after_step))
        self._hooks += self._backward.watch()
        if ports.data.size > 1:
            hook = WeakHook(self._members.given_to)
            for module in _called(replica.model):
                self._hooks.append(module.register_forward_pre_hook(hook, with_kwargs=True))

    @property
    def step(self) -> int:
        """Optimizer steps since the start (of the first run, where one was resumed)."""
        return self.replica.step

    # ------------------------------------------------------------------ the step

    def _look_at_gradients(self, *_: Any) -> None:
        """Where nothing is exchanged, so that no exchange looks at them."""
        if self.replica.guard is not None:
            self.replica.guard.gradients(self.replica.step, self.world.rank)

    def _before_step(self, _: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._check_parameters()
        self._check_scaler()
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        if self.one_copy is not None:
            return self._step_together(self.one_copy, args, closure)
        if self.replica.exchanges_parameters:
            self._loaded.honour(self.world, self.ports.data)
        if closure is None:
            self._complete()
            return None
        evaluated = self._evaluated(closure, self._backward.exchanged)
        return (args[0], evaluated), {name: value for name, value in kwargs.items() if name != "closure"}

    def _complete(self) -> None:
        """Let `.grad` be what the step is made of."""
        if not self.replica.exchanges_gradients:
            self._members.agree_on_share()
            return
        self._backward.complete()
        for bucket in self.replica.buckets if self.replica.loss_scale is not None else ():
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
            if self.replica.exchanges_parameters and self.replica.strategy.carries_optimizer:
                self.replica.fill_gradients()
            searches = isinstance(self.replica.optimizer, LBFGS)  # by the loss, which must be the same on all ranks
            return self._mean(loss) if searches and self._backward.answered and self.ports.data.size > 1 else loss

        return evaluate

    def _mean(self, loss: Any) -> Tensor:
        share = 1 / self.ports.data.size if self.replica.share is None else self.replica.share
        own = share * torch.as_tensor(loss, dtype=torch.float64).detach().reshape(1)
        return self.world.drive(tree(self.ports.data, own.cpu()))[0]

    def _step_together(self, copy: OneCopy, args: tuple[Any, ...], closure: Callable[[], Any] | None) -> Any:
        """Make the step on the one copy. A closure is called first, for torch would call it after the step."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self.ports.data.size > 1:
            self.world.record("compute", self._backward.mark_s)
        self._members.agree_on_share()
        start_s = self.world.now_s()
        copy.step(self.replica.share)
        self.world.record("step", start_s)
        self.replica.has_met()
        return None if closure is None else ((args[0], lambda: loss), {})

    def _check_parameters(self) -> None:
        """Parameters that began to train after `attach` would train on every rank apart."""
        held = [id(p) for group in self.replica.optimizer.param_groups for p in group["params"]]
        thawed = self._frozen and any(parameter.requires_grad for parameter in self._frozen)
        if thawed or held != self._held:
            what = "a frozen parameter needs gradients now" if thawed else "the optimizer was given other parameters"
            raise RuntimeError(f"{what}, which nobody exchanges; call detach() on the handle and attach again")
        if [p.dtype for p in self.replica.trainable.values()] != self._dtypes:
            raise RuntimeError(
                "parameters have another dtype than at attach, and gradients travel in that; convert the model first, "
                "then attach, or call detach() on the handle and attach again"
            )
        if self._lends:
            raise RuntimeError("inside consensus() the model is not this rank's; leave it before optimizer.step()")

    def _check_scaler(self) -> None:
        if not self._feels_scales:
            return
        if not self._has_scaler and calls_step():
            raise RuntimeError(
                f"{self.replica.strategy} must know of a GradScaler: the scale of losses changes, and all ranks must "
                "skip the same steps; write attach(model, optimizer, strategy, scaler=scaler)"
            )
        if self._has_scaler and not self._backward.exchanged:
            raise RuntimeError(
                "with scaler= ranks agree on infinities at the end of a backward pass; let the last one of a step be "
                "outside of no_sync()"
            )
        if self.one_copy is not None and hasattr(self.replica.optimizer, "found_inf"):
            raise RuntimeError(
                "a GradScaler leaves it to a fused optimizer to unscale gradients, and shared_memory() makes the step "
                "in its place; make the optimizer with fused=False"
            )

    def _after_step(self, *_: Any) -> None:
        if _skipped(self.replica.optimizer):
            return
        if self._idle:
            self.replica.step += 1
            self.world.step = self.replica.step
            self._backward.end_step()
            return
        if self.one_copy is not None:
            self.one_copy.end_step()
        if self.ports.data.size > 1 and self.replica.exchanges_parameters:
            self.world.record("compute", self._backward.mark_s)
        self.world.drive(self.replica.finish_step(self.ports.data))
        if self.replica.drift is not None:
            if not self.replica.exchanges_gradients:
                self.replica.drift.after_exchange()
            self.replica.drift.after_step()
        self.world.step = self.replica.step
        self._backward.end_step()

    # ------------------------------------------------------------------ contexts

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward passes inside accumulate gradients locally; the next one outside exchanges their sum.

        The sum has the weight of the last batch: its share where `pt.shard` deals batches unevenly.
        """
        before, self._backward.silent = self._backward.silent, True
        try:
            yield
        finally:
            self._backward.silent = before

    @contextmanager
    def consensus(self) -> Iterator[None]:
        """Inside, the model is the one that the ranks have agreed on, to be scored or saved: their mean.

            with handle.consensus():
                evaluate(model)

        Where models differ between their meetings (`local_sgd`, `gossip`, …) its parameters, and the buffers that
        meet, are the means over the ranks, in memory of their own; afterwards the rank's own are there again. All
        ranks must call it. Training does not notice. `optimizer.step()` inside raises RuntimeError.

        Cost: one mean over the parameters, and memory for it; nothing where all ranks hold the same model anyway.
        """
        replica, port = self.replica, self.ports.data
        if replica.strategy.synchronized or port.size == 1:
            yield
            return
        if self._turns is not None:
            self.world.drive(_met(port))  # so that nobody writes while others read
        agreed = self.world.drive(replica.consensus(port)) | self.world.drive(replica.consensus_buffers(port))
        named = [*replica.model.named_parameters(), *replica.model.named_buffers()]
        own = [(tensor, tensor.data) for name, tensor in named if name in agreed]
        for name, tensor in named:
            if name in agreed:
                tensor.data = agreed[name]
        self._lends = True
        try:
            yield
        finally:
            self._lends = False
            for tensor, data in own:
                tensor.data = data

    @contextmanager
    def join(self) -> Iterator[None]:
        """Ranks may leave the loop inside after different numbers of steps; nobody hangs.

        A rank that leaves goes on taking part with weight zero until all have left; those that are still
        active count the same, whatever `pt.shard` says. All end with the same parameters and running
        statistics: where a strategy lets models differ, with the mean of those that trained to the last step.
        Each step costs one more all-reduce of one number for each rank, which tells who is active.

        Raises ValueError where the strategy would hear those that have left (gossip, adasum, robust merges), and with
        `scaler=`; RuntimeError for a backward pass whose gradients no step uses: those that have left take it for one.
        """
        if self._has_scaler:
            raise ValueError(
                "a GradScaler skips steps, which ranks that have left join() do not see; give all ranks equally many "
                "batches, as pt.shard does"
            )
        with self._members.join(self._shadow_step):
            yield

    def _shadow_step(self) -> None:
        if self.replica.exchanges_gradients:
            self.replica.optimizer.zero_grad()
            self._backward.finish()
            self.replica.optimizer.step()
        elif self.one_copy is not None or self.replica.strategy.carries_optimizer:
            self.replica.optimizer.zero_grad()
            self.replica.optimizer.step()  # its slice of the one copy; or so that there is state, for others to average
        else:
            self._after_step()

    # ------------------------------------------------------------------ saving and ending

    def state_dict(self) -> dict[str, Any]:
        """The strategy's state of this rank after the last step, by parameter: save it beside the model's and the
        optimizer's.

        All ranks must call it, because exchanges that are under way are finished first.
        """
        self.world.drive(self.replica.settle())
        if self.replica.drift is not None:
            self.replica.drift.check(buffers=False)
        tensors, scalars = self.replica.state()
        return {
            "strategy": str(self.replica.strategy),
            "tensors": {k: t.clone() for k, t in tensors.items()},
            "scalars": scalars,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from what `state_dict` returned on this rank."""
        if state["strategy"] != str(self.replica.strategy):
            raise ValueError(f"the state was saved by {state['strategy']}, but {self.replica.strategy} is attached")
        self.replica.restore(Saved(state["tensors"], state["scalars"]))
        self.world.step = self.replica.step

    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Let the coming step have a gradient of norm at most `max_norm`; returns the norm that it has now.

        The norm is that of the ranks' mean gradient. `.grad` holds it where the strategy exchanges gradients in
        `backward`, and is scaled as `torch.nn.utils.clip_grad_norm_` does. Where a model lies in parts on several
        ranks, it is the norm of all parts, and all of these ranks call this. Under `shared_memory()` `.grad` is this
        rank's own: all ranks call this, and the step does the scaling.
        """
        if self.one_copy is None:
            parameters = self.replica.trainable.values()
            return self.world.drive(clip_grad_norm_(self.ports.model, parameters, max_norm))
        if self._members.joining:
            raise ValueError(
                "inside join() those that have left could not take part in clip_grad_norm_(); leave it out"
            )
        self._members.agree_on_share()
        return self.one_copy.clip_grad_norm_(max_norm, self.replica.share)

    def detach(self) -> None:
        """Take the hooks off; the loop is an ordinary one again.

        Where ranks share one copy of the parameters all must call it, and each gets parameters of its own.
        """
        for hook in [*self._hooks, *self._loaded.hooks, *self.replica.hooks]:
            hook.remove()
        if self.replica.drift is not None:
            self.replica.drift.end()
        self._hooks = []
        if self._ownership is not None:
            self._ownership.end()
        if self._turns is not None:
            self._turns.remove()
            own_parameters(self.world, self.replica.trainable, self._turns.common)
        if self.one_copy is not None:
            self.one_copy.detach()
        self.attached = False


def _called(model: nn.Module) -> list[nn.Module]:
    """The modules that are given batches: the model, or its parts where it is a mere list of them."""
    return list(model.children()) if isinstance(model, nn.ModuleList | nn.ModuleDict) else [model]


def _skipped(optimizer: Optimizer) -> bool:
    """Whether a fused optimizer has left out the step, because a `GradScaler` found an infinity."""
    found = getattr(optimizer, "found_inf", None)
    return found is not None and bool(found)


async def _met(port: Port) -> None:
    await port.barrier()
