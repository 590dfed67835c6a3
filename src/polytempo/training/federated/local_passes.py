"""`LocalPasses`: a client's training in a round, the same where a worker plays the client and where the client is one.

the round's model θ ──▶ E passes over the client's samples, by a new optimizer of the job ──▶ θₖ, and the steps' losses
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.optim import LBFGS, Optimizer

from polytempo.core.calls.refusals import refuse
from polytempo.core.strategy import LocalTraining
from polytempo.federated.clients import Client
from polytempo.federated.privacy import noise_source
from polytempo.spec.job_calls import model_of, move_model, moved_numbers, optimizer_of, schedule_of
from polytempo.spec.objective import loss_of
from polytempo.spec.rates.plateau import Plateau
from polytempo.spec.run_spec import RunSpec
from polytempo.spec.text.plain_values import typed
from polytempo.training.federated.sample_gradients import SampleGradients
from polytempo.training.model.randomness import kept_random_states, seed_step
from polytempo.training.model.run_device import beside

Check = Callable[[Tensor], None]
_LEAST_LOSS = 1e-10


class ClientTurn(NamedTuple):
    """A client's training in a round."""

    movement: list[Tensor]
    """θ - θₖ."""
    losses: list[Tensor]
    """Losses of its steps."""
    used: list[int]
    """Places of the parameters that had a gradient."""
    first_loss: float
    """The loss of the round's model on its samples, where the strategy weighs by it; else 0."""
    changes: dict[str, Tensor]
    """(θ - θₖ) / (τₖ ηₖ) - c, less cₖ: the change of its control variate, by `CONTROL` and the parameter's name."""
    state: dict[str, Tensor]
    """The tensors that it keeps until its next round: its control variate, or its part of the model."""


class _Buffer(NamedTuple):
    """A buffer before a client's training."""

    tensor: Tensor
    version: int
    values: Tensor

    def differs(self, now: Tensor) -> bool:
        if now is self.tensor and now._version == self.version:
            return False
        return now.dtype != self.values.dtype or not torch.equal(now, self.values)


class LocalPasses:
    """A model of the job, for one client after the other."""

    def __init__(self, spec: RunSpec, local: LocalTraining, device: torch.device, names: Sequence[str] = ()) -> None:
        """`names`: the parameters that travel (none: all that require a gradient and that no client keeps)."""
        self._spec, self._job, self._seed, self._local = spec, spec.job, spec.seed, local
        with kept_random_states():
            self.model = model_of(spec.job)
        move_model(self.model, device)
        kept = local.kept(self.model)
        self.names = tuple(names) or tuple(
            name for name, each in self.model.named_parameters() if each.requires_grad and name not in kept
        )
        """Names of the parameters that travel."""
        self.own = [self.model.get_parameter(name) for name in self.names]
        tensors = {**dict(self.model.named_parameters()), **dict(self.model.named_buffers())}
        self.others = {name: each for name, each in tensors.items() if name not in self.names}
        """Frozen parameters, kept ones and buffers."""
        self.kept = {name: tensors[name] for name in sorted(kept)}
        self._head = [each for each in self.kept.values() if each.requires_grad]
        self._rates = optimizer_of(spec.job, self.model, spec.lr)
        """Has the numbers of the round, by the job's schedule."""
        self._schedule = schedule_of(spec.job, self._rates, 1)
        if isinstance(self._schedule, Plateau):
            refuse({"plateau", "client rounds"}, strategy=spec.strategy)
        if isinstance(self._rates, LBFGS):
            refuse({"rounds", "closures"}, strategy=spec.strategy, optimizer=type(self._rates).__name__)
        self._past_rates = deque[list[float]](maxlen=1 if local.buffering is None else max(1, local.buffering.oldest))
        """The `rates` of the rounds before, the last one's at the end."""
        spec.strategy.fit(spec.strategy, self._rates)
        privacy = spec.strategy.sample_privacy
        self.noise_seed = spec.seed
        """The seed of private samples' noise: a client of its own machine has a secret for each turn."""
        self._private = None if privacy is None else SampleGradients(spec.job, self.model, privacy, str(spec.strategy))

    def follow(self, step: int) -> None:
        """The numbers that a schedule moves are a round's from now on; `step` never falls."""
        while self._schedule is not None and self._schedule.last_epoch < step:
            self._past_rates.append(self.rates)
            self._rates.step()  # without gradients: a schedule warns where its optimizer has made no step
            self._schedule.step()

    @property
    def rates(self) -> list[float]:
        """The numbers of a client's parameter groups in the round: learning rates, and momentum or betas."""
        return [
            float(each) for group in moved_numbers(self._rates) for value in group.values() for each in _parts(value)
        ]

    def rates_of(self, step: int) -> list[float]:
        """The `rates` of an earlier round, or of this one."""
        age = 0 if self._schedule is None else self._schedule.last_epoch - step
        return self._past_rates[-age] if age else self.rates

    @property
    def own_rates(self) -> list[float]:
        """η of each parameter that travels; 0 for a parameter outside the optimizer."""
        found = _rates_of(self._rates)
        return [found.get(id(each), 0.0) for each in self.own]

    def turn(
        self,
        client: Client,
        step: int,
        received: Sequence[Tensor],
        others: Mapping[str, Tensor],
        controls: Mapping[str, Tensor],
        state: Mapping[str, Tensor],
        rates: Sequence[float] | None = None,
        check: Check | None = None,
    ) -> ClientTurn:
        """A client's part of round `step`, from the model of `received` and `others`.

        `controls`: the server's control variate, empty without one. `state`: the tensors that the client keeps, empty
        before its first round. `rates`, `check`: as of `begun` and `trained`.
        """
        optimizer = self.begun(received, {**others, **(state if self.kept else {})}, rates)
        first_loss = self.loss_of_all(client, step) if self._local.fairness else 0.0
        correction = [server - state[name] if state else server for name, server in controls.items()]
        losses = self.trained(client, optimizer, step, received, correction, check)
        used = [i for i, parameter in enumerate(self.own) if parameter.grad is not None]
        movement = self.movement(received)
        found, steps = _rates_of(optimizer), len(losses)
        moved = zip(controls.items(), movement, self.own, strict=False)
        changes = {
            name: each / (steps * rate) - server if (rate := found.get(id(own), 0.0)) else torch.zeros_like(server)
            for (name, server), each, own in moved
        }
        new = {name: tensor.detach().clone() for name, tensor in self.kept.items()}
        new |= {name: state[name] + each if state else each.clone() for name, each in changes.items()}
        return ClientTurn(movement, losses, used, first_loss, changes, new)

    def begun(
        self, received: Sequence[Tensor], others: Mapping[str, Tensor], rates: Sequence[float] | None = None
    ) -> Optimizer:
        """A new optimizer of the model, which is the round's now; `others` are its tensors that do not travel.

        `rates`: the round's, where another process has followed the schedule.
        """
        with torch.no_grad():
            torch._foreach_copy_(list[Tensor](self.own), list(received))
            for name, mine in self.others.items():
                mine.copy_(others[name])
        optimizer = optimizer_of(self._job, self.model, self._spec.lr)
        own = self.rates
        if rates is not None and len(rates) != len(own):
            raise ValueError(
                f"the server's optimizer has {len(rates)} numbers (rates, momentum, betas), and {self._job.name}'s has "
                f"{len(own)}; let both have the same job"
            )
        left = iter(own if rates is None else rates)
        for group, numbers in zip(optimizer.param_groups, moved_numbers(optimizer), strict=True):
            for key, value in numbers.items():
                found = [next(left) for _ in _parts(value)]
                group[key] = typed(found if isinstance(value, list) else found[0], group[key])
        return optimizer

    def trained(
        self,
        client: Client,
        optimizer: Optimizer,
        step: int,
        received: Sequence[Tensor],
        correction: Sequence[Tensor] = (),
        check: Check | None = None,
    ) -> list[Tensor]:
        """Train the client's model in round `step`; the losses of its steps. `check` sees each before its gradients.

        Buffers that no client keeps must have their values again after the first step and at the end. Cost: a copy.
        """
        seed_step(self._seed, client.number, step, "client's training")
        local, losses, buffers = self._local, list[Tensor](), self._buffers()
        for epoch in range(local.head_epochs + local.epochs):
            if local.head_epochs:
                for each in self._head:
                    each.requires_grad_(epoch < local.head_epochs)
                for parameter in self.own:
                    parameter.requires_grad_(epoch >= local.head_epochs)
            order = _order(len(client), (self._seed, step, client.number, epoch))
            for batch in client.batches(local.batch_size, order):
                optimizer.zero_grad()
                loss = self._descent(beside(self.model, batch), (client.number, step, len(losses)), check)
                if local.proximal:
                    self._pull(local.proximal, received)
                for parameter, more in zip(self.own, correction, strict=False):
                    parameter.grad = more.clone() if parameter.grad is None else parameter.grad.add_(more)
                optimizer.step()
                losses.append(loss.detach())
                if len(losses) == 1:
                    self._check_buffers(buffers)
        self._check_buffers(buffers)
        return losses

    def _buffers(self) -> dict[str, _Buffer]:
        """The buffers that no client keeps."""
        found = ((name, each) for name, each in self.model.named_buffers() if name not in self.kept)
        return {name: _Buffer(each, each._version, each.detach().clone()) for name, each in found}

    def _check_buffers(self, begun: Mapping[str, _Buffer]) -> None:
        """Refuse a buffer that has other values than in `begun`. Cost: a comparison for each written buffer."""
        for name, each in self.model.named_buffers():
            if name not in self.kept and (name not in begun or begun[name].differs(each)):
                refuse({"rounds", "changing buffer"}, strategy=self._spec.strategy, name=name)

    def _descent(self, batch: Any, place: tuple[int, int, int], check: Check | None) -> Tensor:
        """Leave a batch's gradient in `.grad`, and return its loss. `place`: client, round and step."""
        if self._private is not None:
            client, step, number = place
            loss = self._private.compute(batch, noise_source(self.noise_seed, client, step, number))
            if check is not None:
                check(loss)
            return loss
        loss = loss_of(self._job, self.model, batch)
        if check is not None:
            check(loss)
        loss.backward()
        return loss

    def movement(self, received: Sequence[Tensor]) -> list[Tensor]:
        """θ - θₖ."""
        return list(torch._foreach_sub(list(received), [parameter.detach() for parameter in self.own]))

    def _pull(self, mu: float, received: Sequence[Tensor]) -> None:
        """Add μ (θₖ - θ) to the gradients."""
        for parameter, first in zip(self.own, received, strict=True):
            if parameter.grad is not None:
                parameter.grad.add_(parameter.detach() - first, alpha=mu)

    @torch.no_grad()
    def loss_of_all(self, client: Client, step: int) -> float:
        """The mean loss of the round's model on the client's samples."""
        seed_step(self._seed, client.number, step, "client's loss")
        modes = [(module, module.training) for module in self.model.modules()]
        self.model.eval()
        total, every = 0.0, torch.arange(len(client))
        for chosen in every.split(self._local.batch_size or len(every)):
            [batch] = client.batches(None, chosen)
            total += len(chosen) * float(loss_of(self._job, self.model, beside(self.model, batch)))
        for module, training in modes:
            module.training = training
        return max(total / len(client), _LEAST_LOSS)


def _order(count: int, key: tuple[int, ...]) -> Tensor:
    """A permutation of a client's samples, drawn from the run's seed, the round, the client and the local epoch."""
    return torch.from_numpy(np.random.default_rng(key).permutation(count))


def _parts(value: float | list[float]) -> list[float]:
    return value if isinstance(value, list) else [value]


def _rates_of(optimizer: Optimizer) -> dict[int, float]:
    return {id(p): float(group["lr"]) for group in optimizer.param_groups for p in group["params"]}
