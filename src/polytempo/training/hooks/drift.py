"""Comparisons between ranks that promise equal models, as plain values; `drift_watch` exchanges them.

all that is comparable   [ parameter │ parameter │ its state │ parameter │ its state │ … ]     in the model's order
slices                   [ look 0 ][ look 1 ][ look 2 ] … and again: at most 64 looks a pass, one for up to 1 MiB
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from polytempo.spec.text.plain_values import written
from polytempo.training.checkpoint.fingerprint import fingerprint
from polytempo.training.step.replica import Replica

_MAX_SLICES = 64
_SLICE_BYTES = 2**20
_TENSOR_BYTES = 2**14
"""A tensor's cost beside its bytes, expressed in bytes."""
_ELEMENTS = 4096
"""Slices are cut at multiples of so many elements."""


class Compared(NamedTuple):
    """The parts of a replica that must be equal on all ranks."""

    optimizer: bool
    """True: also the optimizer's state and options."""


def compared(replica: Replica) -> Compared | None:
    """The parts that the strategy promises to be equal; None: no parts, or memory that exists once.

    If parameters are exchanged after the step, each rank's optimizer has seen its own gradients alone.
    """
    exchanges = replica.exchanges_gradients or replica.exchanges_parameters
    if not (replica.strategy.synchronized and exchanges):
        return None
    return Compared(optimizer=not replica.exchanges_parameters)


def comparable(replica: Replica, what: Compared) -> dict[str, Tensor]:
    """The tensors that must be equal on all ranks after a step, by description; without buffers."""
    found: dict[str, Tensor] = {}
    with replica.in_float32():
        parameters = {name: (p, p.detach()) for name, p in replica.model.named_parameters() if name not in replica.own}
    for name, (parameter, value) in parameters.items():
        found[f"parameter {name!r}"] = value
        state: dict[str, Any] = replica.optimizer.state.get(parameter, {}) if what.optimizer else {}
        for key in sorted(state, key=str):
            if isinstance(state[key], Tensor):
                found[f"state {key!r} of parameter {name!r}"] = state[key]
    return {name: tensor for name, tensor in found.items() if tensor.layout == torch.strided}


def settings(replica: Replica, what: Compared) -> dict[str, Any]:
    """The numbers that must be equal on all ranks after a step: options, and numbers in the optimizer's state."""
    found: dict[str, Any] = {}
    for i, group in enumerate(replica.optimizer.param_groups if what.optimizer else ()):
        for key, value in group.items():
            if key != "params":
                found[f"option {key!r} of parameter group {i}"] = written(value)
    for name, parameter in replica.model.named_parameters() if what.optimizer else ():
        for key, value in (replica.optimizer.state.get(parameter) or {}).items():
            if isinstance(value, bool | int | float | str):
                found[f"state {key!r} of parameter {name!r}"] = value
    return found


def settings_hash(values: Mapping[str, Any]) -> int:
    """A hash of settings, 0 to 2⁶⁴ - 1."""
    text = json.dumps(values, sort_keys=True).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")


class Walk:
    """Goes over tensors slice by slice. Ranks with tensors of equal shapes take equal slices."""

    def __init__(self) -> None:
        self._index, self._offset = 0, 0
        self.num_slices = 1

    def next(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """The next slice, as vectors. Tensors may change from look to look."""
        total = sum([tensor.nbytes + _TENSOR_BYTES for tensor in tensors])
        budget = max(_SLICE_BYTES, -(-total // (_MAX_SLICES - 1)))
        if total <= budget:
            self.num_slices = 1
            return list(tensors)
        self.num_slices = min(_MAX_SLICES, -(-total // budget) + 1)
        pieces: list[Tensor] = []
        if self._index >= len(tensors):
            self._index, self._offset = 0, 0
        while budget > 0 and self._index < len(tensors):
            flat = tensors[self._index].detach().reshape(-1)
            room = max(_ELEMENTS, budget // flat.element_size() // _ELEMENTS * _ELEMENTS)
            piece = flat[self._offset : self._offset + room]
            pieces.append(piece)
            budget -= piece.nbytes + _TENSOR_BYTES
            self._offset += room
            if self._offset >= flat.numel():
                self._index, self._offset = self._index + 1, 0
        return pieces


class DriftLook(NamedTuple):
    """One rank's message about itself: 64-bit integers, so that it is one small tensor."""

    steps: int
    fresh: int
    """1: it has made a step since it last said something."""
    tensors: int
    buffers: int
    settings: int
    num_slices: int
    every: int
    """Steps from look to look that keep its cost within bounds on this rank."""

    def tensor(self) -> Tensor:
        """The message as a tensor, shape (7,), int64."""
        return torch.tensor([n - 2**64 if n >= 2**63 else n for n in self], dtype=torch.int64)


def look_of(tensor: Tensor) -> DriftLook:
    """The message that `DriftLook.tensor` encoded."""
    return DriftLook(*[n % 2**64 for n in tensor.tolist()])


def looked(replica: Replica, what: Compared, pieces: Sequence[Tensor], *, buffers: bool) -> DriftLook:
    """This rank's look at these tensors, at its settings, and at those buffers that have met in this step."""
    met = list(replica.buffers.equal().values()) if buffers else []
    numbers = settings_hash(settings(replica, what))
    return DriftLook(replica.step, 1, fingerprint(pieces), fingerprint(met), numbers, 1, 1)


class DriftVerdict(NamedTuple):
    """The ranks that have drifted, and the others."""

    healthy: list[int]
    """More than half of the ranks, with equal looks; empty: there is no such majority."""
    others: list[int]
    """The other ranks; empty: all are alike."""


def judged(looks: Sequence[DriftLook]) -> DriftVerdict:
    """Compare all ranks' looks."""
    said = [look[:5] for look in looks]
    most, count = Counter(said).most_common(1)[0]
    if 2 * count <= len(said):
        return DriftVerdict([], list(range(len(said))))
    return DriftVerdict(
        [rank for rank, each in enumerate(said) if each == most],
        [rank for rank, each in enumerate(said) if each != most],
    )


def described(replica: Replica, what: Compared) -> dict[str, Any]:
    """All that is comparable, part by part, so that a difference can be named. Reads everything."""
    hashes = {name: f"{fingerprint([tensor]):016x}" for name, tensor in comparable(replica, what).items()}
    steps = {"the number of optimizer steps": replica.step}
    return {"step": replica.step, "parts": [steps, settings(replica, what), hashes]}


def difference(a: Mapping[str, Any], b: Mapping[str, Any]) -> str | None:
    """The first part that differs between two ranks' descriptions."""
    for mine, theirs in zip(a["parts"], b["parts"], strict=True):
        for name in [*mine, *(name for name in theirs if name not in mine)]:
            if mine.get(name) != theirs.get(name):
                return str(name)
    return None


def value_of(description: Mapping[str, Any], name: str) -> str:
    """The value of the part `name` in a rank's description."""
    for part in description["parts"]:
        if name in part:
            return str(part[name])
    return "nothing"
