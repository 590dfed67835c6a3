"""`BatchScheduler`: assigns batches to workers. A pure machine, a part of the coordinator.

    worker ──ask(done)──▶ ┌ batch scheduler ────────────────────────────────────┐
                          │ again: tickets of lost workers, lowest first        │
           ◀──train t──── │ supply: tickets that no worker has had              │
           ◀──wait─────── │ held: each worker's tickets that are not done       │
           ◀──finish───── │ done: tickets that every shard has acknowledged     │
                          └─────────────────────────────────────────────────────┘

A *ticket* is the right and the duty to train on one batch; ticket n is batch n mod B of epoch n div B. At any time it
is done, or one worker holds it, or no worker does. Orders to a worker:

    train     compute the gradient of the batch. A ticket `again` is pushed alone: push accrued gradients first.
    wait      push all that is accrued, await the acknowledgements, then ask again, with all of it in `done`.
    finish    nothing is left. A worker that still holds something (after `stop`) need not push it.
    pause     the epoch that the worker is in is done, by all; its next ask is for the epoch after it (see `pauses`).
    stop      where epochs are apart: the loop was stopped, and every ticket that was dealt is done.

"wait" goes only to workers with tickets: to all when other workers wait for their pushes (the end of the run, a pause),
and to workers that hold `most_held` tickets. A worker that holds nothing and can be given nothing has no answer until
there is one (`due`).

Tickets are dealt from the first to the last without a stop: an epoch ends where its last batch is dealt, and no worker
waits there. Scores are taken of snapshots that the shards keep (`server.shard.score_snapshots`).

**Rules that wait for other workers.** Some rules answer a push only when others have pushed too (hardsync; the first n
of m; full coverage), or hold a worker back until the slowest has come near (bounded staleness). Every worker then needs
equally many batches: `deals="evenly"`, where a worker without a push left means that all are done. "freely" they would
stop for ever: of the last tickets one worker may hold two, and wait for the push or the progress of a worker that gets
no ticket. Backup workers need both: tickets dealt freely, for a worker that comes late makes fewer steps, and `rests`,
so that those without a ticket count no more. Rules that answer a push when it arrives (asynchronous, n-softsync,
elastic averaging) cannot stop either way.

**Epochs apart** (`pauses`), for loops that end an epoch themselves and do not say how many there will be. A worker gets
tickets of one epoch until all of that are done, then the order to pause. A worker may also retire (`retire`): its
tickets are dealt again, and when all have retired, the run is over.

Losing a worker makes "evenly" uneven: its batches go to others, and at the end of the run some workers rest while
others still have pushes that wait. `resting` names them. Such rules must take them for workers that have left, until
they get a ticket again; a rule therefore takes a push of a worker that rested as if the worker had just joined.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heapify, heappop, heappush
from typing import Literal

from polytempo.core.arithmetic.ranges import Range, Ranges
from polytempo.server.coordinator.saved_schedule import decoded, encoded, remaining
from polytempo.server.coordinator.supply import Evenly, Freely, InRuns, Supply
from polytempo.server.message import Deal, Order, Ticket


class _Worker:
    """One life of a worker."""

    def __init__(self, incarnation: int, epoch: int = 0) -> None:
        self.incarnation = incarnation
        self.sequence = 0
        self.answer: Deal | None = None
        self.held: dict[int, Ticket] = {}
        self.epoch = epoch  # where epochs are apart: the requested one
        self.retires = False


class BatchScheduler:
    """Deals the tickets `0 … num_tickets-1` to workers that come and go. Call `due` after every event.

        scheduler = BatchScheduler(batches_per_epoch=8, num_tickets=80, deals="freely", workers=2)
        scheduler.join(0, incarnation=1)
        scheduler.ask(0, incarnation=1, sequence=1, done=())     # Deal(…, order="train", tickets=(Ticket(0, 0, 0),))

    `workers`: their number at first; "evenly" they have so many places, and the others serve the place of a lost worker
    (call `lose` also for a worker that never came). `warm_start`: only the first worker trains until so many tickets
    are done. An ask costs O(1) (O(log n) with lost tickets); memory is the held tickets and the gaps in the done ones.
    """

    def __init__(
        self,
        batches_per_epoch: int,
        num_tickets: int,
        deals: Literal["freely", "evenly"],
        workers: int,
        warm_start: int = 0,
        most_held: int = 2,
        rests: bool = False,
        pauses: bool = False,
        run: int = 1,
    ) -> None:
        """`most_held`: how many unfinished tickets a worker may have. `run`: consecutive tickets of a worker, "freely".

        `rests`: the rule waits for other workers although tickets are dealt freely; see `resting`. `pauses`: see above.
        """
        if min(batches_per_epoch, num_tickets, workers, most_held) < 1 or warm_start < 0:
            raise ValueError(
                "a scheduler needs at least one batch, ticket, worker and ticket to hold, and no negative warm start; "
                f"got {batches_per_epoch=}, {num_tickets=}, {workers=}, {most_held=}, {warm_start=}"
            )
        if deals == "evenly":
            _check_even(batches_per_epoch, num_tickets, workers, warm_start)
        self.batches_per_epoch, self.num_tickets, self.deals = batches_per_epoch, num_tickets, deals
        self._warm_start, self._most_held = warm_start, most_held
        run = min(run, max(1, batches_per_epoch // workers))
        freely: Supply = Freely() if run == 1 else InRuns(run, batches_per_epoch)
        self._supply: Supply = freely if deals == "freely" else Evenly(workers)
        self._workers: dict[int, _Worker] = {}
        self._waiting: set[int] = set()  # workers with an open ask
        self._lives: dict[int, int] = {}
        self._again: list[int] = []
        self._done = Ranges()
        self._stopped = self._closed = False
        self.rests, self._pauses = rests, pauses
        self._holds_back = False
        self._uneven = False
        self._first_epoch = 0  # where epochs are apart: the first requested one
        self._changed = False  # whether an ask that waits may have an answer now
        self._step = workers if deals == "evenly" else 1
        self._barrier: int | None = None  # no ticket from this one on is dealt for now
        self._save_at: int | None = None  # nor from this one on, before every shard knows of the snapshot there
        self._resting = frozenset[int]()  # the resting workers when that snapshot was ordered

    # -------------------------------------------------------------------------------------------------------- events

    def join(self, worker: int, incarnation: int) -> bool:
        """`worker` begins its life `incarnation`; an earlier one is lost. False if this life, or a later, is over."""
        known = self._workers.get(worker)
        if known is not None and known.incarnation == incarnation:
            return True
        if incarnation <= self._lives.get(worker, -1):
            return False
        if known is not None:
            self.lose(worker)
        self._lives[worker] = incarnation
        self._workers[worker] = _Worker(incarnation, self._first_epoch)
        self._supply.join(worker)
        self._uneven |= self._supply.uneven
        self._changed = True
        return True

    def lose(self, worker: int) -> None:
        """`worker` is lost, or never came: its tickets are dealt again, before all others."""
        life = self._workers.pop(worker, None)
        self._waiting.discard(worker)
        for number in () if life is None else life.held:
            heappush(self._again, number)
        self._supply.lose(worker)
        self._uneven |= self._supply.uneven or (life is not None and bool(life.held))
        self._changed = True
        self._close()

    def retire(self, worker: int) -> None:
        """`worker` wants no tickets after its next ask; it gets its order to finish when all others want none."""
        if (life := self._workers.get(worker)) is not None:
            life.retires = True

    def ask(self, worker: int, incarnation: int, sequence: int, done: Sequence[int]) -> Deal | None:
        """The answer to ask number `sequence` (1, 2, …), or None: it will come from `due`, or the ask is out of date.

        `done`: tickets that every shard has acknowledged; tickets that the worker does not hold are ignored.
        """
        life = self._workers.get(worker)
        if life is None or life.incarnation != incarnation or sequence < max(1, life.sequence):
            return None
        self._note_done(life, done)
        if sequence > life.sequence:
            life.sequence, life.answer = sequence, None
            self._waiting.add(worker)
        if life.retires:
            self._release(worker, life)
        return life.answer if life.answer is not None else self._answer(worker, life)

    def leave(self, worker: int, done: Sequence[int]) -> None:
        """`worker` goes, as it was ordered to. `done`: the tickets that are done since its last ask."""
        if (life := self._workers.get(worker)) is not None:
            self._note_done(life, done)
            self.lose(worker)

    def due(self) -> list[Deal]:
        """Answers that have become possible, in the order of workers. Each is given once; a repeated ask has it too."""
        if not self._changed:
            return []
        self._changed = False
        answers = [self._answer(worker, self._workers[worker]) for worker in sorted(self._waiting)]
        return [deal for deal in answers if deal is not None]

    def stop(self) -> None:
        """Deal nothing more, and order workers to finish. "evenly" the step that was begun is dealt to its end.

        A run with every ticket done has not been stopped: its weights are the last batch's.
        """
        if self.finished:
            return
        self._stopped = self._changed = True
        if self.deals == "evenly":
            self.num_tickets = self._whole_steps

    def pause(self, at: int = 0) -> None:
        """Deal no ticket from `at` on, or from now on if those were dealt already, until `resume`; then comes `quiet`.

        "evenly" the step that was begun is dealt to its end, so that no worker waits for a push that will not come.
        """
        first = max(at, self._supply.frontier)
        self._barrier = -(-first // self._step) * self._step
        self._changed = True

    def resume(self) -> None:
        """Go on."""
        self._barrier = None
        self._changed = True

    def save(self) -> int:
        """The number of decided batches where all shards, dealt evenly, can save the same; dealt freely, 0:
        immediately.

        It is the end of the step after the newest: no ticket behind it is dealt before `saved`, and until then there
        is a step to do. So no shard can be further when the order to save comes, and workers wait only where shards
        take longer to answer than a step lasts.
        """
        if self.deals == "freely" or self.finished:
            return 0
        self._resting = frozenset(self.resting)
        self._save_at = min(self._whole_steps + self._step, self.num_tickets)
        return self._save_at

    def saved(self) -> None:
        """Every shard knows where it is to save."""
        self._save_at = None
        self._changed = True

    def hold_back(self, on: bool) -> None:
        """True if workers must finish their tickets before they get more."""
        if on != self._holds_back:
            self._holds_back, self._changed = on, True

    def _release(self, worker: int, life: _Worker) -> None:
        """Deal a retired worker's tickets to others."""
        for number in life.held:
            heappush(self._again, number)
        life.held.clear()
        self._supply.lose(worker)
        self._uneven = self._changed = True
        self._close()

    def _close(self) -> None:
        """End a run when all workers have retired or are lost."""
        lives = self._workers.values()
        self._closed |= bool(lives) and all(life.retires and not life.held for life in lives)

    def _note_done(self, life: _Worker, done: Sequence[int]) -> None:
        if not done:
            return
        before = self.finished, self._is_warm
        for number in done:
            if life.held.pop(number, None) is not None:
                self._done.add(number)
        if before != (self.finished, self._is_warm) or self._pauses:
            self._changed = True

    # ------------------------------------------------------------------------------------------------------- answers

    def _answer(self, worker: int, life: _Worker) -> Deal | None:
        chosen = self._choose(worker, life)
        if chosen is None:
            return None
        order, tickets = chosen
        life.held.update((ticket.number, ticket) for ticket in tickets)
        life.answer = Deal(worker, life.incarnation, life.sequence, order, tickets)
        self._waiting.discard(worker)
        life.epoch += order == "pause"
        return life.answer

    def _choose(self, worker: int, life: _Worker) -> tuple[Order, tuple[Ticket, ...]] | None:
        stops = self._stopped and self.deals == "freely"
        if self.finished or (stops and not self._pauses):
            return "stop" if self._stopped and self._pauses else "finish", ()
        if life.retires:
            return None
        if self._holds_back and life.held:
            return "wait", ()
        end = (life.epoch + 1) * self.batches_per_epoch if self._pauses else self.num_tickets
        if not stops and len(life.held) < self._most_held and (self._is_warm or worker == self._first):
            ticket = self._next_ticket(worker, min(end, self._limit))
            if ticket is not None:
                return "train", (ticket,)
        if life.held:
            return "wait", ()
        return ("pause", ()) if self._pauses and self._done.covers(0, end - 1) else None

    def _next_ticket(self, worker: int, end: int) -> Ticket | None:
        """`end`: the first ticket that the worker may not have yet."""
        if self._again and self._again[0] < end:
            return self._ticket(heappop(self._again), again=True)
        fresh = self._supply.take(worker, end)
        return None if fresh is None else self._ticket(fresh.number, again=fresh.reassigned)

    def _ticket(self, number: int, again: bool) -> Ticket:
        return Ticket(number, *divmod(number, self.batches_per_epoch), again=again)

    @property
    def _end(self) -> int:
        """The first ticket that is not dealt in this run, or before the end of a pause."""
        return self.num_tickets if self._barrier is None else min(self.num_tickets, self._barrier)

    @property
    def _limit(self) -> int:
        """The first ticket that may not be dealt yet."""
        return self._end if self._save_at is None else min(self._end, self._save_at)

    @property
    def _is_warm(self) -> bool:
        return not self._warm_start or len(self._done) >= self._warm_start

    @property
    def _first(self) -> int:
        """The lowest worker that has asked in this life: a worker that is still starting delays no other."""
        return min(worker for worker, life in self._workers.items() if life.sequence)

    # ----------------------------------------------------------------------------------------------------- questions

    @property
    def finished(self) -> bool:
        """True if every ticket is done; in a stopped run, every ticket that was dealt and is not lost."""
        if self._closed:
            return True
        if self._stopped and self.deals == "freely":
            return not any(life.held for life in self._workers.values())
        return self._done.covers(0, self.num_tickets - 1)

    @property
    def stopped(self) -> bool:
        """True if the run was stopped before its end."""
        return self._stopped

    @property
    def quiet(self) -> bool:
        """True in a pause once every ticket is done and every worker waits without one."""
        if self._barrier is None or self.finished or not self._done.covers(0, self._barrier - 1):
            return False
        return not any(life.held or life.answer is not None for life in self._workers.values())

    @property
    def _whole_steps(self) -> int:
        """The number of batches in the steps begun."""
        return min(-(-self._supply.frontier // self._step) * self._step, self.num_tickets)

    @property
    def epoch(self) -> int:
        """The number of epochs, from the first on, with all tickets done."""
        gaps = self._done.missing(0, self.num_tickets - 1)
        return (gaps[0][0] if gaps else self.num_tickets) // self.batches_per_epoch

    @property
    def done(self) -> tuple[Range, ...]:
        """The tickets that are done, as ranges [first, last]."""
        return self._done.tuples

    @property
    def resting(self) -> tuple[int, ...]:
        """Workers that rules must not wait for: they get no ticket unless another is lost. See the module's text.

        Empty where tickets are dealt evenly and no worker was lost, and where they are dealt freely without `rests`.
        A worker that awaits only the order to save has work: a step of the others without it would be another step.
        """
        can_rest = self._uneven if self.deals == "evenly" else self.rests
        if not can_rest or self._done.covers(0, self._end - 1):
            return ()
        return tuple(sorted(self._waiting if self._save_at is None else self._waiting & self._resting))

    def holders(self) -> dict[int, int]:
        """Ticket -> the worker that holds it."""
        return {number: worker for worker, life in self._workers.items() for number in life.held}

    # --------------------------------------------------------------------------------------------------------- state

    def dump(self) -> bytes:
        """The state that a full restart needs. Workers are not in it: after a restart all of them are new."""
        return encoded(self.batches_per_epoch, self._supply.frontier, self._done.tuples)

    def load(self, state: bytes, applied: Sequence[Sequence[Range]] = ()) -> None:
        """Go on from `state`, in a new scheduler before any worker has joined. Tickets once dealt are dealt `again`.

        `applied`: for each shard the tickets in the snapshot that it resumes from (`Statistics.tickets`). A ticket is
        then done if every shard has it. A shard that has more of them than the others drops these when they come again.
        Where only whole steps are missing, "evenly" deals them to the workers that had them before. The run's end, the
        kind of dealing and the number of workers may differ from the saved run's, the batches of an epoch may not.
        """
        if self._workers or self._supply.frontier:
            raise ValueError("this scheduler has begun already; load into a new one")
        saved = decoded(state, self.batches_per_epoch)
        left = remaining(saved, applied, self._step if self.deals == "evenly" else 0)
        self._done, self._first_epoch = left.done, left.frontier // self.batches_per_epoch
        self._again = [*left.again, *self._supply.skip_to(left.frontier)]
        heapify(self._again)
        self._uneven = True


def _check_even(batches_per_epoch: int, num_tickets: int, workers: int, warm_start: int) -> None:
    if batches_per_epoch % workers or num_tickets % workers:
        raise ValueError(
            f"dealing evenly needs multiples of {workers} workers, got {batches_per_epoch} batches an epoch and "
            f"{num_tickets} in all; spread an epoch's last samples over all workers"
        )
    if warm_start:
        raise ValueError(f"dealing evenly cannot warm start with one worker, got warm_start={warm_start}; deal freely")
