"""A shard's whole state as bytes and tensors, and back.

state ──encode──▶ bytes  … [version, …, tensor 0, tensor 3, …]       a tensor in them is its place in the list
                  tensors [weights, …]                               copies, each tensor once
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import msgspec
import torch
from torch import Tensor

from polytempo.server.shard.deduplication import Known
from polytempo.server.shard.replies import Waiting
from polytempo.server.step_rates import StepRates, UnusedParameters
from polytempo.server.tensors.optimizer import Moments
from polytempo.server.tensors.tables import TableState
from polytempo.server.tensors.weights import Weights

Leases = dict[int, list[tuple[int, int]]]
"""Worker -> (sequence of the answered request, buffer that the answer lends; -1: it lends none)."""
Reads = dict[int, tuple[int, int]]
"""Worker -> (version, buffer) of the weights that it read last, where modifiers need them."""


class WeightsState(msgspec.Struct, array_like=True, eq=False):
    """The state of a `Weights`. Numbers of buffers are places in `buffers`."""

    buffers: list[Tensor]
    """All buffers that are held; the first has the present weights."""
    first: Tensor | None
    second: Tensor | None
    total: Tensor | None
    """The sum of gradients, where something is in it."""
    partial_sums: dict[int, Tensor]
    """Batch -> the sum of its parts that are there."""
    begun: Tensor | None
    """A region's: the weights that its movement is counted from."""
    version: int
    steps: int
    leases: Leases
    reads: Reads
    rates: StepRates
    """The rates of the gradients in the sum."""
    unused: UnusedParameters

    def put_(self, weights: Weights, spare: list[Tensor]) -> None:
        """Make `weights` these; `spare` is free memory."""
        moments = Moments(self.first, self.second)
        weights.restore(self.buffers, moments, self.total, self.partial_sums, spare)
        weights.version, weights.steps, weights.rates = self.version, self.steps, self.rates
        weights.leases, weights.reads, weights.unused = self.leases, self.reads, self.unused
        lent = [number for leases in self.leases.values() for _, number in leases if number >= 0]
        for number in (*lent, *(number for _, number in self.reads.values())):
            weights.buffers.hold(number)

    @property
    def num_tensors(self) -> int:
        """The number of its tensors."""
        alone = (self.first, self.second, self.total, self.begun)
        return len(self.buffers) + len(self.partial_sums) + sum(tensor is not None for tensor in alone)


class State(msgspec.Struct, array_like=True, eq=False):
    """Everything that the effect of the next entry depends on. Numbers of buffers are places in `weights.buffers`."""

    weights: WeightsState
    """The shard's own weights."""
    regions: dict[int, WeightsState]
    """The regions' weights, where the rule has regions."""
    index: int
    rule: Any
    members: dict[int, int]
    workers: tuple[int, ...]
    """The members that the rule counts: they do not rest."""
    known: dict[int, Known]
    waiting: dict[int, list[Waiting]]
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
    average: Tensor | None = None
    """The moving average of the weights."""

    def held_by_waiting(self) -> list[int]:
        """The buffers of the weights that waiting requests hold, each as often as it is held."""
        numbers = (number for queue in self.waiting.values() for one in queue for number in (one.read, one.difference))
        return [number for number in numbers if number >= 0]


def state_of(
    weights: Weights, waiting: Mapping[int, Sequence[Waiting]], begun: Tensor | None = None
) -> tuple[WeightsState, dict[int, list[Waiting]]]:
    """The state of `weights`, and the requests that wait for them, both with places in its buffers.

    Its tensors are not copied.
    """
    numbers: dict[int, int] = {}

    def place(number: int) -> int:
        return -1 if number < 0 else numbers.setdefault(number, len(numbers))

    place(weights.current)
    leases = {w: [(sequence, place(n)) for sequence, n in each] for w, each in sorted(weights.leases.items())}
    reads = {w: (version, place(n)) for w, (version, n) in sorted(weights.reads.items())}
    queues = {
        w: [msgspec.structs.replace(one, read=place(one.read), difference=place(one.difference)) for one in queue]
        for w, queue in sorted(waiting.items())
        if queue
    }
    state = WeightsState(
        buffers=[weights.buffers.tensors[number] for number in numbers],
        first=weights.moments.first,
        second=weights.moments.second,
        total=weights.total if weights.summed else None,
        partial_sums=dict(weights.partial_sums),
        begun=begun,
        version=weights.version,
        steps=weights.steps,
        leases=leases,
        reads=reads,
        rates=weights.rates,
        unused=weights.unused,
    )
    return state, queues


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
    kept = sum(each.num_tensors for each in (state.weights, *state.regions.values()))
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
