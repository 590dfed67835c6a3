"""The outcomes of the slices of a FlexRR run, by the shards' own account."""

from __future__ import annotations

from collections.abc import Mapping

from polytempo.core import Strategy
from polytempo.data.batches import Batches
from polytempo.data.ledger import Ledger, Verdict
from polytempo.flexrr.reassignment import Reassignment
from polytempo.flexrr.slices import cut
from polytempo.server.message import Statistics


def verdicts(strategy: Strategy, batches: Batches, statistics: Mapping[int, Statistics]) -> list[Verdict]:
    """The ledger's verdict on each epoch, from the tickets that each shard has applied."""
    service = strategy.server
    assert service is not None
    if not isinstance(service.reassigns, Reassignment):
        return []
    slices = service.reassigns.slices
    ledger = Ledger([*(batches.pick(b).start for b in range(len(batches))), batches.num_samples], service.shards)
    for shard, told in statistics.items():
        for number in (number for first, last in told.tickets for number in range(first, last + 1)):
            ticket, place = divmod(number, slices + 1)
            if place < slices:
                piece = cut(0, 1, 0, batches.pick(ticket % len(batches)).local_samples, slices)[place]
                ledger.applied(shard, ticket, (piece.begin, piece.end))
    return [ledger.verdict(epoch) for epoch in ledger.epochs]
