"""`BatchedReplicas`: virtual workers that compute gradients and updates together."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from polytempo.core import Port, Strategy
from polytempo.core.calls.refusals import refuse
from polytempo.one_host.hogwild import Updates
from polytempo.spec.job import Job
from polytempo.training.job.context import TakeStep
from polytempo.training.model.trainable_parameters import trainable
from polytempo.training.step.parameter_exchange import noted
from polytempo.training.step.replica import Replica
from polytempo.training.step.step_cost import StepCost
from polytempo.training.virtual.batched_gradients import GradientPool
from polytempo.training.virtual.batched_updates import UpdatePool
from polytempo.training.virtual.virtual_step import StepWork, charged, step_of_work
from polytempo.training.virtual.worker_matrix import WorkerMatrices


class BatchedReplicas:
    """The models and optimizers of all workers of a simulation, and the pools that compute for them.

    A step has the charges and messages of `priced_step`; its gradients and updates equal each worker's own up to
    rounding.
    """

    def __init__(self, job: Job, strategy: Strategy, workers: int) -> None:
        check_alone(strategy)
        if job.weight is not None:
            refuse({"batched", "weight"}, job=job.name)
        self._matrices = WorkerMatrices(workers)
        self._gradients = GradientPool(job, self._matrices)
        self._updates = UpdatePool(self._matrices, varies=job.schedule is not None)

    def place(self, worker: int, model: nn.Module, optimizer: Optimizer) -> None:
        """Take over a worker's model and optimizer, before anything else refers to its parameters."""
        self._matrices.place(worker, trainable(model, optimizer))
        self._gradients.place(worker, model)
        self._updates.place(worker, optimizer)

    def step(self, worker: int, replica: Replica, cost: StepCost, updates: Updates) -> TakeStep:
        """The steps of `worker`, as `priced_step` makes them."""
        self._gradients.watch(worker, replica)
        fills = replica.exchanges_parameters and replica.strategy.carries_optimizer
        for hook in replica.hooks if fills else ():  # which fills the gradients
            hook.remove()

        def update() -> None:
            if fills:
                replica.begin_states()
            self._updates.enrol(worker)

        async def take_step(port: Port, batch: Any, samples: int, share: float | None) -> Tensor:
            work = StepWork(
                gradients=partial(self._gradients.enrol, worker, batch),
                update=update,
                share=share,
                computed=lambda _: noted(replica.parameters, self._gradients.loss(worker)),
                updated=partial(self._updates.make, worker),
            )
            charge = charged(cost, replica, [samples], updates.varied(1.0))
            loss: Tensor = await step_of_work(port, replica, charge, work, updates)
            return loss

        return take_step


def check_alone(strategy: Strategy) -> None:
    """`Incompatible` for a strategy with workers that do not compute whole batches with whole models of their own."""
    refuse(strategy.features | {"batched"}, strategy=strategy)
