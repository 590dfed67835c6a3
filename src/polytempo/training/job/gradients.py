"""`StepGradients`: a rank's gradients in a step of a run's own loop: of a batch, of its pieces or of its slices."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import Tensor

from polytempo.core import Port
from polytempo.federated.privacy import noise_source
from polytempo.spec.run_spec import RunSpec
from polytempo.training.federated.client_turns import ClientTurns
from polytempo.training.federated.remote_rounds import RemoteData
from polytempo.training.federated.remote_turns import RemoteTurns
from polytempo.training.federated.sample_gradients import SampleGradients
from polytempo.training.job.distillation import Distiller, objective_of
from polytempo.training.job.growth import Pieces
from polytempo.training.job.sliced_step import SlicedGradients
from polytempo.training.step.parameter_exchange import noted
from polytempo.training.step.replica import Replica


class StepGradients:
    """Computes gradients of `replica` as the run's strategy asks. `silent`: around passes that exchange nothing."""

    def __init__(
        self,
        replica: Replica,
        spec: RunSpec,
        silent: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        self._replica, self._silent = replica, silent
        self._objective = objective_of(spec.job, replica, spec.strategy.distillation)
        of_clients = RemoteTurns if isinstance(spec.job.data, RemoteData) else ClientTurns
        sliced = SlicedGradients if spec.strategy.rounds is None else of_clients
        self._sliced = None if spec.strategy.slices is None else sliced(replica, spec)
        self._seed, privacy = spec.seed, spec.strategy.sample_privacy
        self._samples = (
            None
            if privacy is None or self._sliced is not None
            else SampleGradients(spec.job, replica.model, privacy, str(spec.strategy))
        )

    @property
    def work(self) -> float:
        """The computation of a step, relative to a step without other groups' forward passes."""
        return self._objective.work if isinstance(self._objective, Distiller) else 1.0

    async def begin(self, port: Port, batch: Any) -> None:
        """Fetch state for slices from other ranks, before `compute`."""
        if self._sliced is not None:
            await self._sliced.begin(port, batch)

    async def meet(self, port: Port) -> None:
        """Exchange further sums of slices, after `compute`."""
        if self._sliced is not None:
            await self._sliced.meet(port)

    def compute(self, batch: Any, rank: int, share: float = 1.0) -> Tensor:
        """Leave the gradient in `.grad` and return the loss. The exchange may have begun; of slices it follows.

        `share`: the batch's part of the global one, which has its part of a step's noise.
        """
        if self._sliced is not None:
            with self._silent():
                return self._sliced.compute(batch, rank)
        replica = self._replica
        if self._samples is not None:
            source = noise_source(self._seed, rank, replica.step, "samples")
            with self._silent():
                loss = self._samples.compute(batch, source, share)
            if replica.guard is not None and share:
                replica.guard.loss(loss, replica.step, rank)
            return loss

        def backward(part: Any, weight: float) -> Tensor:
            loss = self._objective(part)
            if replica.guard is not None and weight:
                replica.guard.loss(loss, replica.step, rank)
            replica.scaled(noted(replica.parameters, loss if weight == 1 else weight * loss)).backward()
            return loss

        replica.optimizer.zero_grad()
        if isinstance(batch, Pieces):
            return batch.computed(backward, self._silent, together=replica.computes_together)
        return backward(batch, 1.0)
