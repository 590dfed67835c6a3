"""A tensor that a neighbour reads in place: one copy, into the sender's arena, and none at the receiver's.

    sender      tensor ──copied──▶ slot of its arena   │ word: 1 │ tensor │      its place travels as a short message
    receiver    reads the slot through its window, and sets the word to 0 with the last reference to the tensor
    sender      writes to a slot again when its word is 0, or when the process that had it has ended

While the word is 1 the slot belongs to the receiver, who may also write to it. So nothing is overwritten that autograd
still holds, and no message gives slots back.
"""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from polytempo.core.errors import Mismatch
from polytempo.native.arena import Window, own_arena
from polytempo.native.call import MOVED, name_of
from polytempo.native.group import Group
from polytempo.native.library import required

LEAST_BYTES = 3 << 20
"""Smaller tensors are copied through the ring, which takes less time than to borrow them."""

_WORD_BYTES = 64
_SPACIOUS = 2
"""A slot holds tensors of at least half its size."""
_UNUSED_TURNS = 64
"""Turns of the pool until an unused slot's memory is given back."""

_FREE, _LENT = 0, 1


def lendable(tensor: Tensor) -> bool:
    """True if a tensor like this travels in a slot. Sender and receiver answer the same of the same shape and dtype."""
    return tensor.device.type == "cpu" and tensor.dtype in MOVED and tensor.nbytes >= LEAST_BYTES


def empty_note() -> Tensor:
    """Room for the message with a tensor's place, size and dtype."""
    return torch.empty(3, dtype=torch.int64)


def lent(group: Group, tensor: Tensor, to: int) -> Tensor:
    """Copy a tensor to where rank `to` can read it: the note for `borrowed`. The tensor may change afterwards.

    Errors: MemoryError when the arena or the machine has no more.
    """
    window = group.windows[to]
    assert window is not None, "a rank has no window onto its own arena"
    return torch.tensor([_own_slots().lend(tensor.detach(), window), tensor.nbytes, MOVED[tensor.dtype]])


def borrowed(group: Group, note: Tensor, like: Tensor, source: int) -> Tensor:
    """The tensor of a note from rank `source`: its own memory, until the last reference is gone.

    Errors: Mismatch where it is not as many bytes, or of another dtype, than `like`. Cost: no copy.
    """
    window = group.windows[source]
    assert window is not None, "a rank has no window onto its own arena"
    offset, num_bytes, dtype = note.tolist()
    if (num_bytes, dtype) != (like.nbytes, MOVED[like.dtype]):
        _returned(window, offset, os.getpid())
        raise Mismatch(
            f"rank {group.names[group.rank]}: recv expects {like.nbytes} bytes of {name_of(MOVED[like.dtype])}, and "
            f"rank {group.names[source]} sent {num_bytes} bytes of {name_of(dtype)}"
        )
    over = partial(_returned, window, offset, os.getpid())
    return window.tensor(offset + _WORD_BYTES, tuple(like.shape), like.dtype, over)


def _returned(window: Window, offset: int, owner: int) -> None:
    if os.getpid() == owner:  # a forked child has our tensors, but they are not its own
        required().pt_word_set(window.base + offset, _FREE)


@dataclass
class _Slot:
    memory: Tensor
    """Bytes: the word, and room."""
    offset: int
    used_turn: int
    borrower: Window | None = None
    room: Tensor = field(default_factory=partial(torch.empty, 0))
    """The room's last shape."""

    @property
    def num_bytes(self) -> int:
        return self.memory.numel() - _WORD_BYTES

    def like(self, tensor: Tensor) -> Tensor:
        """The slot's memory as a tensor like this one."""
        if self.room.shape != tensor.shape or self.room.dtype is not tensor.dtype:
            num_bytes = tensor.numel() * tensor.element_size()
            self.room = self.memory[_WORD_BYTES : _WORD_BYTES + num_bytes].view(tensor.dtype).view(tensor.shape)
        return self.room

    @property
    def is_free(self) -> bool:
        return bool(required().pt_word_seen(self.memory.data_ptr()) == _FREE)


class Slots:
    """The slots of this process's arena. As many as are lent at one time, as large as the lent tensors."""

    def __init__(self) -> None:
        self._arena, self.owner = own_arena(), os.getpid()
        self.slots: list[_Slot] = []
        self._turn = 0
        self._lock = threading.Lock()

    def lend(self, tensor: Tensor, borrower: Window) -> int:
        """Copy `tensor` into a slot, which is the borrower's from now on: the slot's offset in the arena."""
        with self._lock:
            self._turn += 1
            slot = self._with_room(tensor.nbytes)
            slot.like(tensor).copy_(tensor)
            slot.borrower, slot.used_turn = borrower, self._turn
            required().pt_word_set(slot.memory.data_ptr(), _LENT)
            return slot.offset

    def _with_room(self, num_bytes: int) -> _Slot:
        for slot in self.slots:
            if num_bytes <= slot.num_bytes <= _SPACIOUS * num_bytes and slot.is_free:
                return slot
        self._give_back_unused()
        memory = self._arena.empty(_WORD_BYTES + num_bytes, torch.uint8)
        offset = self._arena.offset_of(memory)
        assert offset is not None
        self.slots.append(_Slot(memory, offset, self._turn))
        return self.slots[-1]

    def _give_back_unused(self) -> None:
        """Take slots back from processes that have ended, and let go of unused slots."""
        for slot in self.slots:
            if not slot.is_free and slot.borrower is not None and slot.borrower.process_has_ended():
                required().pt_word_set(slot.memory.data_ptr(), _FREE)
        self.slots = [s for s in self.slots if not s.is_free or self._turn - s.used_turn < _UNUSED_TURNS]


_own: Slots | None = None
_lock = threading.Lock()


def _own_slots() -> Slots:
    """This process's; a forked child gets others."""
    global _own
    with _lock:
        if _own is None or _own.owner != os.getpid():
            _own = Slots()
        return _own


def _forked() -> None:
    global _lock
    _lock = threading.Lock()  # the thread that held it is not in the child


os.register_at_fork(after_in_child=_forked)
