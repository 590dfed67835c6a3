"""The turns of a round's clients: each is a slice of the step, and its movement is the slice's gradient.

the round's model θ ──▶ client 17: E passes over its data, by a new optimizer of the job ──▶ θ - θ₁₇ ─┐
                    ──▶ client  4: …                                                   ──▶ θ - θ₄  ─┴▶ Σ share · …
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from polytempo.collectives import tree
from polytempo.collectives.invariant import Invariant
from polytempo.core import Bundle, Codec, EncodeContext, Port
from polytempo.core.bundle import by_kind
from polytempo.federated.client_tests import ClientTests
from polytempo.federated.clients import Client, Clients, Cohorts, clients, held_out
from polytempo.federated.privacy import add_noise_, clip_, noise_source
from polytempo.federated.rounds import CONTROL, by_samples
from polytempo.federated.sampling import Sampling
from polytempo.spec.job import Data
from polytempo.spec.run_spec import RunSpec
from polytempo.spec.text.catalogue import parse_partition, parse_sampling
from polytempo.training.federated.client_movements import coded, fair_weights, merged_
from polytempo.training.federated.client_states import ClientStates
from polytempo.training.federated.local_passes import LocalPasses
from polytempo.training.federated.movement_words import WordSums
from polytempo.training.federated.remote_rounds import RemotePlaces
from polytempo.training.job.sliced_step import BatchSlice, SlicedGradients
from polytempo.training.step.replica import Replica


def cohorts_of(spec: RunSpec, data: Data) -> Cohorts | RemotePlaces:
    """The cohorts of a run's rounds. ValueError for data without clients."""
    assert spec.strategy.rounds is not None
    train, given = data.train, spec.options.clients
    if isinstance(train, RemotePlaces):
        chosen = {"clients": given, "sampling": spec.options.sampling, "client_test": spec.options.client_test}
        if named := ", ".join(f"{name}={value!r}" for name, value in chosen.items() if value is not None):
            raise ValueError(
                f"{named}: clients on machines of their own bring their data, and the server draws among the connected "
                "ones; leave it out, and see pt.federated.RoundRules"
            )
        return train
    if isinstance(train, Clients):
        if given is not None and spec.options.client_test is None:
            raise ValueError(f"clients={given!r}: the data of job {spec.job.name} have clients already; leave it out")
        dealt = train
    elif given is None:
        raise ValueError(
            f"{spec.strategy} trains clients that have data of their own; deal the data to some, as with "
            "clients='iid(100)' or --clients 'dirichlet(100, alpha=0.5)', or let the job's data be "
            "pt.federated.clients(…)"
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


def tested(spec: RunSpec, data: Data) -> Data:
    """The data, with test samples of each client where the options hold some out. ValueError where they have such."""
    part, train, given = spec.options.client_test, data.train, spec.options.clients
    if part is None or (given is None) != isinstance(train, Clients):
        return data  # or `cohorts_of` refuses them
    if isinstance(train, Clients):
        if train.test is not None:
            raise ValueError(
                f"client_test={part:g}: clients of job {spec.job.name} have test samples already; leave it out"
            )
        halves = [held_out(own, part, spec.seed, number) for number, own in enumerate(train.parts)]
        tests = ClientTests(train.dataset, [each[1] for each in halves])
        dealt = Clients(train.dataset, [each[0] for each in halves], train.sampling, tests)
    elif isinstance(train, DataLoader):
        return data
    else:
        assert given is not None
        dealt = clients(train, parse_partition(given), spec.seed, test=part)
    own_test = {} if data.test is None else {"job_test": data.test}
    return data._replace(train=dealt, test=dealt.test, more={**data.more, **own_test})


class ClientTurns(SlicedGradients):
    """Trains each client of this rank's part of a cohort, and leaves the weighted sum of movements in `.grad`."""

    def __init__(self, replica: Replica, spec: RunSpec) -> None:
        super().__init__(replica, spec)
        assert spec.strategy.rounds is not None
        self._spec, self._rounds, self._local = spec, spec.strategy.rounds, spec.strategy.rounds.local
        self._passes = LocalPasses(spec, self._local, self._parameters[0].device, tuple(replica.trainable))
        self._server_tensors = _tensors(replica.model)
        self._kept = self._passes.kept
        self._controls = {
            f"{CONTROL}{name}": torch.zeros_like(p) for name, p in replica.trainable.items() if self._local.controls
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
        self._words = None if self._rounds.secure is None else WordSums(self._rounds, replica.trainable)
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
        clients' movements; for `fairness` 8 bytes a client; for secure sums a `tree` of the words.
        """
        cohort, trainable = self._rounds.number, self._replica.trainable
        for group in by_kind(dict(zip(self._controls, self._sums, strict=False))).values():
            bundle = Bundle(group)
            added = bundle.with_flat(await Invariant(cohort)(port, bundle.flat))
            torch._foreach_add_([self._controls[name] for name in group], list(added.views.values()))
        if self._rounds.merge is not None:
            await merged_(port, trainable, self._movements, cohort, self._rounds.merge)
        if self._words is not None:
            found = await self._words.meet(port)
            self._add_noise_(found)
            for parameter, each in zip(trainable.values(), found, strict=True):
                parameter.grad = each
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
        self._passes.follow(self._replica.step)
        self._movements, self._bottoms, self._models = {}, {}, {}
        if self._words is not None:
            self._words.begin()
        if self._past:
            now = self._past[self._replica.step % len(self._past)]
            torch._foreach_copy_(list(now.values()), [p.detach() for p in self._parameters])
        return super().compute(slices, rank)

    def _computed(self, piece: BatchSlice, rank: int, used: set[int]) -> tuple[Tensor, list[Tensor]]:
        local, client, passes, step = self._local, piece.batch, self._passes, self._replica.step
        assert isinstance(client, Client)
        begun = step - client.age
        state = {} if self._states is None else self._states.get(client.number)
        received, guard = self._model_of(client.age), self._replica.guard
        check = None if guard is None else lambda loss: guard.loss(loss, step, rank)
        rates = passes.rates_of(begun)
        turn = passes.turn(client, begun, received, self._server_tensors, self._controls, state, rates, check)
        used.update(turn.used)
        if self._states is not None and turn.state:
            self._states.put(client.number, turn.state)
        privacy = self._rounds.privacy
        if privacy is not None:
            clip_(turn.movement, privacy.clip)
        when = EncodeContext(step=begun + 1, rank=client.number)
        movement = self._coded(turn.movement, self._rounds.codec, when)
        if self._rounds.merge is not None:
            self._movements[piece.number] = [each.clone() for each in movement]
        weight = piece.share / (1 + client.age) ** 0.5
        if local.fairness:
            weight, self._bottoms[piece.number] = fair_weights(
                weight, turn.first_loss, movement, local.fairness, passes.own_rates
            )
        if privacy is not None:
            clip_(movement, privacy.clip)
        if self._words is not None:
            self._words.add(movement, weight)
        torch._foreach_mul_(movement, weight)
        if self._words is None and piece.number == 0 and privacy is not None:
            used.update(range(len(movement)))
            self._add_noise_(movement)
        loss = torch.stack(turn.losses).mean() if turn.losses else torch.zeros((), device=movement[0].device)
        return loss, movement + [each.mul_(client.weight) for each in turn.changes.values()]

    def _add_noise_(self, movement: list[Tensor]) -> None:
        if self._rounds.privacy is not None:
            add_noise_(movement, self._rounds.privacy, noise_source(self._seed, self._replica.step, 0))

    def _model_of(self, age: int) -> list[Tensor]:
        """The server's model of `age` updates ago, as clients receive it."""
        if age not in self._models:
            step = self._replica.step - age
            found = list(self._past[step % len(self._past)].values()) if age else [p.detach() for p in self._parameters]
            self._models[age] = self._coded(found, self._rounds.pull_codec, EncodeContext(step=step + 1))
        return self._models[age]

    def _coded(self, tensors: list[Tensor], codec: Codec | None, when: EncodeContext) -> list[Tensor]:
        """The tensors as their receiver decodes them."""
        if codec is None:
            return tensors
        return [coded(each, codec, when, name) for name, each in zip(self._replica.trainable, tensors, strict=True)]


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers by name."""
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}
