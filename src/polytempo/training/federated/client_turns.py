"""The turns of a round's clients: each is a slice of the step, and its movement is the slice's gradient.

the round's model θ ──▶ client 17: E passes over its data, by a new optimizer of the job ──▶ θ - θ₁₇ ─┐
                    ──▶ client  4: …                                                   ──▶ θ - θ₄  ─┴▶ Σ share · …
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from polytempo.collectives import tree
from polytempo.collectives.invariant import Invariant
from polytempo.core import Bundle, Codec, EncodeContext, Port
from polytempo.core.bundle import by_kind
from polytempo.federated.clients import Client, Clients, Cohorts, clients
from polytempo.federated.privacy import add_noise_, clip_
from polytempo.federated.rounds import by_samples
from polytempo.federated.sampling import Sampling
from polytempo.spec.job import Data
from polytempo.spec.job_calls import model_of, move_model, optimizer_of, schedule_of
from polytempo.spec.objective import loss_of
from polytempo.spec.run_spec import RunSpec
from polytempo.spec.text.catalogue import parse_partition, parse_sampling
from polytempo.training.federated.client_movements import coded, merged_
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
    rounds, rule = spec.strategy.rounds, spec.options.sampling
    if rule is not None:
        if dealt.sampling != Sampling():
            raise ValueError(f"sampling={rule!r}: the data of job {spec.job.name} have a rule already; leave it out")
        dealt = Clients(dealt.dataset, dealt.parts, parse_sampling(rule), dealt.test)
    if dealt.sampling.by_samples and rounds.shares is not by_samples:
        raise ValueError(
            f"weighted() lets clients count alike, and {spec.strategy} weighs them by more than their samples; use "
            "another sampling, or fed_avg()"
        )
    expected = None if rounds.privacy is None else rounds.privacy.cohort
    return Cohorts(dealt, rounds.number, spec.seed, data.collate, rounds.local.buffering, expected)


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
        mine, server = _tensors(self._model), _tensors(replica.model)
        self._others = {name: (mine[name], server[name]) for name in mine if name not in replica.trainable}
        """Frozen parameters, kept ones and buffers: the client's, and the server's."""
        self._kept = {name: mine[name] for name in sorted(self._local.kept(self._model))}
        self._head = [each for each in self._kept.values() if each.requires_grad]
        self._controls = {
            f"control/{name}": torch.zeros_like(p) for name, p in replica.trainable.items() if self._local.controls
        }
        """c, the server's control variate."""
        self._states: ClientStates | None = None
        buffering = self._local.buffering
        self._past = [
            {f"past/{i}/{name}": p.detach().clone() for name, p in replica.trainable.items()}
            for i in range(0 if buffering is None else buffering.oldest + 1)
        ]
        """The server's models of earlier updates; t's is at t modulo their number."""
        if self._kept or self._controls or self._past:
            layout = self._controls | self._kept
            server = self._controls | {name: each for past in self._past for name, each in past.items()}
            self._states = replica.clients = ClientStates(self._rounds.number, layout, server)
        self._received: list[Tensor] = []
        self._models: dict[int, list[Tensor]] = {}
        self._movements: dict[int, list[Tensor]] = {}
        self._bottoms: dict[int, float] = {}

    async def begin(self, port: Port, slices: list[BatchSlice]) -> None:
        """Move the states of the round's clients to the workers that play them."""
        if self._states is not None and (self._kept or self._controls):
            await self._states.fetch(port, {piece.number: piece.batch.number for piece in slices})

    async def meet(self, port: Port) -> None:
        """Exchange sums beside the weighted movements: the same bits for any number of workers.

        Cost: for control variates the route's of `invariant`, for the model's parameters; for a merge a gather of all
        clients' movements; for `fairness` 8 bytes a client.
        """
        cohort, trainable = self._rounds.number, self._replica.trainable
        for group in by_kind(dict(zip(self._controls, self._sums, strict=False))).values():
            bundle = Bundle(group)
            added = bundle.with_flat(await Invariant(cohort)(port, bundle.flat))
            torch._foreach_add_([self._controls[name] for name in group], list(added.views.values()))
        if self._rounds.merge is not None:
            await merged_(port, trainable, self._movements, cohort, self._rounds.merge)
        if self._local.fairness:
            bottoms = torch.zeros(cohort, dtype=torch.float64)
            for place, bottom in self._bottoms.items():
                bottoms[place] = bottom
            total = float((await tree(port, bottoms)).sum())
            torch._foreach_div_([p.grad for p in trainable.values() if p.grad is not None], total)

    def compute(self, slices: list[BatchSlice], rank: int) -> Tensor:
        """The mean loss of this rank's clients over their local steps; `.grad` is their movements' weighted sum.

        Cost: a forward and a backward pass for each sample and local epoch. Memory: ⌈log₂S⌉ + 2 models for S clients.
        """
        while self._schedule is not None and self._schedule.last_epoch < self._replica.step:
            self._rates.step()  # without gradients: a schedule warns where its optimizer has made no step
            self._schedule.step()
        self._movements, self._bottoms, self._models = {}, {}, {}
        if self._past:
            now = self._past[self._replica.step % len(self._past)]
            torch._foreach_copy_(list(now.values()), [p.detach() for p in self._parameters])
        return super().compute(slices, rank)

    def _computed(self, piece: BatchSlice, rank: int, used: set[int]) -> tuple[Tensor, list[Tensor]]:
        local, client = self._local, piece.batch
        assert isinstance(client, Client)
        state = {} if self._states is None else self._states.get(client.number)
        self._received = self._model_of(client.age)
        optimizer = self._begun(state)
        first_loss = self._loss_of_all(client) if local.fairness else 0.0
        seed_step(self._seed, client.number, self._replica.step, "client's training")
        losses = self._trained(client, optimizer, self._correction(state), rank)
        used.update(i for i, parameter in enumerate(self._own) if parameter.grad is not None)
        movement = list(torch._foreach_sub(self._received, [parameter.detach() for parameter in self._own]))
        new = {name: tensor.detach().clone() for name, tensor in self._kept.items()}
        changes = self._changes(movement, optimizer, len(losses))
        new |= {name: state[name] + each if state else each.clone() for name, each in changes.items()}
        if self._states is not None and new:
            self._states.put(client.number, new)
        when = EncodeContext(step=self._replica.step + 1, rank=client.number)
        movement = self._coded(movement, self._rounds.codec, when)
        if self._rounds.merge is not None:
            self._movements[piece.number] = [each.clone() for each in movement]
        weight = piece.share / (1 + client.age) ** 0.5
        if local.fairness:
            weight *= first_loss**local.fairness
            norm = sum(float(each.double().square().sum()) for each in movement)
            slope = local.fairness * first_loss ** (local.fairness - 1) * norm * _rates_of(optimizer)[id(self._own[0])]
            self._bottoms[piece.number] = weight + piece.share * slope
        privacy = self._rounds.privacy
        if privacy is not None:
            clip_(movement, privacy.clip)
        torch._foreach_mul_(movement, weight)
        if privacy is not None and piece.number == 0:
            used.update(range(len(movement)))
            seed_step(self._seed, 0, self._replica.step, "noise of a round")
            add_noise_(movement, privacy)
        loss = torch.stack(losses).mean() if losses else torch.zeros((), device=movement[0].device)
        return loss, movement + [each.mul_(client.weight) for each in changes.values()]

    def _model_of(self, age: int) -> list[Tensor]:
        """The server's model of `age` updates ago, as clients receive it."""
        if age not in self._models:
            step = self._replica.step - age
            found = list(self._past[step % len(self._past)].values()) if age else [p.detach() for p in self._parameters]
            self._models[age] = self._coded(found, self._rounds.pull_codec, EncodeContext(step=step + 1))
        return self._models[age]

    def _begun(self, state: dict[str, Tensor]) -> Optimizer:
        """A new optimizer of the client's model, which is the round's now, with the client's own tensors."""
        with torch.no_grad():
            torch._foreach_copy_(list[Tensor](self._own), self._received)
            for name, (mine, server) in self._others.items():
                mine.copy_(state[name] if name in self._kept and state else server)
        optimizer = optimizer_of(self._job, self._model, self._spec.lr)
        for group, rates in zip(optimizer.param_groups, self._rates.param_groups, strict=True):
            group["lr"] = rates["lr"]
        return optimizer

    def _trained(self, client: Client, optimizer: Optimizer, correction: list[Tensor], rank: int) -> list[Tensor]:
        """Train the client's model; the losses of its steps."""
        replica, local, losses = self._replica, self._local, list[Tensor]()
        for epoch in range(local.head_epochs + local.epochs):
            if local.head_epochs:
                for each in self._head:
                    each.requires_grad_(epoch < local.head_epochs)
                for parameter in self._own:
                    parameter.requires_grad_(epoch >= local.head_epochs)
            order = _order(len(client), (self._seed, replica.step, client.number, epoch))
            for batch in client.batches(local.batch_size, order):
                optimizer.zero_grad()
                loss = loss_of(self._job, self._model, beside(self._model, batch))
                if replica.guard is not None:
                    replica.guard.loss(loss, replica.step, rank)
                loss.backward()
                if local.proximal:
                    self._pull(local.proximal)
                for parameter, more in zip(self._own, correction, strict=False):
                    parameter.grad = more.clone() if parameter.grad is None else parameter.grad.add_(more)
                optimizer.step()
                losses.append(loss.detach())
        return losses

    def _pull(self, mu: float) -> None:
        """Add μ (θ_k - θ) to the gradients."""
        for parameter, first in zip(self._own, self._received, strict=True):
            if parameter.grad is not None:
                parameter.grad.add_(parameter.detach() - first, alpha=mu)

    def _correction(self, state: dict[str, Tensor]) -> list[Tensor]:
        """c - c_k; c_k is 0 before a client's first round. Empty without control variates."""
        return [server - state[name] if state else server for name, server in self._controls.items()]

    def _changes(self, movement: list[Tensor], optimizer: Optimizer, steps: int) -> dict[str, Tensor]:
        """(θ - θ_k) / (τ η) - c, the change of the client's control variate. Empty without these."""
        rates = _rates_of(optimizer)
        moved = zip(self._controls.items(), movement, self._own, strict=False)
        return {name: each / (steps * rates[id(own)]) - server for (name, server), each, own in moved}

    @torch.no_grad()
    def _loss_of_all(self, client: Client) -> float:
        """The mean loss of the round's model on the client's samples."""
        seed_step(self._seed, client.number, self._replica.step, "client's loss")
        modes = [(module, module.training) for module in self._model.modules()]
        self._model.eval()
        total, every = 0.0, torch.arange(len(client))
        for chosen in every.split(self._local.batch_size or len(every)):
            [batch] = client.batches(None, chosen)
            total += len(chosen) * float(loss_of(self._job, self._model, beside(self._model, batch)))
        for module, training in modes:
            module.training = training
        return max(total / len(client), _LEAST_LOSS)

    def _coded(self, tensors: list[Tensor], codec: Codec | None, when: EncodeContext) -> list[Tensor]:
        """The tensors as their receiver decodes them."""
        if codec is None:
            return tensors
        return [coded(each, codec, when, name) for name, each in zip(self._replica.trainable, tensors, strict=True)]


_LEAST_LOSS = 1e-10


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers by name."""
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def _rates_of(optimizer: Optimizer) -> dict[int, float]:
    return {id(p): float(group["lr"]) for group in optimizer.param_groups for p in group["params"]}


def _order(count: int, key: tuple[int, ...]) -> Tensor:
    """A permutation of a client's samples, drawn from the run's seed, the round, the client and the local epoch."""
    return torch.from_numpy(np.random.default_rng(key).permutation(count))
