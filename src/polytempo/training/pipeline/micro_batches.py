"""`MicroBatches`: a batch in the parts that go through a pipeline one after the other."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from polytempo.partition.cut import Cut, Layout
from polytempo.partition.schedules.action import Schedule
from polytempo.spec.loss_divisor import divisor_of, weights
from polytempo.training.model.randomness import seed_step
from polytempo.training.pipeline.stage_program import MicroBatch


class MicroBatches:
    """Cuts batches along their first dimension, the samples', into parts as equal as can be.

    The loss of a part counts by its divisor (`spec.loss_divisor`), so the sum over parts is the batch's. A loss without
    a known divisor counts as a mean over samples, and a UserWarning says so if the first two micro-batches have another
    one together. Dropout draws from a seed of its own in every part of the model, for every micro-batch, step and
    replica.
    """

    def __init__(
        self,
        cut: Cut,
        schedule: Schedule,
        loss: Callable[[Any, Any], Tensor],
        seed: int,
        replica: int,
        flops_per_sample: float = 0.0,
    ) -> None:
        self._cut, self._count, self._loss, self._divisor = cut, schedule.micro_batches, loss, divisor_of(loss)
        self._first: tuple[Any, Any, Tensor] | None = None
        """Output, target and loss of the first micro-batch, until the second one is compared with it."""
        self._compares = self._divisor is None
        self._seed, self._replica, self._flops = seed, replica, flops_per_sample
        self._layouts: dict[tuple[Any, ...], dict[str, Layout]] = {}

    def of(self, inputs: Sequence[Any], target: Any, step: int) -> list[MicroBatch]:
        """The micro-batches of one batch; fewer than the schedule has where there are fewer samples.

        Errors: ValueError where the tensors of a batch have different numbers of samples, or none.
        """
        leaves, structure = tree_flatten((tuple(inputs), target))
        lengths = {len(leaf) for leaf in leaves if isinstance(leaf, Tensor) and leaf.dim()}
        if len(lengths) != 1 or 0 in lengths:
            raise ValueError(
                "a pipeline cuts a batch into micro-batches along the first dimension of its tensors, the samples', "
                f"which is equally long in all of them; got the lengths {sorted(lengths)}"
            )
        [samples] = lengths
        count = min(self._count, samples)
        pieces = [leaf.tensor_split(count) if _is_cut(leaf) else [leaf] * count for leaf in leaves]
        sizes = [samples // count + (number < samples % count) for number in range(count)]  # as `tensor_split` has them
        layouts: dict[int, dict[str, Layout]] = {}
        found = []
        each = [tree_unflatten([piece[number] for piece in pieces], structure) for number in range(count)]
        whole = self._divisor is not None and self._divisor.of_batch
        shares = self._shares([((*own, target) if whole else target) for own, target in each], sizes)
        for number, (own, (inputs_of_it, target_of_it)) in enumerate(zip(sizes, each, strict=True)):
            if own not in layouts:
                layouts[own] = self._layouts_of(inputs_of_it)
            head = self._head(target_of_it, number, shares, sizes)
            seeded, flops = self.seeded(step, number), self._flops * own
            found.append(MicroBatch(inputs_of_it, layouts[own], head, seeded, flops, target_of_it))
        return found

    def _shares(self, targets: Sequence[Any], sizes: Sequence[int]) -> Callable[[], list[float]]:
        """The parts of the micro-batches in the batch's loss, worked out where they are first needed."""
        if self._divisor is not None:
            return cache(partial(weights, self._divisor, targets))
        return lambda: [own / sum(sizes) for own in sizes]

    def _head(
        self, target: Any, number: int, shares: Callable[[], list[float]], sizes: Sequence[int]
    ) -> Callable[[Any], Tensor]:

        def head(output: Any) -> Tensor:
            share = shares()[number]
            if not share:  # a mean of nothing is NaN, and times 0 still is
                leaves = [leaf for leaf in tree_flatten(output)[0] if isinstance(leaf, Tensor)]
                return torch.zeros((), device=leaves[0].device)
            loss = self._loss(output, target)
            if self._compares and len(sizes) > 1 and _of_samples((output, target), sizes[number]):
                self._compare(output, target, loss.detach(), sizes, number)
            return loss if share == 1 else loss * share

        return head

    def _compare(self, output: Any, target: Any, loss: Tensor, sizes: Sequence[int], number: int) -> None:
        """Warn, once, where the first two micro-batches have another loss together than the mean of theirs."""
        if number == 0:
            self._first = (tree_map(Tensor.detach, output), target, loss)
        elif self._first is not None:
            (before, its_target, its_loss), self._first, self._compares = self._first, None, False
            expected = (its_loss * sizes[0] + loss * sizes[1]) / (sizes[0] + sizes[1])
            with torch.no_grad():
                found = self._loss(tree_map(_joined, before, output), tree_map(_joined, its_target, target))
            if not torch.isclose(found, expected, rtol=torch.finfo(loss.dtype).eps ** 0.5, equal_nan=True):
                warnings.warn(
                    f"the loss of the first two micro-batches together is {float(found):g}, and the mean of theirs, by "
                    f"samples, is {float(expected):g}: it is not a mean over samples, so a pipeline descends another "
                    "loss than one process; name its divisor: pt.divided_by(loss, lambda target: …)",
                    stacklevel=2,
                )

    def seeded(self, step: int, number: int) -> Callable[[int], None]:
        """A function that sets the random state of micro-batch `number` of `step` at a part of the model."""
        return partial(self._seed_part, step, f"micro-batch {number} of a pipeline, part ")

    def _layouts_of(self, inputs: tuple[Any, ...]) -> dict[str, Layout]:
        key = tuple((tuple(x.shape), x.dtype) if isinstance(x, Tensor) else repr(x) for x in tree_flatten(inputs)[0])
        if key not in self._layouts:
            self._layouts[key] = self._cut.layouts(*inputs)
        return self._layouts[key]

    def _seed_part(self, step: int, purpose: str, part: int) -> None:
        seed_step(self._seed, self._replica, step, f"{purpose}{part}")


def _is_cut(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.dim() > 0


def _of_samples(values: Any, samples: int) -> bool:
    """True if all are tensors with a row for each sample, so that two micro-batches can be joined."""
    return all(_is_cut(leaf) and len(leaf) == samples for leaf in tree_flatten(values)[0])


def _joined(first: Tensor, second: Tensor) -> Tensor:
    return torch.cat([first, second])
