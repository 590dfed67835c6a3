"""`GradientReduction`: how a `DistributedOptimizer` reduces the gradients of some of its parameters.

`GradientArrivals` decides which gradients of a step are worth an exchange, and when. It performs nothing.

One exchange for each gradient would cost more than it hides: a thread needs a core for it, which the backward pass has.
So complete groups are gathered until they have enough bytes, the first time fewer, so that the links have something to
do early; without a spare core all wait for the end of the pass.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from polytempo.horovod.runtime.groups import CodecExchange, Kept
from polytempo.horovod.torch.collectives import (
    ReductionOp,
    allreduce_async_,
    encoded_allreduce_async,
    grouped_allreduce_async_,
    sparse_allreduce_async,
)
from polytempo.horovod.torch.compression import AnyCompression, CodecCompression, Compression
from polytempo.horovod.torch.handles import synchronize
from polytempo.horovod.torch.process_state import ProcessSet


class GradientReduction:
    """The reduction of gradients: arguments of `DistributedOptimizer`, by their names there."""

    def __init__(
        self,
        names: dict[Tensor, str],
        compression: AnyCompression,
        op: ReductionOp,
        predivide: float,
        sparse_as_dense: bool,
        process_set: ProcessSet,
    ) -> None:
        self.names, self.op = names, op
        self.codec = compression if isinstance(compression, CodecCompression) else None
        self.cast = Compression.none if isinstance(compression, CodecCompression) else compression
        self.factors = (1.0 / predivide, predivide)
        self.sparse_as_dense, self.process_set = sparse_as_dense, process_set
        self._exchanges: dict[str, CodecExchange] = {}
        """Exchanges by a codec, by name: each keeps the part of a gradient that is sent later."""

    def begin(self, group: Sequence[Tensor]) -> Callable[[], None]:
        """Submit the gradients of `group`; the returned function waits for them, and puts them in place."""
        made_dense: dict[Tensor, int] = {}
        for parameter in group:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            elif parameter.grad.is_sparse and self.sparse_as_dense:
                made_dense[parameter] = parameter.grad.sparse_dim()
                parameter.grad = parameter.grad.to_dense()
        sparse = [parameter for parameter in group if _gradient(parameter).is_sparse]
        if not sparse and not made_dense:
            return self._begin_dense(group)
        dense = [parameter for parameter in group if not _gradient(parameter).is_sparse]
        waits = [self._begin_sparse(parameter) for parameter in sparse]
        if dense:
            waits.append(self._begin_dense(dense))

        def wait() -> None:
            for each in waits:
                each()
            for parameter, dims in made_dense.items():
                parameter.grad = _gradient(parameter).to_sparse(dims)

        return wait

    def _begin_dense(self, group: Sequence[Tensor]) -> Callable[[], None]:
        if self.codec is not None:
            return self._begin_encoded(group, self.codec)
        pairs = [self.cast.compress(_gradient(parameter)) for parameter in group]
        sent = [pair[0] for pair in pairs]
        name, options = self.names[group[0]], (self.op, *self.factors, self.process_set)
        if len(sent) == 1:
            handle = allreduce_async_(sent[0], None, name, *options)
        else:
            handle = grouped_allreduce_async_(sent, None, f"group.{name}", *options)

        def wait() -> None:
            synchronize(handle)
            for parameter, tensor, (_, context) in zip(group, sent, pairs, strict=True):
                answer = self.cast.decompress(tensor, context)
                if answer is not parameter.grad:
                    _gradient(parameter).copy_(answer)

        return wait

    def _begin_encoded(self, group: Sequence[Tensor], by: CodecCompression) -> Callable[[], None]:
        name = self.names[group[0]]
        given, exchange = [_gradient(parameter) for parameter in group], self._exchange(name, by)
        options = (self.op, self.factors, self.process_set, exchange)
        handle = encoded_allreduce_async(given, f"encoded.{name}", *options, in_place=True)
        return partial(synchronize, handle)

    def reduced_loss(self, loss: Any) -> Tensor:
        """All ranks' losses as one, as their gradients are reduced."""
        own = torch.as_tensor(loss, dtype=torch.float64).detach().clone()
        synchronize(allreduce_async_(own, None, "closure.loss", self.op, process_set=self.process_set))
        return own

    def _exchange(self, name: str, by: CodecCompression) -> CodecExchange:
        if name not in self._exchanges:
            self._exchanges[name] = by.lasting()
        return self._exchanges[name]

    def kept(self) -> dict[str, Kept]:
        """A copy of the memory of this rank's exchanges by a codec."""
        return {name: exchange.kept() for name, exchange in self._exchanges.items()}

    def go_to(self, kept: Mapping[str, Kept]) -> None:
        """Remember this instead."""
        self._exchanges = {name: each for name, each in self._exchanges.items() if name in kept}
        for name, exchange in self._exchanges.items():
            exchange.go_to(kept[name])

    @property
    def steps(self) -> dict[str, int]:
        """The number of exchanges by a codec so far, by name; the same on all ranks that were there."""
        return {name: exchange.step for name, exchange in self._exchanges.items()}

    def count_from(self, steps: Mapping[str, int]) -> None:
        """Count exchanges as another rank does. The unsent part of this rank stays its own."""
        if self.codec is not None:
            for name, step in steps.items():
                self._exchange(name, self.codec).step = step

    def _begin_sparse(self, parameter: Tensor) -> Callable[[], None]:
        later = sparse_allreduce_async(_gradient(parameter), self.names[parameter], self.op, self.process_set)

        def wait() -> None:
            parameter.grad = later()

        return wait


def _gradient(parameter: Tensor) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad


_FIRST_BYTES, _NEXT_BYTES = 1 << 20, 25 << 20
"""The size of DistributedDataParallel's buckets."""


class GradientArrivals:
    """`groups`: for each group of parameters the bytes of each. `passes`: how many gradients each gets in a step."""

    def __init__(self, groups: Sequence[Sequence[int]], passes: int) -> None:
        self._sizes, self._bytes = [len(group) for group in groups], [sum(group) for group in groups]
        self._group_of = [number for number, group in enumerate(groups) for _ in group]
        self._passes = passes
        self._ready: list[int] = []
        self._complete: set[int] = set()
        self._taken: set[int] = set()
        self.begin(passes, overlaps=False)

    def begin(self, passes: int, *, overlaps: bool) -> None:
        """A step begins. `overlaps`: whether exchanges may begin before the backward pass is over."""
        self.count_anew(passes)
        self._ready, self._complete, self._taken = [], set(), set()
        self._ready_bytes, self._enough_bytes = 0, float(_FIRST_BYTES) if overlaps else float("inf")

    def count_anew(self, passes: int) -> None:
        """Each parameter gets so many gradients from here on. Groups that are complete stay so."""
        self._passes = passes
        self._counts, self._missing = [0] * len(self._group_of), list(self._sizes)

    def arrived(self, place: int) -> bool | None:
        """A gradient of the parameter at `place`, in the order of the groups. Whether it is time to `take`.

        None: it is one too many.
        """
        group, count = self._group_of[place], self._counts[place] + 1
        if count > self._passes or group in self._complete:
            return None
        self._counts[place] = count
        if count < self._passes:
            return False
        self._missing[group] -= 1
        if self._missing[group]:
            return False
        self._complete.add(group)
        self._ready.append(group)
        self._ready_bytes += self._bytes[group]
        return self._ready_bytes >= self._enough_bytes

    def take(self) -> list[int]:
        """The groups that are complete and have not been taken, in the order of their completion."""
        ready, self._ready, self._ready_bytes = self._ready, [], 0
        self._taken.update(ready)
        self._enough_bytes = max(self._enough_bytes, float(_NEXT_BYTES))
        return ready

    def take_rest(self) -> list[int]:
        """All groups that have not been taken: first the complete ones."""
        return self.take() + self._left()

    def _left(self) -> list[int]:
        left = [number for number in range(len(self._sizes)) if number not in self._taken]
        self._taken.update(left)
        self._complete.update(left)
        return left

    @property
    def under_way(self) -> bool:
        """True if some group is complete in this step."""
        return bool(self._complete)
