"""`RemoteTurns`: a round's movements come from clients of other processes, and are merged as simulated ones are."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch
from torch import Tensor

from polytempo.core import EncodeContext, Port
from polytempo.core.arithmetic.slice_tree import along_tree
from polytempo.federated.client_tests import spread
from polytempo.federated.privacy import add_noise_, clip_, noise_source
from polytempo.federated.rounds import CONTROL
from polytempo.federated.sampling import independent
from polytempo.spec.run_spec import RunSpec
from polytempo.training.federated.client_movements import fair_weights, merged_, to_wire
from polytempo.training.federated.client_states import ClientStates
from polytempo.training.federated.local_passes import LocalPasses
from polytempo.training.federated.movement_words import movement_of, weights_of
from polytempo.training.federated.remote_rounds import (
    NO_ROUND,
    ClientAnswer,
    RemoteData,
    RoundAnswers,
    RoundTask,
    SumTask,
)
from polytempo.training.job.evaluate import tensors_of
from polytempo.training.job.sliced_step import BatchSlice, SlicedGradients
from polytempo.training.observe.user_log import user_log
from polytempo.training.step.replica import Replica


class RemoteTurns(SlicedGradients):
    """Leaves Σ shareₖ Δₖ, or the merge of movements, of the clients that have answered in `.grad`.

    Shares are of the answers alone, so they add up to 1 without the missing clients.
    """

    def __init__(self, replica: Replica, spec: RunSpec) -> None:
        super().__init__(replica, spec)
        assert spec.strategy.rounds is not None
        assert isinstance(spec.job.data, RemoteData)
        remote, trainable = spec.job.data, replica.trainable
        self._rounds, self._remote, self._noise = spec.strategy.rounds, remote.rounds, remote.noise
        privacy = spec.strategy.sample_privacy
        self._private_samples = privacy is not None and privacy.noise > 0
        self._passes = LocalPasses(spec, self._rounds.local, self._parameters[0].device, tuple(trainable))
        self._movements: dict[int, list[Tensor]] = {}
        self._loss = torch.zeros((), device=self._parameters[0].device)
        self._controls = {
            f"{CONTROL}{name}": torch.zeros_like(p) for name, p in trainable.items() if self._rounds.local.controls
        }
        """c, the server's control variate."""
        self._taken = torch.full((remote.clients,), float(NO_ROUND), dtype=torch.float64)
        """The last round that has a client's movement, of each client."""
        self._samples = torch.zeros(remote.clients, dtype=torch.float64)
        """The samples of clients that have come."""
        self._training = self._taken.clone()
        """The round that each client in training began in."""
        buffering = self._rounds.local.buffering
        self._past = [
            {f"past/{i}/{name}": p.detach().clone() for name, p in trainable.items()}
            for i in range(0 if buffering is None else buffering.oldest + 1)
        ]
        """Models of the server's last rounds, which clients in training may ask for again."""
        server = self._controls | {"taken": self._taken, "samples": self._samples}
        server |= {"training": self._training} if self._past else {}
        server |= {name: each for past in self._past for name, each in past.items()}
        replica.clients = ClientStates(self._rounds.number, self._controls, server)

    async def meet(self, port: Port) -> None:
        """Merge the movements, where the strategy merges them."""
        merge = self._rounds.merge
        if merge is not None and self._movements:
            await merged_(port, self._replica.trainable, self._movements, len(self._movements), merge)

    def compute(self, slices: list[BatchSlice], rank: int) -> Tensor:
        """The clients' mean loss over their local steps. Cost: a message with the model to each client and back.

        A round without answers has the loss of the round before. It leaves no gradient; of a private strategy it leaves
        the noise, because ε counts it.
        """
        step = self._replica.step
        self._passes.follow(step)
        if self._past:
            now = self._past[step % len(self._past)]
            torch._foreach_copy_(list(now.values()), [p.detach() for p in self._parameters])
        performed = self._performed(step)
        answers = performed.answers
        shares = self._shares(answers)
        if answers or self._rounds.privacy is not None:
            self._leave(performed, shares)
        else:
            self._movements = {}
            for parameter in self._parameters:
                parameter.grad = None
        if answers:
            zero, whole = torch.zeros((), device=self._parameters[0].device), sum(shares)
            losses = zip(answers, shares, strict=True)
            self._loss = sum((torch.tensor(each.loss) * (share / whole) for each, share in losses), zero)
        self._count(answers)
        self._log(answers)
        return self._loss

    def _leave(self, performed: RoundAnswers, shares: list[float]) -> None:
        """Leave the sum of movements in `.grad`."""
        answers = performed.answers
        if performed.words is None:
            total, used = self._total(answers, shares), {name for each in answers for name in each.movement}
        else:
            assert self._rounds.secure is not None
            total = movement_of(performed.words, self._rounds.secure, self._parameters, performed.scale)
        for (name, parameter), each in zip(self._replica.trainable.items(), total, strict=True):
            sent = performed.words is not None or self._rounds.privacy is not None or name in used
            parameter.grad = each if sent else None

    def _shares(self, answers: Sequence[ClientAnswer]) -> list[float]:
        """The weights of clients, by their samples."""
        return weights_of([each.samples for each in answers], self._rounds)

    def _total(self, answers: list[ClientAnswer], shares: list[float]) -> list[Tensor]:
        """Σ shareₖ Δₖ, with noise where the round is private; a merge takes the movements themselves later."""
        privacy, step = self._rounds.privacy, self._replica.step
        movements = [self._whole(each) for each in answers]
        self._movements = dict(enumerate(movements)) if self._rounds.merge is not None else {}
        fair = [self._fair(*each) for each in zip(answers, shares, movements, strict=True)]

        def weighed(place: int) -> list[Tensor]:
            if place < len(answers):
                found = list(torch._foreach_mul(movements[place], fair[place][0]))
            else:
                found = [torch.zeros_like(p) for p in self._parameters]
            if privacy is not None and place == 0:
                add_noise_(found, privacy, noise_source(self._secret(), step, attempt))
            return found

        if privacy is not None:
            for movement in movements:
                clip_(movement, privacy.clip)
            attempt = self._noise.attempt(step, _digest(answers, movements))
        total = along_tree(len(answers) if privacy is None else self._rounds.number, weighed, _added_)
        if self._rounds.local.fairness:
            torch._foreach_div_(total, float(torch.tensor([bottom for _, bottom in fair], dtype=torch.float64).sum()))
        return total

    def _performed(self, step: int) -> RoundAnswers:
        """A round's answers. Clients in training are in the states of a checkpoint afterwards."""
        task, privacy, local = self._task(step), self._rounds.privacy, self._rounds.local
        if privacy is not None:
            clients = len(self._taken)
            drawn = independent(clients, privacy.cohort / clients, self._rounds.number, self._secret(), step)
            task = task._replace(drawn=drawn.tolist())
        if local.buffering is not None:
            task = task._replace(training=_numbers(self._training), earlier=self._task)
        performed = self._remote.performed(task)
        self._training.fill_(NO_ROUND)
        for client, number in self._remote.training.items():
            self._training[client] = number
        return performed

    def _task(self, step: int) -> RoundTask:
        """The round `step` for clients: this one, or one with a kept model."""
        replica, codec, secure = self._replica, self._rounds.pull_codec, self._rounds.secure
        trainable = {n: p.detach() for n, p in replica.trainable.items()}
        if step != replica.step:
            kept = self._past[step % len(self._past)].values()
            trainable = dict(zip(trainable, kept, strict=True))
        model = tensors_of(replica.model) | trainable
        if codec is not None:
            when = EncodeContext(step=step + 1)
            model |= {name: to_wire(each, codec, when, name) for name, each in trainable.items()}
        return RoundTask(
            step,
            model | self._controls,
            self._passes.rates_of(step),
            trainable | self._controls,
            self._rounds.codec,
            _numbers(self._taken),
            self._problem,
            asked=self._ask,
            sum=None if secure is None else SumTask(secure, sum(p.numel() for p in self._parameters), self._shares),
        )

    def _ask(self, clients: Sequence[int]) -> None:
        """Count a turn of each client with private samples."""
        if self._private_samples:
            self._secret()
            self._noise.ask(self._replica.step, clients)

    def _secret(self) -> int:
        return self._noise.secret(self._replica.step)

    def _problem(self, answer: ClientAnswer) -> str | None:
        """The reason to refuse an answer for its weight."""
        if not self._rounds.local.fairness:
            return None
        told = f"it says that its loss was {answer.first_loss:.3g} before"
        if not answer.first_loss > 0:
            return told
        most = torch.finfo(self._parameters[0].dtype).max ** 0.5
        try:
            weights = self._fair(answer, 1.0, self._whole(answer))
        except ArithmeticError:
            return told
        largest = max(float(each.abs().max()) for each in answer.movement.values() if each.numel())
        return None if weights[0] > 0 and max(*weights, weights[0] * largest) < most else told

    def _fair(self, answer: ClientAnswer, share: float, movement: list[Tensor]) -> tuple[float, float]:
        """The weight of an answer, and its part of the divisor of all."""
        fairness = self._rounds.local.fairness
        if not fairness:
            return share / (1 + answer.age) ** 0.5, 0.0
        return fair_weights(share, answer.first_loss, movement, fairness, self._passes.own_rates)

    def _count(self, answers: list[ClientAnswer]) -> None:
        """Add the changes of control variates: c is their mean over the samples of all clients that have come."""
        before = float(self._samples.sum())
        for client, samples in self._remote.samples.items():
            self._samples[client] = samples
        now = float(self._samples.sum())
        for answer in answers:
            self._taken[answer.client] = self._replica.step
        if self._controls:
            if before and before != now:
                torch._foreach_mul_(list(self._controls.values()), before / now)
            for name, control in self._controls.items():
                parts = [each.movement[name] * (each.samples / now) for each in answers if name in each.movement]
                if parts:
                    control.add_(along_tree(len(parts), parts.__getitem__, torch.add))

    def _whole(self, answer: ClientAnswer) -> list[Tensor]:
        """A client's movement with zeros for parameters without gradients."""
        found = answer.movement
        return [
            found[name].to(p.device) if name in found else torch.zeros_like(p)
            for name, p in self._replica.trainable.items()
        ]

    def _log(self, answers: list[ClientAnswer]) -> None:
        tested = [(each.right, each.tested) for each in answers if each.tested]
        values = {"clients/answered": float(len(answers)), "clients/samples": float(sum(a.samples for a in answers))}
        values["clients/took_part"] = float((self._taken != NO_ROUND).sum())
        user_log().log(values | (spread(torch.tensor(tested).T) if tested else {}))


def _numbers(rounds: Tensor) -> dict[int, int]:
    """The rounds of clients that have one."""
    return {client: int(each) for client, each in enumerate(rounds.tolist()) if each != NO_ROUND}


def _digest(answers: list[ClientAnswer], movements: list[list[Tensor]]) -> str:
    """A text that tells answers to a round apart."""
    found = hashlib.blake2b(digest_size=16)
    for answer, movement in zip(answers, movements, strict=True):
        found.update(answer.client.to_bytes(8, "little"))
        for each in movement:
            found.update(each.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
    return found.hexdigest()


def _added_(left: list[Tensor], right: list[Tensor]) -> list[Tensor]:
    torch._foreach_add_(left, right)
    return left
