"""`Shares`: the shares of the global batch by batches, where a loader takes batches before their turn.

yielded    b0 b1 b2 b3        a look-ahead of one: b3 is taken before the step on b2
forward          ^ b2         recognised by its tensors; by their shapes, where the loop has moved them elsewhere
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple, Protocol
from weakref import ReferenceType, ref

import torch
from torch import Tensor

_MOST_AHEAD = 64
_DEEPEST = 4


class LoopWatch(Protocol):
    """Ends a loop's batches before the end of an epoch."""

    def ends(self, shard: Any, /) -> bool:
        """True if no further batch of this shard is to be trained on."""


class CommittedLoop(Protocol):
    """A loop that goes on from commits in groups of workers."""

    callbacks: str
    """The states of its callbacks at the last commit; "": none yet."""
    goes_on: bool
    """True if an earlier group of workers has begun it."""


class StepListener(Protocol):
    """Hears of the steps of a loop's own, to deal its batches."""

    def after_step(self, replica: Any, ports: Any, /) -> None:
        """A replica has finished a step, on all ranks of `ports`."""


class FollowingLoop(Protocol):
    """A loop that may have to train on samples once more."""

    def rewound(self, shard: Any, /) -> bool:
        """True if the position of this shard has just been set."""


class Batch(NamedTuple):
    """A batch that was yielded: its share, its tensors as far as they live, and their shapes."""

    share: float | None
    tensors: list[ReferenceType[Tensor]]
    shapes: frozenset[torch.Size]
    ranks: tuple[int, ...]
    """The ranks that are dealt batches of their own by this pass."""
    weight: float | None = None
    """The batch's weight, where the loop names one; `share` is then unknown."""


class Pass:
    """The last batches of one pass over a data set, oldest first; the oldest is a used batch, or the first."""

    def __init__(self, ranks: tuple[int, ...] = ()) -> None:
        self.ranks = ranks
        self.share: float | None = None
        """The share of the last batch."""
        self.ended = False
        self.weighs = False
        """True if its batches have weights of their own."""
        self._batches: deque[Batch] = deque(maxlen=_MOST_AHEAD)
        self._used = 0
        """Remembered batches, from the oldest on, that a forward pass has seen."""

    def give(self, batch: Any, share: float | None, weight: float | None = None) -> None:
        """Remember a batch that is going to be yielded."""
        while self._used > 1:
            self._batches.popleft()
            self._used -= 1
        tensors = list(tensors_in(batch))
        shapes = frozenset(tensor.shape for tensor in tensors if tensor.dim())
        self._batches.append(Batch(share, [ref(tensor) for tensor in tensors], shapes, self.ranks, weight))
        self.share, self.weighs = share, weight is not None

    @property
    def last(self) -> Batch | None:
        """The batch that was yielded last."""
        return self._batches[-1] if self._batches else None

    def with_one_of(self, ids: set[int]) -> Batch | None:
        """The batch that has one of these tensors."""
        for position, batch in enumerate(self._batches):
            if any(id(tensor) in ids for tensor in (each() for each in batch.tensors) if tensor is not None):
                self._used = max(self._used, position + 1)
                return batch
        return None

    def shaped(self, shapes: set[torch.Size]) -> Batch | None:
        """The oldest unused batch with a tensor so shaped."""
        for position, batch in enumerate(self._batches):
            if position >= self._used and shapes & batch.shapes:
                self._used = position + 1
                return batch
        return None


class EpochSource(Protocol):
    """A loop that gets the batches of one `DataShard` by tickets; `pt.shard` asks it as long as it is attached."""

    def takes(self, shard: Any) -> bool:
        """True if this shard's next epoch is dealt by tickets."""

    def epoch(self, shard: Any) -> Iterator[Any]:
        """This rank's batches until the epoch is done."""

    def is_within(self, shard: Any) -> bool:
        """True while an epoch of `shard` is under way."""


class Shares:
    """The shares of the last batches of the passes that go on: an epoch, and a validation in it."""

    def __init__(self) -> None:
        self._passes: list[Pass] = []
        """The newest first."""
        self.last: float | None = None
        """The share of the last batch; None: equal parts."""

    @property
    def weighs(self) -> bool:
        """True while a pass with weights of batches is remembered; on all ranks alike."""
        return any(each.weighs for each in self._passes)

    def begin(self, ranks: tuple[int, ...] = ()) -> Pass:
        """A new pass over a data set, dealt to `ranks`: the batches of ended passes are forgotten."""
        begun = Pass(ranks)
        self._passes = [begun, *[each for each in self._passes if not each.ended]]
        return begun

    def give(self, going: Pass, batch: Any, share: float | None, weight: float | None = None) -> None:
        """Remember a batch that this pass is going to yield."""
        going.give(batch, share, weight)
        self.last = share

    def end(self, over: Pass) -> None:
        """End a pass, though its last batches may be used yet. The pass around it goes on."""
        over.ended = True
        self.last = next((each.share for each in self._passes if not each.ended), None)

    def of(self, *inputs: Any) -> Batch | None:
        """The batch of a model's inputs: with these tensors, or the oldest unused one with tensors of these shapes.

        Shapes are first looked for in passes that go on.
        """
        if not self._passes:
            return None
        tensors = list(tensors_in(inputs))
        ids = {id(tensor) for tensor in tensors}
        shapes = {tensor.shape for tensor in tensors if tensor.dim()}
        found = next((batch for each in self._passes if (batch := each.with_one_of(ids)) is not None), None)
        if found is None:
            going_on_first = sorted(self._passes, key=lambda each: each.ended)
            found = next((batch for each in going_on_first if (batch := each.shaped(shapes)) is not None), None)
        return found

    def given(self, *inputs: Any) -> Batch | None:
        """The batch of `of`; where nothing is recognised, `newest`."""
        return self.of(*inputs) or self.newest

    @property
    def newest(self) -> Batch | None:
        """The last batch of a pass that goes on."""
        return next((each.last for each in self._passes if not each.ended), None)


def tensors_in(tree: Any, depth: int = 0) -> Iterator[Tensor]:
    """The tensors in tuples, lists and mappings, to a depth of four."""
    if isinstance(tree, Tensor):
        yield tree
    elif depth < _DEEPEST:
        values = tree.values() if isinstance(tree, Mapping) else tree if isinstance(tree, tuple | list) else ()
        for value in values:
            yield from tensors_in(value, depth + 1)
