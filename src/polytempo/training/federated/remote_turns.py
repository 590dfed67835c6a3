"""`RemoteTurns`: a round's movements come from clients of other processes, and are merged as simulated ones are."""

from __future__ import annotations

import torch
from torch import Tensor

from polytempo.core import Port
from polytempo.core.arithmetic.slice_tree import along_tree
from polytempo.federated.client_tests import spread
from polytempo.spec.run_spec import RunSpec
from polytempo.training.federated.client_movements import merged_
from polytempo.training.federated.local_passes import LocalPasses
from polytempo.training.federated.remote_rounds import ClientAnswer, RemoteData
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
        self._rounds, self._remote = spec.strategy.rounds, spec.job.data.rounds
        self._passes = LocalPasses(spec, self._rounds.local, self._parameters[0].device, tuple(replica.trainable))
        self._movements: dict[int, list[Tensor]] = {}

    async def meet(self, port: Port) -> None:
        """Merge the movements, where the strategy merges them."""
        if self._rounds.merge is not None:
            trainable, number = self._replica.trainable, len(self._movements)
            await merged_(port, trainable, self._movements, number, self._rounds.merge)

    def compute(self, slices: list[BatchSlice], rank: int) -> Tensor:
        """The clients' mean loss over their local steps. Cost: a message with the model to each client and back."""
        replica, step = self._replica, self._replica.step
        self._passes.follow(step)
        answers = self._remote.performed(step, tensors_of(replica.model), self._passes.rates)
        samples = torch.tensor([each.samples for each in answers], dtype=torch.float64)
        shares = [float(each) for each in self._rounds.shares(samples, self._rounds.local)]
        movements = [self._whole(each) for each in answers]
        self._movements = dict(enumerate(movements)) if self._rounds.merge is not None else {}

        def weighed(place: int) -> list[Tensor]:
            return list(torch._foreach_mul(movements[place], shares[place]))

        total = along_tree(len(answers), weighed, _added_)
        used = {name for each in answers for name in each.movement}
        for (name, parameter), each in zip(replica.trainable.items(), total, strict=True):
            parameter.grad = each if name in used else None
        self._log(answers)
        zero, whole = torch.zeros((), device=self._parameters[0].device), sum(shares)
        losses = zip(answers, shares, strict=True)
        return sum((torch.tensor(each.loss) * (share / whole) for each, share in losses), zero)

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
        user_log().log(values | (spread(torch.tensor(tested).T) if tested else {}))


def _added_(left: list[Tensor], right: list[Tensor]) -> list[Tensor]:
    torch._foreach_add_(left, right)
    return left
