"""`ParameterVersions`: the versions of a stage's parameters that passes under way still use.

    version 0   memory A   F0 F1 F2 …        passes of batches that began with it; their backward passes need A
    update      copied to B, and updated there
    version 1   memory B   F3 …
    update      A is free again once the last backward pass of version 0 is over

The parameters stay the same objects. Only their memory changes: autograd has kept tensors of the old memory (`_kept`),
so a late backward pass computes with its own version.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from polytempo.training.pipeline.late.late_stage import LateStage

Keep = Callable[[Tensor], Tensor]


def as_it_is(tensor: Tensor) -> Tensor:
    """The tensor."""
    return tensor


class ParameterVersions:
    """Counts which versions are in use. Version v is the parameters after v updates.

    `stashes`: whether passes keep their version; otherwise there is one, and a late backward pass sees the present one.
    `overtaken`: whether updates come between a forward pass and its backward pass. `late`: the correction that then
    replaces the present parameters in a pass.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        *,
        stashes: bool,
        overtaken: bool = True,
        late: LateStage | None = None,
    ) -> None:
        self._parameters, self.stashes, self.overtaken, self._late = list(parameters), stashes, overtaken, late
        self.current = 0
        self.oldest: float = math.inf
        """The first version that a later pass begins with, where that may be an old one."""
        self._memory: dict[int, list[Tensor]] = {0: self._present()}
        self._uses: Counter[int] = Counter()
        """Forward passes that still wait for their backward pass, by version."""
        self._free: list[list[Tensor]] = []

    def _present(self) -> list[Tensor]:
        return [parameter.detach() for parameter in self._parameters]

    @contextmanager
    def forward(self, version: int, keep: Keep = as_it_is) -> Iterator[None]:
        """Inside, the parameters have the values of `version`, which stays until as many `done` as there were passes.

        Other tensors that autograd keeps go through `keep`.
        """
        self.begun(version)
        predicted = None if self._late is None else self._late.for_forward()
        if predicted is None:
            with self.seen(version, keep):
                yield
            return
        self._lie_in([value.to(p.dtype) for value, p in zip(predicted, self._parameters, strict=True)])
        try:
            with self._kept(keep, self._memory[self.current]):
                yield
        finally:
            self._lie_in(self._memory[self.current])

    @contextmanager
    def backward(self) -> Iterator[None]:
        """Inside, graphs that keep the present parameters multiply by the correction's values."""
        values = None if self._late is None else self._late.for_backward()
        if values is None:
            yield
            return
        memory = self._memory[self.current]
        before = [tensor.clone() for tensor in memory]
        torch._foreach_copy_(memory, values)
        try:
            yield
        finally:
            torch._foreach_copy_(memory, before)

    @contextmanager
    def seen(self, version: int, keep: Keep = as_it_is) -> Iterator[None]:
        """Inside, the parameters have the values of `version`, and autograd keeps these."""
        if not self.stashes or version == self.current:
            with self._kept(keep):
                yield
            return
        self._lie_in(self._memory[version])
        try:
            with self._kept(keep):
                yield
        finally:
            self._lie_in(self._memory[self.current])

    def begun(self, version: int) -> None:
        """A forward pass has `version`, which stays until as many `done` as there were passes."""
        self._uses[version] += 1

    def done(self, version: int) -> None:
        """The backward pass of a forward pass with `version` is over."""
        self._uses[version] -= 1
        if not self._uses[version]:
            del self._uses[version]
        self.forget()

    def update_begins(self) -> None:
        """Call before `optimizer.step`: if the present version is still needed, the next one gets other memory.

        Cost: a copy of the parameters, unless no pass uses the present version. Memory: as many versions as are in use.
        """
        if self.stashes and (self.current in self._uses or self.oldest <= self.current):
            into = self._free.pop() if self._free else [torch.empty_like(p) for p in self._memory[self.current]]
            torch._foreach_copy_(into, self._memory[self.current])
            self._lie_in(into)
            self._memory[self.current + 1] = into
        else:
            self._memory[self.current + 1] = self._memory.pop(self.current)
        self.current += 1

    def forget(self) -> None:
        """Let go of versions that no pass uses, now or later."""
        first = min(self.oldest, self.current)
        for version in [v for v in self._memory if v < first and v not in self._uses]:
            self._free.append(self._memory.pop(version))

    @property
    def num_versions(self) -> int:
        """The number of held versions, the present one included."""
        return len(self._memory)

    def older(self) -> dict[int, list[Tensor]]:
        """The held versions but for the present one."""
        return {version: memory for version, memory in self._memory.items() if version != self.current}

    def restore(self, current: int, older: Mapping[int, list[Tensor]]) -> None:
        """The present parameters are version `current`; no pass uses any version yet."""
        self.current = current
        self._memory = {**older, current: self._present()}
        self._uses.clear()
        self._free.clear()

    def _lie_in(self, memory: list[Tensor]) -> None:
        for parameter, tensor in zip(self._parameters, memory, strict=True):
            parameter.data = tensor

    @contextmanager
    def _kept(self, keep: Keep, instead: Sequence[Tensor] | None = None) -> Iterator[None]:
        """Inside, autograd keeps a parameter's memory, without the check that an update has not written to it.

        `instead`: other memory, which the backward pass is to multiply by.
        """
        if not self.overtaken and keep is as_it_is:
            yield
            return
        own = {p.untyped_storage().data_ptr(): place for place, p in enumerate(self._parameters) if p.numel()}

        def pack(tensor: Tensor) -> Tensor:
            place = own.get(tensor.untyped_storage().data_ptr())
            if place is None:
                return keep(tensor)
            if instead is None:
                return tensor.detach()
            other = instead[place]
            offset = tensor.storage_offset() - self._parameters[place].storage_offset() + other.storage_offset()
            return other.as_strided(tensor.size(), tensor.stride(), offset)

        with torch.autograd.graph.saved_tensors_hooks(pack, as_it_is):
            yield
