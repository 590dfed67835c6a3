"""`Crowd`: workers of a batch scheduler, in memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from polytempo.server.coordinator.batch_scheduler import BatchScheduler
from polytempo.server.message import Deal

Deals = Literal["freely", "evenly"]


class Crowd:
    """Workers that follow the scheduler, and a record of its orders."""

    def __init__(self, scheduler: BatchScheduler, workers: Sequence[int] = ()) -> None:
        self.scheduler = scheduler
        self.lives: dict[int, int] = {}
        self.asked: dict[tuple[int, int], int] = {}
        self.held: dict[int, list[int]] = {}
        self.told: list[tuple[int, str]] = []
        self.waiting: set[int] = set()
        self.done: list[int] = []
        self.once_dealt: set[int] = set()
        for worker in workers:
            self.join(worker)

    def join(self, worker: int) -> None:
        self.lives[worker] = self.lives.get(worker, 0) + 1
        self.held[worker] = []
        assert self.scheduler.join(worker, self.lives[worker])

    def lose(self, worker: int) -> None:
        self.scheduler.lose(worker)
        del self.held[worker]
        self.waiting.discard(worker)
        self.hear()

    def ask(self, worker: int, pushes: int = 0) -> str | None:
        """Ask, having pushed the `pushes` oldest tickets held. The order: "wait", "train 3", "again 3" …"""
        done, self.held[worker] = self.held[worker][:pushes], self.held[worker][pushes:]
        self.done += done
        life = (worker, self.lives[worker])
        self.asked[life] = self.asked.get(life, 0) + 1
        self.waiting.add(worker)
        deal = self.scheduler.ask(*life, self.asked[life], done)
        if deal is not None:
            self.take(deal)
        answer = self.told[-1][1] if deal is not None else None
        self.hear()
        return answer

    def hear(self) -> None:
        for deal in self.scheduler.due():
            self.take(deal)

    def take(self, deal: Deal) -> None:
        worker = deal.worker
        assert (deal.incarnation, deal.sequence) == (self.lives[worker], self.asked[worker, self.lives[worker]])
        self.waiting.remove(worker)
        words = deal.order
        if deal.order == "train":
            (ticket,) = deal.tickets
            owners = [other for other, held in self.held.items() if ticket.number in held]
            assert not owners, f"ticket {ticket.number} has an owner, {owners[0]}, and was dealt to {worker}"
            assert ticket.number not in self.done, f"ticket {ticket.number} is done, and was dealt"
            assert ticket.again or ticket.number not in self.once_dealt
            assert (ticket.epoch, ticket.batch) == divmod(ticket.number, self.scheduler.batches_per_epoch)
            self.held[worker].append(ticket.number)
            self.once_dealt.add(ticket.number)
            words = f"again {ticket.number}" if ticket.again else f"train {ticket.number}"
        self.told.append((worker, words))
