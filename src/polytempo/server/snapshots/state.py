"""A shard's whole state as bytes and tensors, and back.

state ──encode──▶ bytes  … [version, …, tensor 0, tensor 3, …]       a tensor in them is its place in the list
                  tensors [weights, …]                               copies, each tensor once
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import msgspec
import torch
from torch import Tensor

from polytempo.server.shard.deduplication import Known
from polytempo.server.shard.replies import Waiting
from polytempo.server.step_rates import StepRates, UnusedParameters
from polytempo.server.tensors.tables import TableState


class State(msgspec.Struct, array_like=True, eq=False):
    """Everything that the effect of the next entry depends on. Numbers of buffers are places in `buffers`."""

    buffers: list[Tensor]
    """All buffers that are held; the first has the present weights."""
    first: Tensor | None
    second: Tensor | None
    total: Tensor | None
    """The sum of gradients, where something is in it."""
    partial_sums: dict[int, Tensor]
    """Batch -> the sum of its parts that are there."""
    version: int
    steps: int
    index: int
    rule: Any
    members: dict[int, int]
    workers: tuple[int, ...]
    """The members that the rule counts: they do not rest."""
    known: dict[int, Known]
    waiting: dict[int, list[Waiting]]
    leases: dict[int, list[tuple[int, int]]]
    """Worker -> (sequence of the answered request, buffer that the answer lends; -1: it lends none)."""
    reads: dict[int, tuple[int, int]]
    """Worker -> (version, buffer) of the weights that it read last, where modifiers need them."""
    rates: StepRates
    """The rates of the gradients in the sum."""
    tickets: tuple[tuple[int, int], ...]
    """Applied, as ranges [first, last]."""
    dropped_tickets: tuple[tuple[int, int], ...]
    """Dropped by the rule: not in the weights, and not to be dealt again."""
    staleness: dict[int, int]
    dropped: int
    refused: int
    tables: list[TableState]
    running: Tensor | None = None
    """Running statistics of norms, their sum over the gradients that are summed, and how many these are."""
    running_total: Tensor | None = None
    running_count: int = 0
    unused: UnusedParameters = msgspec.field(default_factory=UnusedParameters)
    average: Tensor | None = None
    """The moving average of the weights."""

    def held_buffers(self) -> list[int]:
        """The buffers that are held beside the present weights, each as often as it is held."""
        lent = [number for leases in self.leases.values() for _, number in leases]
        read = [number for _, number in self.reads.values()]
        waiting = [number for queue in self.waiting.values() for one in queue for number in (one.read, one.difference)]
        return [number for number in (*lent, *read, *waiting) if number >= 0]


Leases = dict[int, list[tuple[int, int]]]
Reads = dict[int, tuple[int, int]]
WaitingByWorker = dict[int, list[Waiting]]


def renumbered(
    current: int, leases: Leases, reads: Reads, waiting: WaitingByWorker
) -> tuple[list[int], Leases, Reads, WaitingByWorker]:
    """The buffers that are held, the present weights first, and their holders, by place in that list."""
    numbers: dict[int, int] = {}

    def place(number: int) -> int:
        return -1 if number < 0 else numbers.setdefault(number, len(numbers))

    place(current)
    lent = {w: [(sequence, place(n)) for sequence, n in each] for w, each in sorted(leases.items())}
    read = {w: (version, place(n)) for w, (version, n) in sorted(reads.items())}
    queues = {
        w: [msgspec.structs.replace(one, read=place(one.read), difference=place(one.difference)) for one in queue]
        for w, queue in sorted(waiting.items())
        if queue
    }
    return list(numbers), lent, read, queues


class _Envelope(msgspec.Struct, array_like=True):
    num_kept: int
    """The number of tensors, the first ones, that are the shard's own flat vectors; the others are gradients and
    rows."""
    state: bytes


def encode(state: State) -> tuple[bytes, tuple[Tensor, ...]]:
    """`state` as bytes, and copies of its tensors. Cost: each tensor is copied once, however many hold it."""
    tensors: list[Tensor] = []
    places: dict[int, int] = {}

    def place(value: object) -> int:
        if not isinstance(value, Tensor):
            raise TypeError(f"a shard's state cannot hold a {type(value).__name__}")
        if id(value) not in places:
            places[id(value)] = len(tensors)
            tensors.append(value)
        return places[id(value)]

    encoded = msgspec.msgpack.encode(state, enc_hook=place)
    kept = (
        len(state.buffers)
        + sum(t is not None for t in (state.first, state.second, state.total))
        + len(state.partial_sums)
    )
    return msgspec.msgpack.encode(_Envelope(kept, encoded)), tuple(tensor.clone() for tensor in tensors)


def decode(
    data: bytes, tensors: Sequence[Tensor], numel: int, dtype: torch.dtype, own: Callable[[Tensor], Tensor]
) -> State:
    """The state that `encode` made bytes of; `own(tensor)` is a copy of a tensor in the shard's memory.

    Errors: ValueError where the bytes are of something else, or the tensors not of `numel` elements of `dtype`.
    """

    def fit(vectors: Iterable[Tensor | None]) -> None:
        for given in vectors:
            if given is not None and (given.shape != (numel,) or given.dtype != dtype):
                raise ValueError(
                    f"the shard holds {numel} elements of {dtype}, and the state {tuple(given.shape)} of {given.dtype}"
                )

    copies: dict[int, Tensor] = {}

    def tensor(kind: type, place: Any) -> Tensor:
        if kind is not Tensor or not isinstance(place, int) or not 0 <= place < len(tensors):
            raise ValueError(f"a shard's state names tensor {place!r}, and {len(tensors)} came with it")
        if place not in copies:
            copies[place] = own(tensors[place]) if place < envelope.num_kept else tensors[place].clone()
        return copies[place]

    try:
        envelope = msgspec.msgpack.decode(data, type=_Envelope)
        fit(tensors[: envelope.num_kept])
        state = msgspec.msgpack.decode(envelope.state, type=State, dec_hook=tensor)
    except msgspec.MsgspecError as error:
        raise ValueError(f"these bytes are not a shard's state: {error}") from error
    fit(one.gradient for queue in state.waiting.values() for one in queue)
    return state
