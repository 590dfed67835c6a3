"""`StepPlan`: steps of an optimizer on one copy of the weights. The Python interface of `native/step.cpp`."""

from __future__ import annotations

import ctypes
import math
import weakref
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from polytempo.native.call import DTYPES
from polytempo.native.common import Common, gathered_numbers, layout, shaped_like
from polytempo.native.group import Group

RULES = {"sgd": 0, "adam": 1, "adamw": 2, "adagrad": 3}

_pointer, _i64, _i32, _f64 = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32, ctypes.c_double


class Hyper(ctypes.Structure):
    """An optimizer's hyper-parameters: see `native/kernels.h`."""

    _fields_ = (
        *((name, _f64) for name in ("lr", "weight_decay", "momentum", "dampening", "beta1", "beta2", "eps")),
        ("lr_decay", _f64),
        ("step", _i64),
        *((name, _i32) for name in ("rule", "nesterov", "maximize", "first")),
    )


class _Tensor(ctypes.Structure):
    _fields_ = (*((name, _i64) for name in ("offset", "gradient", "count", "width")), ("dtype", _i32), ("group", _i32))


class _Place(ctypes.Structure):
    _fields_ = (
        ("tensors", ctypes.POINTER(_Tensor)),
        ("num_tensors", _i64),
        ("blocks", _pointer * 3),
        *((name, ctypes.POINTER(_pointer)) for name in ("gradients", "notes", "logs")),
    )


class _Rows(ctypes.Structure):
    _fields_ = (("rows", _i64), ("values", _i64), ("count", _i64))


class _Part(ctypes.Structure):
    _fields_ = (("weight", _f64), ("used", _pointer), ("rows", _pointer))


class Item(NamedTuple):
    """A tensor to train. `group` chooses its hyper-parameters; `by_rows`: its gradient comes as rows."""

    tensor: Tensor
    group: int = 0
    by_rows: bool = False


class LayerNorms(NamedTuple):
    """Norms of one tensor."""

    weights: float
    """‖w‖."""
    step: float
    """‖g‖ of the weighted sum of all ranks' gradients; or ‖u‖, of Adam's direction and the weight decay."""


class StepPlan:
    """One copy of tensors and of their optimizer's moments, for all members of a group. All members make it.

    `parameters`, `first` and `second` (moments; None where `moments` says that the rule has none) alias the one copy,
    which begins with the first rank's values. `gradients` are this rank's own, for the others to read; None where
    they come as rows. Before a step, `used[i]` says whether tensor i has a gradient.

    Memory: parameters and moments once, gradients for each rank. Raises MemoryError on every rank.
    """

    def __init__(self, group: Group, items: Sequence[Item], moments: tuple[bool, bool]) -> None:
        self.group, self._library = group, group._library
        tensors = [item.tensor for item in items]
        offsets, block_bytes = layout(tensors)
        self.common = Common(group, max(1, block_bytes * (1 + sum(moments))))
        begins = [0, block_bytes if moments[0] else None, block_bytes * sum(moments) if moments[1] else None]
        self.parameters, self.first, self.second = (
            [None if begin is None else self.common.tensor(begin + o, t) for o, t in zip(offsets, tensors, strict=True)]
            for begin in begins
        )
        self.gradients, gradient_offsets = self._own_gradients(items)
        self.used = bytearray(len(items))
        self.steps = torch.zeros(len(items))
        """The number of each tensor's steps."""
        self._row_buffers: dict[int, tuple[Tensor, Tensor]] = {}
        self._rows = (_Rows * len(items))()
        self._part = _Part(
            used=ctypes.addressof(ctypes.c_char.from_buffer(self.used)), rows=ctypes.addressof(self._rows)
        )
        table = (_Tensor * len(items))(
            *(
                _Tensor(
                    offset, gradient, item.tensor.numel(), _width(item.tensor), DTYPES[item.tensor.dtype], item.group
                )
                for item, offset, gradient in zip(items, offsets, gradient_offsets, strict=True)
            )
        )
        self._handle = self._opened(table, [None if b is None else self.common.address + b for b in begins])
        self._end = weakref.finalize(self, self._library.pt_plan_close, self._handle)
        self._end.atexit = False
        if group.rank == 0:
            for mine, own in zip(self.parameters, tensors, strict=True):
                assert mine is not None
                mine.copy_(own.detach())
        group.barrier()

    def _own_gradients(self, items: Sequence[Item]) -> tuple[list[Tensor | None], list[int]]:
        """This rank's memory that others read: gradients, notes and log. All ranks exchange the addresses."""
        library, arena, group = self._library, self.group.arena, self.group
        offsets, num_bytes = layout([torch.empty(0) if item.by_rows else item.tensor for item in items])
        sizes = (max(1, num_bytes), library.pt_notes_bytes(len(items)), library.pt_log_bytes())
        failure: MemoryError | None = None
        try:
            self._memory = [arena.empty(size, torch.uint8) for size in sizes]
            mine = [memory.data_ptr() - arena.base for memory in self._memory]
        except MemoryError as error:
            failure, mine = error, [-1] * len(sizes)
        self._places = gathered_numbers(group, mine)
        lacking = [group.names[rank] for rank, places in enumerate(self._places) if places[0] < 0]
        if lacking:
            raise failure or MemoryError(f"rank {lacking[0]} has no shared memory for {sum(sizes)} bytes")
        gradients = [
            None if item.by_rows else shaped_like(_piece(self._memory[0], offset, item.tensor), item.tensor)
            for item, offset in zip(items, offsets, strict=True)
        ]
        return gradients, [-1 if item.by_rows else offset for item, offset in zip(items, offsets, strict=True)]

    def _opened(self, table: ctypes.Array[_Tensor], blocks: Sequence[int | None]) -> int:
        columns = [
            (_pointer * self.group.size)(
                *(base + places[column] for base, places in zip(self.group.bases, self._places, strict=True))
            )
            for column in range(3)
        ]
        place = _Place(table, len(table), (_pointer * 3)(*blocks), *columns)
        return int(self._library.pt_plan_open(self.group._handle, ctypes.byref(place)))

    def set_rows(self, index: int, rows: Tensor, values: Tensor) -> None:
        """Give tensor `index` a gradient of rows: `values[i]` is added to row `rows[i]`, which may occur again."""
        count = rows.numel()
        buffers = self._row_buffers.get(index)
        if buffers is None or buffers[0].numel() < count:
            self._row_buffers.pop(index, None)
            capacity = max(1, count + count // 2)
            arena = self.group.arena
            shape = (capacity, _width(self.parameters[index]))
            buffers = arena.empty(capacity, torch.int64), arena.empty(shape, values.dtype)
            self._row_buffers[index] = buffers
        row_buffer, value_buffer = buffers
        row_buffer[:count].copy_(rows)
        value_buffer[:count].copy_(values.reshape(count, -1))
        base = self.group.arena.base
        self._rows[index] = _Rows(row_buffer.data_ptr() - base, value_buffer.data_ptr() - base, count)

    def step(self, hypers: ctypes.Array[Hyper], weight: float, timeout_s: float | None = None) -> None:
        """One step on the sum of all ranks' gradients, each times its rank's `weight`. All members call it.

        When a rank dies, the others raise PeerLost, with all of this step made or none of it: `steps` tells which.
        Errors: Mismatch where ranks disagree about tensors, hyper-parameters or steps so far; TimedOut. A rank that
        times out after it has made its part does not count the step, though the others may complete it: after
        TimedOut the copy may be one step ahead of `steps`, or in part. The same holds after PeerLost when a rank left
        in mid-step while its process went on: no rank takes over its part, and the others wait for it until they time
        out.
        """
        self._part.weight = weight
        done = _i32()
        limit_s = self.group.timeout_s if timeout_s is None else timeout_s
        with self.group.lock:
            status = self.group._library.pt_step(
                self.group._handle,
                self._handle,
                ctypes.byref(self._part),
                hypers,
                len(hypers),
                self.steps.data_ptr(),
                limit_s,
                ctypes.byref(done),
            )
            if status:
                self.group.check(status, "step", limit_s)

    def norm(self, weight: float, timeout_s: float | None = None) -> float:
        """The Euclidean norm of the sum that `step` would take. All members call it."""
        self._part.weight = weight
        answer = _f64()
        limit_s = self.group.timeout_s if timeout_s is None else timeout_s
        with self.group.lock:
            status = self.group._library.pt_norm(
                self.group._handle, self._handle, ctypes.byref(self._part), limit_s, ctypes.byref(answer)
            )
            if status:
                self.group.check(status, "norm", limit_s)
        return answer.value

    def layer_norms(
        self, hypers: ctypes.Array[Hyper] | None, weight: float, timeout_s: float | None = None
    ) -> list[LayerNorms]:
        """The norms that scale each tensor's step: the same numbers on all members, which all call it.

        `hypers`: as `step` takes them, with Adam's rule; None: norms of the gradients. Cost: two meetings; of each
        rank its slice, of the gradients, weights and, with `hypers`, moments. Nothing of the copy changes.
        """
        self._part.weight = weight
        sums = (_f64 * (2 * len(self.used)))()
        limit_s = self.group.timeout_s if timeout_s is None else timeout_s
        with self.group.lock:
            status = self.group._library.pt_layer_squares(
                self.group._handle,
                self._handle,
                ctypes.byref(self._part),
                hypers,
                0 if hypers is None else len(hypers),
                self.steps.data_ptr(),
                limit_s,
                sums,
            )
            if status:
                self.group.check(status, "layer_norms", limit_s)
        return [LayerNorms(math.sqrt(w), math.sqrt(x)) for w, x in zip(sums[::2], sums[1::2], strict=True)]


def most_row_bytes(group: Group) -> int:
    """Tensors with wider rows take their gradients whole."""
    return int(group._library.pt_most_row_bytes())


def _width(tensor: Tensor | None) -> int:
    """Elements of a row."""
    assert tensor is not None
    return max(1, tensor.numel() // max(1, tensor.shape[0])) if tensor.dim() else 1


def _piece(memory: Tensor, offset: int, like: Tensor) -> Tensor:
    return memory[offset : offset + like.numel() * like.element_size()].view(like.dtype)
