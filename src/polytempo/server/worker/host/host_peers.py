"""`HostPeers`: the other workers of a worker's host, their leader, and their offers.

    worker 1 ──Offer──▶ worker 0, which leads: the lowest number of those present
    worker 2 ──Offer──▶    │ waits until all that are present have offered, or its patience ends
                           └── Push(sum of 0, 1, 2) ──▶ every shard

The choice of a leader needs no agreement: a worker with an offer pushes it with its own gradient, and a worker with a
lost offer pushes alone. So it is enough that workers agree mostly; where they do not, it costs time, and no gradient.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from polytempo.server.message import Message


class HostPeers:
    """The other workers `peers` on the host of `worker`."""

    def __init__(self, worker: int, peers: Sequence[int]) -> None:
        self.worker, self.peers = worker, tuple(peer for peer in peers if peer != worker)
        self._members: dict[int, int] | None = None
        self._absent = set(self.peers)
        """The peers that were never heard of, or have since said that they take no part, or were late."""
        self._offers: dict[int, Offer] = {}
        self._heard: dict[int, tuple[int, tuple[int, ...]]] = {}
        """Worker -> incarnation and sequences of its last offer: a repeated offer is not new."""

    @property
    def leader(self) -> int:
        """The worker that pushes for the host, as far as this one knows."""
        return min((self.worker, *self._present))

    @property
    def awaited(self) -> set[int]:
        """The others that are present and have not offered."""
        return self._present - set(self._offers)

    @property
    def members(self) -> list[int]:
        """The others that are members, as far as is known, whether they are present or not."""
        return [peer for peer in self.peers if self._is_member(peer)]

    @property
    def has_offers(self) -> bool:
        """True if others wait for a push of this worker."""
        return bool(self._offers)

    def see(self, members: Sequence[tuple[int, int]]) -> None:
        """A view has come: these are the workers, with their incarnations."""
        if members:
            self._members = dict(members)
            self._offers = {w: o for w, o in self._offers.items() if self._members.get(w) == o.incarnation}

    def take(self, offer: Offer) -> None:
        """Take an offer; a repeated one is not new."""
        key = offer.incarnation, offer.sequences
        if offer.worker not in self.peers or key <= self._heard.get(offer.worker, (0, ())):
            return
        self._heard[offer.worker] = key
        self._offers[offer.worker] = offer
        self._absent.discard(offer.worker)

    def attend(self, message: Presence) -> None:
        """Another worker takes part from now on, or no more. It pushes its offered gradients alone."""
        if message.worker not in self.peers:
            return
        self._offers.pop(message.worker, None)
        if message.present:
            self._absent.discard(message.worker)
        else:
            self._absent.add(message.worker)

    def give_up(self, peer: int) -> None:
        """`peer` did not come in time: it is not waited for until it is heard of."""
        self._absent.add(peer)

    def is_gone(self, peer: int) -> bool:
        """True if `peer` is known to take no part."""
        return peer not in self._present

    def taken_offers(self) -> list[Offer]:
        """The offers so far, by worker; there are none afterwards."""
        offers, self._offers = self._offers, {}
        return [offer for _, offer in sorted(offers.items())]

    @property
    def _present(self) -> set[int]:
        return set(self.members) - self._absent

    def _is_member(self, peer: int) -> bool:
        return self._members is None or peer in self._members


class Offer(Message, frozen=True, eq=False):
    """Worker to its host's leader: a gradient for the host's sum.

    It is lent until the push is answered. `sequences`, `bases`: of the request to each shard.
    """

    worker: int
    incarnation: int
    layout: int
    sequences: tuple[int, ...]
    clock: int
    bases: tuple[int, ...]
    samples: int
    lrs: tuple[float, ...]
    tickets: tuple[int, ...]
    gradient: Tensor
    """Flat: of all shards."""
    running: Tensor | None = None
    unused: tuple[str, ...] = ()


class Presence(Message, frozen=True, eq=False):
    """Worker to the others of its host: true if it takes part in their pushes. An offer before it is void."""

    worker: int
    incarnation: int
    present: bool
