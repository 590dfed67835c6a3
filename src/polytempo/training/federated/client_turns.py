"""The turns of a round's clients: each is a slice of the step, and its movement is the slice's gradient.

the round's model θ ──▶ client 17: E passes over its data, by a new optimizer of the job ──▶ θ - θ₁₇ ─┐
                    ──▶ client  4: …                                                   ──▶ θ - θ₄  ─┴▶ Σ share · …
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from polytempo.collectives.invariant import Invariant
from polytempo.core import Bundle, Port
from polytempo.core.bundle import by_kind
from polytempo.federated.clients import Client, Clients, Cohorts, clients
from polytempo.spec.job import Data
from polytempo.spec.job_calls import model_of, move_model, optimizer_of, schedule_of
from polytempo.spec.objective import loss_of
from polytempo.spec.run_spec import RunSpec
from polytempo.spec.text.catalogue import parse_partition
from polytempo.training.federated.client_states import ClientStates
from polytempo.training.job.sliced_step import BatchSlice, SlicedGradients
from polytempo.training.model.randomness import kept_random_states, seed_step
from polytempo.training.model.run_device import beside
from polytempo.training.step.replica import Replica


def cohorts_of(spec: RunSpec, data: Data) -> Cohorts:
    """The cohorts of a run's rounds. ValueError for data without clients."""
    assert spec.strategy.rounds is not None
    train, given = data.train, spec.options.clients
    if isinstance(train, Clients):
        if given is not None:
            raise ValueError(f"clients={given!r}: the data of job {spec.job.name} have clients already; leave it out")
        dealt = train
    elif given is None:
        raise ValueError(
            f"{spec.strategy} trains clients that have data of their own; deal the data to some, as with "
            "clients='iid(100)' or 'dirichlet(100, alpha=0.5)', or let the job's data be pt.federated.clients(…)"
        )
    elif isinstance(train, DataLoader):
        raise ValueError("clients have samples with numbers; give pt.Data a data set, not a DataLoader")
    else:
        dealt = clients(train, parse_partition(given), spec.seed)
    return Cohorts(dealt, spec.strategy.rounds.number, spec.seed, data.collate)


class ClientTurns(SlicedGradients):
    """Trains each client of this rank's part of a cohort, and leaves the weighted sum of movements in `.grad`."""

    def __init__(self, replica: Replica, spec: RunSpec) -> None:
        super().__init__(replica, spec)
        assert spec.strategy.rounds is not None
        self._spec, self._rounds, self._local = spec, spec.strategy.rounds, spec.strategy.rounds.local
        with kept_random_states():
            self._model = model_of(spec.job)
        move_model(self._model, self._parameters[0].device)
        self._own = [self._model.get_parameter(name) for name in replica.trainable]
        self._rates = optimizer_of(spec.job, self._model, spec.lr)
        """Has the learning rates of the round, by the job's schedule."""
        self._schedule = schedule_of(spec.job, self._rates, 1)
        spec.strategy.fit(spec.strategy, self._rates)
        self._states: ClientStates | None = None
        if self._local.controls:
            controls = {name: torch.zeros_like(p) for name, p in replica.trainable.items()}
            self._states = replica.clients = ClientStates(self._rounds.number, controls, controls)

    async def begin(self, port: Port, slices: list[BatchSlice]) -> None:
        """Move the states of the round's clients to the workers that play them."""
        if self._states is not None:
            await self._states.fetch(port, {piece.number: piece.batch.number for piece in slices})

    async def meet(self, port: Port) -> None:
        """Add the clients' changes of their control variates to the server's: the same bits for any number of workers.

        Cost: the route's of `invariant`, for the model's parameters.
        """
        if self._states is None:
            return
        changes = dict(zip(self._replica.trainable, self._sums, strict=True))
        for group in by_kind(changes).values():
            bundle = Bundle(group)
            total = bundle.with_flat(await Invariant(self._rounds.number)(port, bundle.flat))
            torch._foreach_add_([self._states.server[name] for name in group], list(total.views.values()))

    def compute(self, slices: list[BatchSlice], rank: int) -> Tensor:
        """The mean loss of this rank's clients over their local steps; `.grad` is their movements' weighted sum.

        Cost: a forward and a backward pass for each sample and local epoch. Memory: ⌈log₂S⌉ + 2 models for S clients.
        """
        while self._schedule is not None and self._schedule.last_epoch < self._replica.step:
            self._rates.step()  # without gradients: a schedule warns where its optimizer has made no step
            self._schedule.step()
        return super().compute(slices, rank)

    def _computed(self, piece: BatchSlice, rank: int, used: set[int]) -> tuple[Tensor, list[Tensor]]:
        replica, local, client = self._replica, self._local, piece.batch
        assert isinstance(client, Client)
        begin = [parameter.detach() for parameter in self._parameters]
        optimizer = self._begun(begin)
        state = {} if self._states is None else self._states.store.get(client.number)
        correction = self._correction(state) if local.controls else []
        seed_step(self._seed, client.number, replica.step, "client's training")
        losses: list[Tensor] = []
        for epoch in range(local.epochs):
            order = _order(len(client), (self._seed, replica.step, client.number, epoch))
            for batch in client.batches(local.batch_size, order):
                optimizer.zero_grad()
                loss = loss_of(self._job, self._model, beside(self._model, batch))
                if replica.guard is not None:
                    replica.guard.loss(loss, replica.step, rank)
                loss.backward()
                if local.proximal:
                    self._pull(begin, local.proximal)
                if correction:
                    self._correct(correction)
                optimizer.step()
                losses.append(loss.detach())
        used.update(i for i, parameter in enumerate(self._own) if parameter.grad is not None)
        movement = list(torch._foreach_sub(begin, [parameter.detach() for parameter in self._own]))
        changes = self._new_controls(client, state, movement, optimizer, len(losses)) if local.controls else []
        torch._foreach_mul_(movement, piece.share)
        return torch.stack(losses).mean(), movement + changes

    def _begun(self, begin: list[Tensor]) -> Optimizer:
        """A new optimizer of the client's model, which is the round's now."""
        with torch.no_grad():
            torch._foreach_copy_(list[Tensor](self._own), begin)
            for mine, buffer in zip(self._model.buffers(), self._replica.model.buffers(), strict=True):
                mine.copy_(buffer)
        optimizer = optimizer_of(self._job, self._model, self._spec.lr)
        for group, rates in zip(optimizer.param_groups, self._rates.param_groups, strict=True):
            group["lr"] = rates["lr"]
        return optimizer

    def _correction(self, state: dict[str, Tensor]) -> list[Tensor]:
        """c - c_k; c_k is 0 before a client's first round."""
        assert self._states is not None
        server = list(self._states.server.values())
        own = [state[name] for name in self._states.server] if state else []
        return list(torch._foreach_sub(server, own)) if own else server

    def _correct(self, correction: Sequence[Tensor]) -> None:
        for parameter, each in zip(self._own, correction, strict=True):
            parameter.grad = each.clone() if parameter.grad is None else parameter.grad.add_(each)

    def _new_controls(
        self, client: Client, state: dict[str, Tensor], movement: list[Tensor], optimizer: Optimizer, steps: int
    ) -> list[Tensor]:
        """Keep c_k - c + (θ - θ_k) / (τ η), and return p_k times the change."""
        assert self._states is not None
        rates = {id(p): float(group["lr"]) for group in optimizer.param_groups for p in group["params"]}
        changes = [
            moved / (steps * rates[id(own)]) - server
            for moved, own, server in zip(movement, self._own, self._states.server.values(), strict=True)
        ]
        old = [state[name] for name in self._states.server] if state else []
        new = list(torch._foreach_add(old, changes)) if old else [each.clone() for each in changes]
        self._states.store.put(client.number, dict(zip(self._states.server, new, strict=True)))
        torch._foreach_mul_(changes, client.weight)
        return changes

    def _pull(self, begin: list[Tensor], mu: float) -> None:
        """Add μ (θ_k - θ) to the gradients."""
        for parameter, first in zip(self._own, begin, strict=True):
            if parameter.grad is not None:
                parameter.grad.add_(parameter.detach() - first, alpha=mu)


def _order(count: int, key: tuple[int, ...]) -> Tensor:
    """A permutation of a client's samples, drawn from the run's seed, the round, the client and the local epoch."""
    return torch.from_numpy(np.random.default_rng(key).permutation(count))
