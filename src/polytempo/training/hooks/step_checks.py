"""`StepChecks`: what may not have changed since `attach` when the optimizer makes a step."""

from __future__ import annotations

from polytempo.training.step.loss_scale import calls_step
from polytempo.training.step.replica import Replica


class StepChecks:
    """Raises RuntimeError before a step that would let ranks differ.

    `feels_scales`: whether scaled losses, or a step that one rank skips, would change more than `.grad`. `has_scaler`:
    whether `attach` was given the GradScaler.
    """

    def __init__(self, replica: Replica, *, feels_scales: bool, has_scaler: bool) -> None:
        self._replica, self.feels_scales, self._has_scaler = replica, feels_scales, has_scaler
        self.lends = False
        """Whether the model's tensors are other ones just now, inside `consensus`."""
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
