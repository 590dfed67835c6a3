"""`Port`: one rank's only door to the others."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache

from torch import Tensor

from polytempo.core.arithmetic.kernel_use import Uses
from polytempo.core.mesh import MOST_GROUPS, Mesh
from polytempo.core.op import (
    AllGather,
    AllReduce,
    AllToAll,
    Alone,
    Barrier,
    Broadcast,
    Compute,
    Dispatch,
    LentRecv,
    LentSend,
    Mark,
    Now,
    Op,
    Parcel,
    Post,
    Program,
    Pull,
    Push,
    Recv,
    ReduceScatter,
    Send,
    SendReceive,
    Start,
    T,
    Take,
    WholeSum,
    Work,
)

_CHANNELS = 1024
_NOW = Now()
CHANNELS_OF_A_GROUP = _CHANNELS**2
"""`Port.channel` is the number of the group in its mesh times this, plus the path of `on_channel`'s numbers."""


@dataclass(frozen=True)
class Port:
    """A group of ranks as one of them sees it. Builds operations; performs nothing.

    Ranks given to its methods are positions in the group, `0 … size-1`. `members[i]` is the world
    rank of position `i`, and `hosts[i]` the host it runs on. Messages match by (sender, receiver,
    channel, tag) in the order of sending; collectives match by (members, channel) in the order of
    calling, which must be the same on every member.

    `meshed` lays a group out on named axes. `along` leads from there to the smaller groups, and from each of these to
    every other one, because a group keeps the mesh:

        port = port.meshed(data=2, model=3)       rank = 3 · data + model
        port.along("data")                        the 2 ranks with this rank's `model` coordinate
        port.along("data").along("model")         the 3 ranks with this rank's `data` coordinate: port.along("model")
    """

    rank: int
    members: tuple[int, ...]
    hosts: tuple[int, ...]
    channel: int = 0
    timeout_s: float | None = None
    mesh: Mesh | None = None
    """The layout of the ranks of `whole`."""
    whole: Port | None = None
    """The group that `meshed` was called on; None: this one."""
    clock: Now = field(default=_NOW, compare=False, repr=False)
    """The question that `now` asks."""
    series: int = 0
    """The number of the model that is trained over it, in its world: another one's messages may be under way."""
    past_step: bool = False
    """True if operations go on past the step that begins them: see `on_channel_of_series`."""

    @property
    def size(self) -> int:
        """Number of ranks in this group."""
        return len(self.members)

    @property
    def world_rank(self) -> int:
        """This rank as the world numbers it."""
        return self.members[self.rank]

    def _by_messages(self, tensor: Tensor) -> bool:
        return self.past_step and tensor.device.type in ("cpu", "meta") and len(set(self.hosts)) > 1

    @property
    def _group(self) -> int:
        return self.channel // CHANNELS_OF_A_GROUP

    @property
    def _path(self) -> int:
        return self.channel % CHANNELS_OF_A_GROUP

    def _world_rank(self, position: int) -> int:
        if not 0 <= position < self.size:
            raise ValueError(f"the group has ranks 0 to {self.size - 1}, not {position}")
        return self.members[position]

    def send(self, buffer: Tensor, to: int, tag: int = 0) -> Op[None]:
        """Hand `buffer` to position `to`; it must stay unchanged until the operation is finished.

        A transport may move it only when the receiver has asked for it. A rank that still has something to receive
        therefore starts the receive before it sends (`send_receive`). Finished means that the buffer may change: the
        message may be on its way yet, and share the link with the next one.
        """
        return Send(buffer, self._world_rank(to), tag, self.channel, timeout_s=self.timeout_s)

    def recv(self, like: Tensor, source: int, tag: int = 0) -> Op[Tensor]:
        """A tensor shaped like `like` from position `source`."""
        return Recv(like, self._world_rank(source), tag, self.channel, timeout_s=self.timeout_s)

    def lend(self, buffer: Tensor, to: int, tag: int = 0) -> Op[None]:
        """Send to a position that borrows the tensor: copied once at most between ranks of one host.

        Use it for tensors that the receiver keeps for a while, such as activations. A large tensor in shared memory
        ends the operation without waiting, and takes its memory until the receiver lets go of it.
        """
        return LentSend(buffer, self._world_rank(to), tag, self.channel, timeout_s=self.timeout_s)

    def borrow(self, like: Tensor, source: int, tag: int = 0) -> Op[Tensor]:
        """Receive a tensor that position `source` lends."""
        return LentRecv(like, self._world_rank(source), tag, self.channel, timeout_s=self.timeout_s)

    def send_receive(self, buffer: Tensor, to: int, *, like: Tensor, source: int, tag: int = 0) -> Op[Tensor]:
        """Send `buffer` to position `to`, and receive a tensor shaped like `like` from position `source`, at the same
        time.

        The receive begins first: ranks that all send first would wait for each other, and full-duplex links would carry
        one direction after the other. Cost: one step; memory for the received tensor. MPI calls it sendrecv.
        """
        there, here = self._world_rank(to), self._world_rank(source)
        return SendReceive(buffer, there, like, here, tag, self.channel, timeout_s=self.timeout_s)

    def all_reduce(self, buffer: Tensor) -> Op[Tensor]:
        """The sum over the group, by the world's own way. `buffer` is given away."""
        return AllReduce(buffer, members=self.members, channel=self.channel, timeout_s=self.timeout_s)

    def all_gather(self, buffer: Tensor, *, read_only: bool = False) -> Op[list[Tensor]] | Program[list[Tensor]]:
        """Every rank's `buffer`, in the order of positions; `read_only` if no rank writes to the answer."""
        if self._by_messages(buffer):
            return gathered_in_ring(self, buffer)
        return AllGather(buffer, read_only, members=self.members, channel=self.channel, timeout_s=self.timeout_s)

    def reduce_scatter(self, buffer: Tensor) -> Op[Tensor]:
        """This rank's slice of the sum: `buffer` is flat, its numel a multiple of `size`."""
        if buffer.numel() % self.size:
            raise ValueError(
                f"reduce_scatter needs a multiple of {self.size} elements, got {buffer.numel()}; pad the buffer"
            )
        return ReduceScatter(buffer, members=self.members, channel=self.channel, timeout_s=self.timeout_s)

    def all_to_all(self, pieces: Sequence[Tensor], likes: Sequence[Tensor]) -> Op[list[Tensor]] | Program[list[Tensor]]:
        """Send `pieces[i]` to position i; returns every position's piece for this one, each as long as `likes[i]`."""
        if not len(pieces) == len(likes) == self.size:
            raise ValueError(f"all_to_all needs {self.size} pieces and likes, got {len(pieces)} and {len(likes)}")
        if self._by_messages(pieces[0]):
            return exchanged_in_pairs(self, pieces, likes)
        return AllToAll(
            tuple(pieces), tuple(likes), members=self.members, channel=self.channel, timeout_s=self.timeout_s
        )

    def broadcast(self, buffer: Tensor, source: int = 0) -> Op[Tensor]:
        """`buffer` of position `source`. `buffer` is given away."""
        return Broadcast(
            buffer, self._world_rank(source), members=self.members, channel=self.channel, timeout_s=self.timeout_s
        )

    def whole_sum(self, route: Callable[..., object], buffer: Tensor) -> Op[bool]:
        """True if the time of all messages of `route` over an empty buffer has passed; see `WholeSum`."""
        return WholeSum(route, buffer, members=self.members, channel=self.channel, timeout_s=self.timeout_s)

    def barrier(self) -> Op[None]:
        """Wait for the whole group."""
        return Barrier(members=self.members, channel=self.channel, timeout_s=self.timeout_s)

    def compute(
        self,
        work: Callable[[], T],
        flops: float,
        name: str = "compute",
        uses: Uses = (),
        source: Tensor | None = None,
    ) -> Op[T]:
        """Run `work()`, shown as `name` in traces; a virtual world charges `flops` floating-point operations.

        A virtual world with measured kernels charges `uses` instead, where there are some. With a `source`, a tensor
        of a `read_only` answer, `work` makes the same tensor on all ranks that have it, so one may compute for all.
        """
        return Compute(work, flops, name, uses, source)

    def alone(self, work: Callable[[], T], flops: float, uses: Uses = ()) -> Op[T]:
        """Run `work()` while no other rank of this host is in one of these; see `compute`."""
        return Alone(work, flops, uses=uses, timeout_s=self.timeout_s)

    def now(self) -> Op[float]:
        """The world's clock in seconds, virtual or real."""
        return self.clock

    def mark(self, step: int) -> Op[None]:
        """Say that this rank begins `step`."""
        return Mark(step)

    def start(self, what: Op[T] | Program[T]) -> Op[Work[T]]:
        """Begin an operation or a coroutine; await the `Work` that comes back when its answer is needed."""
        return Start(what)

    def post(self, message: Parcel, to: int) -> Op[None]:
        """Put `message` into the mailbox of node `to` (a world rank); it may be lost on the way."""
        return Post(message, to)

    def dispatch(self, messages: Sequence[tuple[int, Parcel]]) -> Op[None]:
        """Put each message of (node, message) into its mailbox, in this order, and wait for none of them to leave."""
        return Dispatch(messages)

    def take(self, wait_s: float | None = None) -> Op[tuple[int, Parcel] | None]:
        """The next (sender, message) of this node's mailbox; None if none is there within `wait_s`."""
        return Take(wait_s)

    def push(self, gradient: Tensor, clock: int, samples: int = 0) -> Op[Tensor | None]:
        """Send a flat gradient to the parameter server; see `Push`."""
        return Push(gradient, clock, samples, timeout_s=self.timeout_s)

    def pull(self, clock: int) -> Op[Tensor]:
        """The parameter server's parameters, flat and lent; see `Pull`."""
        return Pull(clock, timeout_s=self.timeout_s)

    def along(self, *axes: str) -> Port:
        """The group of ranks that differ from this rank in coordinates of `axes` only.

            along(A) of the rank with coordinates c  =  {ranks with coordinates d : d[a] = c[a] for every axis a ∉ A}

        Positions follow the mesh's order, the last axis fastest, in any order of `axes`. The group keeps the mesh, and
        this rank its coordinates, so `along(A).along(B)` is `along(B)`. Without an axis it is this rank alone; with all
        axes it is the whole group.

        Groups with other members have messages of their own, and may talk at the same time. An additional axis of
        length 1 changes no member, and so no group.

        Raises ValueError for an axis that the mesh lacks, and for an axis that is named twice.
        """
        lengths = {} if self.mesh is None else self.mesh.lengths
        for axis in axes:
            if axis not in lengths:
                raise ValueError(f"no axis {axis!r} in the mesh {lengths}; make one with port.meshed({axis}=…)")
        if self.mesh is None:
            raise ValueError("this group has no mesh; make one with port.meshed(data=…)")
        whole = self.whole or replace(self, channel=self._group * CHANNELS_OF_A_GROUP, timeout_s=None)
        group = whole.among(self.mesh.group(whole.rank, axes))
        number = whole._group * MOST_GROUPS + self.mesh.group_number(axes)
        channel = number * CHANNELS_OF_A_GROUP + self._path
        if group.size == whole.size:
            return replace(
                whole, channel=whole.channel + self._path, timeout_s=self.timeout_s, past_step=self.past_step
            )
        own = replace(group, channel=channel, timeout_s=self.timeout_s, past_step=self.past_step)
        return replace(own, mesh=self.mesh, whole=whole)

    @property
    def coordinates(self) -> dict[str, int]:
        """This rank's place on every axis of the mesh; empty without a mesh."""
        return {} if self.mesh is None else self.mesh.coordinates((self.whole or self).rank)

    def meshed(self, **axes: int) -> Port:
        """This group laid out as a mesh, the last axis varying fastest: `meshed(data=4, stage=2)`.

        It replaces the mesh that the group is part of. Raises ValueError where the lengths' product is not `size`.
        """
        mesh = Mesh(tuple(axes.items()))
        if mesh.size != self.size:
            raise ValueError(f"a mesh {axes} has {mesh.size} places, but the group has {self.size} ranks")
        return replace(self, mesh=mesh, whole=None)

    def among(self, positions: Sequence[int]) -> Port:
        """The sub-group of `positions`, renumbered in that order; this rank must be one of them.

        It is part of no mesh, and has this group's channel: where both talk at the same time, use `on_channel`.
        """
        if self.rank not in positions or len(set(positions)) != len(positions):
            raise ValueError(f"rank {self.rank} can only join a group that names it once, not {list(positions)}")
        return Port(
            rank=list(positions).index(self.rank),
            members=tuple(self._world_rank(p) for p in positions),
            hosts=tuple(self.hosts[p] for p in positions),
            channel=self.channel,
            timeout_s=self.timeout_s,
            clock=self.clock,
            series=self.series,
            past_step=self.past_step,
        )

    def on_channel(self, number: int) -> Port:
        """The same group with messages of its own, for coroutines that run at the same time."""
        if not 0 <= number < _CHANNELS - 1:
            raise ValueError(f"a port has {_CHANNELS - 1} channels, got number {number}")
        path = self._path * _CHANNELS + number + 1
        if path >= CHANNELS_OF_A_GROUP:
            raise ValueError(f"channels nest two deep, and this port is two deep already; got number {number}")
        channel = self._group * CHANNELS_OF_A_GROUP + path
        return replace(self, channel=channel)

    def on_channel_of_series(self, number: int = 0, of: int = 1) -> Port:
        """Select a channel for messages under way past a step: channel `number` of each model's own series.

        Models with numbers 1023 // `of` apart have the same channels. Between hosts `all_gather` and `all_to_all` are
        messages then, on CPUs: all ranks begin collectives in one order, which only the program knows, so the second of
        two would begin when the program waits for it. A message begins when the one before has come.
        """
        return replace(self.on_channel(self.series % max(1, (_CHANNELS - 1) // of) * of + number), past_step=True)

    def within(self, timeout_s: float) -> Port:
        """The same group with a deadline on every operation."""
        if not timeout_s > 0:
            raise ValueError(f"a deadline must be a positive number of seconds, got {timeout_s}")
        return replace(self, timeout_s=timeout_s)


def world_port(rank: int, hosts: Sequence[int], clock: Now = _NOW) -> Port:
    """The port of world rank `rank` in a world with rank `r` on host `hosts[r]`."""
    return Port(rank=rank, members=_all_ranks(len(hosts)), hosts=tuple(hosts), clock=clock)


@lru_cache(maxsize=4)
def _all_ranks(size: int) -> tuple[int, ...]:
    """One object for all ranks of a virtual world."""
    return tuple(range(size))


async def gathered_in_ring(port: Port, buffer: Tensor) -> list[Tensor]:
    """`all_gather` by messages: each round hands the buffer that came last on to the next position.

    Cost: N-1 rounds of one buffer; between hosts with neighbouring positions each buffer travels once.
    """
    found = [buffer.clone()] * port.size
    after, before = (port.rank + 1) % port.size, (port.rank - 1) % port.size
    for distance in range(1, port.size):
        last = found[(port.rank - distance + 1) % port.size]
        came = await port.send_receive(last, after, like=buffer, source=before)
        found[(port.rank - distance) % port.size] = came
    return found


async def exchanged_in_pairs(port: Port, pieces: Sequence[Tensor], likes: Sequence[Tensor]) -> list[Tensor]:
    """`all_to_all` by messages: in round r to the position r further on, from the one r before. Cost: N-1 rounds."""
    found = list(pieces)
    found[port.rank] = pieces[port.rank].clone()
    for distance in range(1, port.size):
        to, source = (port.rank + distance) % port.size, (port.rank - distance) % port.size
        found[source] = await port.send_receive(pieces[to], to, like=likes[source], source=source)
    return found


async def barrier(port: Port) -> None:
    """Wait until all ranks of the port are here: its operation as a coroutine, which a world can drive."""
    await port.barrier()
