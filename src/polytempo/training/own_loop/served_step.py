"""`ServedStep`: hooks before and after an optimizer's `step` for parameters at a server.

before    checks ── weight decay, if workers add it ── gradients are pushed ── `.grad` is for the step here
after     parameters are pulled ── `.grad` is the loop's own again
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from polytempo.core import Strategy
from polytempo.training.model.local_decay import LocalDecay
from polytempo.training.model.trainable_parameters import trainable
from polytempo.training.own_loop.ticket_loop import TicketLoop
from polytempo.training.precision.masters import Masters
from polytempo.training.served.shard_rule import shard_rule_of
from polytempo.training.step.guard import Guard

_AGAIN = "call detach() on the handle and attach again"


class ServedStep:
    """The hooks of one rank's optimizer. `loop` is there as soon as batches are dealt.

    The server learns the trained parameters, the optimizer's settings but for learning rates, and the weights once; a
    later change is a RuntimeError at the step.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        strategy: Strategy,
        *,
        allow_nan: bool,
        masters: Masters | None = None,
    ) -> None:
        assert strategy.server is not None
        self._masters, self._wide = masters, ExitStack()
        self._model, self._optimizer, self._strategy = model, optimizer, strategy
        self._service = strategy.server
        self._trained = trainable(model, optimizer)
        self._guard = None if allow_nan else Guard(model, self._trained)
        self._held = self._needing_gradients()
        self._rule = shard_rule_of(self._service, optimizer)
        self.loop: TicketLoop | None = None
        self.lends = False
        """True inside `consensus`: the model's tensors are the server's."""
        self.num_steps = 0
        self.on_end: Callable[[int], None] = lambda step: None
        """Called after each step, with its number."""
        self._exchanged = False
        self._own: list[tuple[nn.Parameter, Tensor | None]] = []
        self._decays: list[tuple[dict[str, Any], float]] = []
        self._changes: int | None = None
        self.hooks: list[RemovableHandle] = [
            optimizer.register_step_pre_hook(self._before),
            optimizer.register_step_post_hook(self._after),
        ]

    def begin(self, loop: TicketLoop) -> None:
        """Batches are dealt from now on."""
        self.loop = loop
        if self._guard is not None:
            loop.check_pushes(partial(self._guard.catch_up, loop.rank))

    @contextmanager
    def moving(self) -> Iterator[None]:
        """Inside, the parameters may change: the server's are placed."""
        self._check_weights()
        yield
        self._note_weights()

    def _note_weights(self) -> None:
        self._changes, self._exchanged = self._num_changes(), False

    # ------------------------------------------------------------------ hooks

    def _before(self, _: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._exchanged:  # an optimizer's step that calls its parent's runs all hooks twice
            return None
        self._check()
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        if closure is not None and self._masters is not None:
            raise self._masters.closure()
        if closure is None:
            self._exchange()
            return None
        return (args[0], self._evaluated(closure)), {n: value for n, value in kwargs.items() if n != "closure"}

    def _evaluated(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        """The closure, followed by the exchange of its gradients."""

        def evaluate() -> Any:
            if self._exchanged:
                raise RuntimeError(
                    f"{type(self._optimizer).__name__} has called its closure twice in one step, and {self._strategy} "
                    "has pushed the first gradient already; use an optimizer that needs one gradient a step"
                )
            loss = closure()
            self._exchange()
            return loss

        return evaluate

    @torch.no_grad()
    def _exchange(self) -> None:
        assert self.loop is not None
        if self._guard is not None:
            self._guard.gradients(self.num_steps, self.loop.rank)
        self._own = [(parameter, parameter.grad) for parameter in self._trained.values()]
        if self._masters is not None:
            self._wide.enter_context(self._masters.whole_step())
        if self._service.decays == "workers":
            self._take_decays()
        self._exchanged = True
        if not self.loop.before_step():
            for parameter in self._trained.values():
                parameter.grad = None  # the step is the server's: torch's own leaves such parameters alone

    def _take_decays(self) -> None:
        """Add the weight decay to copies of the gradients: the loop's own stay as they are."""
        for parameter in self._trained.values():
            parameter.grad = None if parameter.grad is None else parameter.grad.clone()
        self._decays = [
            (group, group["weight_decay"]) for group in self._optimizer.param_groups if "weight_decay" in group
        ]
        LocalDecay(self._optimizer).add_()

    @torch.no_grad()
    def _after(self, *_: Any) -> None:
        if not self._exchanged or self.loop is None:
            return
        for group, decay in self._decays:
            group["weight_decay"] = decay
        self._decays = []
        try:
            self.loop.after_step()
        finally:
            self._wide.close()
            for parameter, gradient in self._own:
                parameter.grad = gradient
            self._own = []
        self.num_steps += 1
        self._note_weights()
        self.on_end(self.num_steps)

    # ------------------------------------------------------------------ checks

    def _check(self) -> None:
        if self.lends:
            raise RuntimeError("inside consensus() the model is not this rank's; leave it before optimizer.step()")
        if self.loop is None:
            raise RuntimeError(
                f"{self._strategy} has a parameter server, which deals the batches: iterate over pt.shard(loader), "
                "with gradients enabled and the model in training mode, before optimizer.step()"
            )
        if getattr(self._optimizer, "grad_scale", None) is not None:
            raise RuntimeError(
                f"{type(self._optimizer).__name__}(fused=True) takes the scale of a GradScaler off after the push; "
                "make it with fused=False"
            )
        if self._needing_gradients() != self._held:
            raise RuntimeError(f"other parameters are trained now than at attach, and the server has those; {_AGAIN}")
        if (rule := shard_rule_of(self._service, self._optimizer)) != self._rule:
            raise RuntimeError(
                f"the optimizer's settings have changed from {self._rule} to {rule}, and the shards apply the former; "
                f"only learning rates may change, or {_AGAIN}"
            )
        self._check_weights()

    def _check_weights(self) -> None:
        """Raise RuntimeError for weights that have changed since the last pull, or the last step here."""
        assert self.loop is not None
        if self._changes is not None and not self.loop.replica.is_apart and self._num_changes() != self._changes:
            raise RuntimeError(
                "the model's parameters were changed in place since the last step (load_state_dict, clipped weights), "
                f"and the server's would replace them; {_AGAIN}"
            )

    def _needing_gradients(self) -> list[int]:
        return [id(p) for group in self._optimizer.param_groups for p in group["params"] if p.requires_grad]

    def _num_changes(self) -> int:
        """Torch counts for each tensor how often it was changed in place."""
        return sum(parameter._version for parameter in self._trained.values())
