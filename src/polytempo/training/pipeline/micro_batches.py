"""`MicroBatches`: a batch in the parts that go through a pipeline one after the other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from polytempo.partition.cut import Cut, Layout
from polytempo.partition.schedules.action import Schedule
from polytempo.training.pipeline.stage_program import MicroBatch
from polytempo.training.randomness import seed_step


class MicroBatches:
    """Cuts batches along their first dimension, which is that of samples, into parts as equal as can be.

    The loss of a part counts by its samples, so the sum over parts is the batch's mean. Dropout draws from a seed of
    its own in every part of the model, for every micro-batch, step and replica.
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
        self._cut, self._count, self._loss = cut, schedule.micro_batches, loss
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
                "a pipeline cuts a batch into micro-batches along the first dimension of its tensors, which has to be "
                f"that of samples, as long in all of them; got the lengths {sorted(lengths)}"
            )
        [samples] = lengths
        count = min(self._count, samples)
        pieces = [leaf.tensor_split(count) if _is_cut(leaf) else [leaf] * count for leaf in leaves]
        sizes = [samples // count + (number < samples % count) for number in range(count)]  # as `tensor_split` has them
        layouts: dict[int, dict[str, Layout]] = {}
        found = []
        for number, own in enumerate(sizes):
            inputs_of_it, target_of_it = tree_unflatten([piece[number] for piece in pieces], structure)
            if own not in layouts:
                layouts[own] = self._layouts_of(inputs_of_it)
            head = self._head(target_of_it, own, samples)
            seeded, flops = self.seeded(step, number), self._flops * own
            found.append(MicroBatch(inputs_of_it, layouts[own], head, seeded, flops, target_of_it))
        return found

    def _head(self, target: Any, own: int, samples: int) -> Callable[[Any], Tensor]:
        """The loss of `own` of a batch's samples, as their part of the batch's mean."""

        def head(output: Any) -> Tensor:
            loss = self._loss(output, target)
            return loss * (own / samples) if own < samples else loss

        return head

    def seeded(self, step: int, number: int) -> Callable[[int], None]:
        """Sets the random state with which micro-batch `number` of `step` enters a part of the model."""
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
