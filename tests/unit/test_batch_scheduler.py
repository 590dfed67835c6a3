"""Dealing: every ticket is done once, whoever is lost; one owner at a time; no worker is stuck."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import pytest

from polytempo.server.coordinator.batch_scheduler import BatchScheduler
from polytempo.server.message import Deal
from unit.crowd import Crowd


def free(batches: int, tickets: int, workers: int, **settings: int | bool | None) -> Crowd:
    return Crowd(BatchScheduler(batches, tickets, "freely", workers, **settings), range(workers))  # type: ignore[arg-type]


def even(batches: int, tickets: int, workers: int, **settings: int | bool | None) -> Crowd:
    return Crowd(BatchScheduler(batches, tickets, "evenly", workers, **settings), range(workers))  # type: ignore[arg-type]


# ---- stories ----


def test_two_free_workers_and_an_epoch_of_three() -> None:
    crowd = free(3, 6, 2)
    assert [crowd.ask(0), crowd.ask(1), crowd.ask(1, 1)] == ["train 0", "train 1", "train 2"]
    assert crowd.ask(1, 1) == "train 3", "an epoch ends, worker 0 is not ready, and no other worker waits"
    assert [crowd.ask(0, 1), crowd.ask(1, 1)] == ["train 4", "train 5"]
    assert crowd.scheduler.epoch == 1
    assert crowd.ask(1, 1) is None, "nothing is left, and worker 0 is not ready"
    assert crowd.ask(0, 1) == "finish"
    assert crowd.told[-1] == (1, "finish"), "who waited is told without asking again"
    assert crowd.scheduler.finished


def test_runs_of_two_workers_and_an_epoch_of_seven() -> None:
    crowd = free(7, 14, 2, run=9)  # at most an epoch's part of a worker
    assert [crowd.ask(0), crowd.ask(1), crowd.ask(1, 1), crowd.ask(0, 1)] == [
        "train 0",
        "train 3",
        "train 4",
        "train 1",
    ]
    assert [crowd.ask(1, 1), crowd.ask(1, 1)] == ["train 5", "train 6"], "the epoch's last run is shorter"
    assert crowd.ask(1, 1) == "train 2", "the rest of the other worker's run"
    assert [crowd.ask(0, 1), crowd.ask(1, 1)] == ["train 7", "train 10"]
    crowd.lose(0)
    assert [crowd.ask(1, 1), crowd.ask(1, 1), crowd.ask(1, 1)] == ["again 7", "train 11", "train 12"]
    assert [crowd.ask(1, 1), crowd.ask(1, 1)] == ["train 8", "train 9"], "the lost worker's run"


def test_evenly_each_place_has_its_own_batches() -> None:
    crowd = even(6, 6, 3)
    assert [crowd.ask(2), crowd.ask(2, 1), crowd.ask(2, 1)] == ["train 2", "train 5", None]
    assert [crowd.ask(0), crowd.ask(1), crowd.ask(1, 1), crowd.ask(0, 1)] == [
        "train 0",
        "train 1",
        "train 4",
        "train 3",
    ]
    assert [crowd.ask(1, 1), crowd.scheduler.resting, crowd.ask(0, 1)] == [None, (), "finish"]


def test_who_prefetches_holds_two_and_is_then_told_to_push() -> None:
    crowd = free(8, 8, 1)
    assert [crowd.ask(0), crowd.ask(0), crowd.ask(0)] == ["train 0", "train 1", "wait"]
    assert crowd.ask(0, 2) == "train 2"
    patient = free(8, 8, 1, most_held=4)
    assert [patient.ask(0) for _ in range(5)] == ["train 0", "train 1", "train 2", "train 3", "wait"]


def test_at_the_end_of_the_run_accrued_gradients_are_pushed() -> None:
    """Push every five, a run of three: without "wait" it would never end."""
    crowd = free(3, 3, 1, most_held=7)
    assert [crowd.ask(0), crowd.ask(0), crowd.ask(0), crowd.ask(0)] == ["train 0", "train 1", "train 2", "wait"]
    assert crowd.ask(0, 3) == "finish"


def test_tickets_of_the_lost_come_again_and_before_all_others() -> None:
    crowd = free(9, 9, 2, most_held=3)
    assert [crowd.ask(1), crowd.ask(1), crowd.ask(0)] == ["train 0", "train 1", "train 2"]
    crowd.lose(1)
    assert [crowd.ask(0, 1), crowd.ask(0, 1), crowd.ask(0, 1)] == ["again 0", "again 1", "train 3"]


def test_who_waits_is_dealt_what_another_loses() -> None:
    crowd = free(2, 2, 2)
    assert [crowd.ask(1), crowd.ask(0), crowd.ask(0, 1)] == ["train 0", "train 1", None]
    crowd.lose(1)
    assert crowd.told[-1] == (0, "again 0")
    assert crowd.ask(0, 1) == "finish"


def test_evenly_the_others_serve_an_empty_place_and_then_rest() -> None:
    crowd = even(8, 8, 4)
    assert [crowd.ask(worker) for worker in range(4)] == ["train 0", "train 1", "train 2", "train 3"]
    crowd.lose(3)
    assert [crowd.ask(0, 1), crowd.ask(1, 1), crowd.ask(2, 1)] == ["again 3", "train 5", "train 6"]
    assert [crowd.ask(1, 1), crowd.ask(0, 1), crowd.ask(2, 1)] == ["again 7", "train 4", None]
    assert crowd.scheduler.resting == (2,), "no rule may wait for a push of worker 2"
    assert [crowd.ask(0, 1), crowd.scheduler.resting] == [None, (0, 2)]
    crowd.ask(1, 1)
    assert crowd.told[-2:] == [(0, "finish"), (2, "finish")]
    assert crowd.scheduler.resting == ()


def test_a_worker_that_comes_back_has_its_place_again() -> None:
    crowd = even(9, 9, 3)
    crowd.lose(1)  # it never came
    assert [crowd.ask(0), crowd.ask(0, 1)] == ["train 0", "again 1"]
    crowd.join(1)
    assert [crowd.ask(1), crowd.ask(0, 1), crowd.ask(1, 1)] == ["train 4", "train 3", "train 7"]


def test_a_worker_without_a_place_inherits_one() -> None:
    crowd = even(6, 6, 2)
    crowd.join(5)
    assert [crowd.ask(0), crowd.ask(1), crowd.ask(5), crowd.scheduler.resting] == ["train 0", "train 1", None, (5,)]
    crowd.lose(0)
    assert crowd.told[-1] == (5, "again 0")
    assert [crowd.ask(5, 1), crowd.ask(1, 1), crowd.scheduler.resting] == ["train 2", "train 3", ()]


def test_in_a_warm_start_one_works_alone() -> None:
    crowd = free(8, 8, 3, warm_start=2)
    assert [crowd.ask(0), crowd.ask(1), crowd.ask(2), crowd.ask(0, 1)] == ["train 0", None, None, "train 1"]
    crowd.lose(0)
    assert crowd.told[-1] == (1, "again 1"), "the next one goes on alone"
    assert crowd.ask(1, 1) == "train 2"
    assert crowd.told[-1] == (2, "train 3"), "warm"


def test_repeats_get_the_same_answer_and_what_is_out_of_date_none() -> None:
    scheduler = BatchScheduler(9, 9, "freely", 2)
    assert scheduler.ask(0, 1, 1, ()) is None, "a stranger"
    assert scheduler.join(0, 1)
    first = scheduler.ask(0, 1, 1, ())
    assert first is not None
    assert scheduler.ask(0, 1, 1, ()) is first
    second = scheduler.ask(0, 1, 2, (0,))
    assert scheduler.ask(0, 1, 1, ()) is None, "older"
    assert scheduler.ask(0, 1, 2, (0,)) is second
    assert scheduler.join(0, 2), "a new life: the old one is lost"
    assert scheduler.ask(0, 1, 3, (1,)) is None
    assert not scheduler.join(0, 1), "that life is over"
    again = scheduler.ask(0, 2, 1, (1,))
    assert again is not None
    assert again.tickets[0].again
    assert scheduler.done == ((0, 0),), "ticket 1 was pushed by no holder of it"


def test_stop_tells_everybody_to_finish() -> None:
    crowd = free(2, 20, 2, warm_start=20)
    assert [crowd.ask(0), crowd.ask(1)] == ["train 0", None]
    crowd.scheduler.stop()
    crowd.hear()
    assert crowd.told[-1] == (1, "finish")
    assert [crowd.ask(0), crowd.scheduler.finished, crowd.scheduler.stopped] == ["finish", False, True]
    crowd.scheduler.leave(0, [0])
    assert (crowd.scheduler.finished, crowd.scheduler.done) == (True, ((0, 0),))


def test_stop_ends_the_step_that_was_begun_where_tickets_are_dealt_evenly() -> None:
    """A worker with a ticket would wait for ever for the gradients of workers ordered to finish."""
    crowd = even(3, 30, 3)
    assert [crowd.ask(0), crowd.ask(1), crowd.ask(2), crowd.ask(0)] == ["train 0", "train 1", "train 2", "train 3"]
    crowd.scheduler.stop()
    assert not crowd.scheduler.finished
    assert [crowd.ask(1, 1), crowd.ask(2, 1)] == ["train 4", "train 5"]
    assert [crowd.ask(0, 2), crowd.ask(1, 1), crowd.ask(2, 1)] == [None, None, "finish"]
    assert crowd.told[-2:] == [(0, "finish"), (1, "finish")]
    assert (crowd.scheduler.stopped, crowd.scheduler.done) == (True, ((0, 5),))


def test_nothing_is_dealt_behind_a_snapshot_before_every_shard_knows_of_it() -> None:
    """Else a shard that hears of it late has more than the others, and a resume mixes two steps."""
    crowd = even(2, 20, 2)
    assert [crowd.ask(0), crowd.ask(1), crowd.scheduler.save()] == ["train 0", "train 1", 4]
    assert [crowd.ask(0, 1), crowd.ask(1, 1)] == ["train 2", "train 3"], "there is a step to do meanwhile"
    assert [crowd.ask(0), crowd.ask(1)] == ["wait", "wait"]
    assert [crowd.ask(0, 1), crowd.ask(1, 1)] == [None, None]
    crowd.scheduler.saved()
    crowd.hear()
    assert crowd.told[-2:] == [(0, "train 4"), (1, "train 5")]
    assert free(2, 20, 2).scheduler.save() == 0


def test_a_worker_that_awaits_a_snapshot_alone_does_not_rest() -> None:
    """Else a rule makes the others' next step without it. In a resumed run places count as uneven."""
    scheduler = BatchScheduler(2, 20, "evenly", 2)
    scheduler.load(even(2, 20, 2).scheduler.dump())
    crowd = Crowd(scheduler, (0, 1, 5))  # 5 is a spare worker
    assert [crowd.ask(5), crowd.scheduler.save(), crowd.ask(0), crowd.ask(1)] == [None, 2, "train 0", "train 1"]
    assert [crowd.ask(0, 1), crowd.scheduler.resting] == [None, (5,)], "worker 0 gets its next ticket soon"
    crowd.scheduler.saved()
    crowd.hear()
    assert (crowd.told[-1], crowd.scheduler.resting) == ((0, "train 2"), (5,))


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: BatchScheduler(7, 14, "evenly", 2), "7 batches an epoch and 14 in all"),
        (lambda: BatchScheduler(8, 13, "evenly", 2), "8 batches an epoch and 13 in all"),
        (lambda: BatchScheduler(8, 16, "evenly", 2, warm_start=1), "warm_start=1; deal freely"),
        (lambda: BatchScheduler(0, 16, "freely", 2), "batches_per_epoch=0"),
        (lambda: BatchScheduler(8, 16, "freely", 2, most_held=0), "most_held=0"),
    ],
)
def test_impossible_schedulers_are_refused(make: Callable[[], BatchScheduler], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        make()


# ---- full restarts ----


def test_after_a_restart_what_was_dealt_comes_again() -> None:
    crowd = free(4, 12, 2)
    assert [crowd.ask(0), crowd.ask(1), crowd.ask(0, 1)] == ["train 0", "train 1", "train 2"]
    scheduler = BatchScheduler(4, 12, "freely", 3)
    scheduler.load(crowd.scheduler.dump())
    later = Crowd(scheduler, range(3))
    later.done = [0]
    assert [later.ask(2), later.ask(0), later.ask(1)] == ["again 1", "again 2", "train 3"]


def test_a_restart_goes_back_to_what_every_shard_has() -> None:
    """Shard 0's snapshot lacks ticket 3; shard 1's has ticket 6, which the coordinator does not know."""
    crowd = free(4, 12, 1, most_held=9)
    told = [crowd.ask(0, pushes) for pushes in (0, 1, 1, 1, 1, 1)]
    assert told == ["train 0", "train 1", "train 2", "train 3", "train 4", "train 5"]
    scheduler = BatchScheduler(4, 12, "freely", 1)
    scheduler.load(crowd.scheduler.dump(), applied=[((0, 2), (4, 4)), ((0, 4), (6, 6))])
    later = Crowd(scheduler, [0])
    later.done = [0, 1, 2, 4]
    told = [later.ask(0), later.ask(0, 1), later.ask(0, 1), later.ask(0, 1)]
    assert told == ["again 3", "again 5", "again 6", "train 7"]


@pytest.mark.parametrize(
    ("applied", "told"),
    [
        ([((0, 5),), ((0, 8),)], ["train 6", "train 7", "train 8"]),  # whole steps: one shard is a step ahead
        ([((0, 6),), ((0, 8),)], ["again 7", "again 8", "train 11"]),  # a step with a lost worker
    ],
)
def test_after_a_restart_whole_steps_come_as_they_came_first(
    applied: list[tuple[tuple[int, int], ...]], told: list[str]
) -> None:
    scheduler = BatchScheduler(12, 12, "evenly", 3)
    scheduler.load(BatchScheduler(12, 12, "evenly", 3).dump(), applied)
    crowd = Crowd(scheduler, range(3))
    crowd.done = list(range(applied[0][0][1] + 1))
    assert [crowd.ask(worker) for worker in range(3)] == told


def test_a_finished_run_stays_finished_unless_it_is_longer() -> None:
    crowd = free(4, 6, 1)
    while crowd.told[-1:] != [(0, "finish")]:
        crowd.ask(0, len(crowd.held[0]))
    same, longer = BatchScheduler(4, 6, "freely", 1), BatchScheduler(4, 8, "freely", 1)
    same.load(crowd.scheduler.dump())
    longer.load(crowd.scheduler.dump())
    assert (same.finished, longer.finished) == (True, False)
    assert Crowd(longer, [0]).ask(0) == "train 6"


def test_only_a_schedulers_own_state_is_loaded() -> None:
    with pytest.raises(ValueError, match="not a batch scheduler's state"):
        BatchScheduler(4, 8, "freely", 1).load(b"\x93nonsense")
    with pytest.raises(ValueError, match="4 batches an epoch, this one 5"):
        BatchScheduler(5, 10, "freely", 1).load(BatchScheduler(4, 8, "freely", 1).dump())


# --- epochs apart


def apart(deals: Literal["freely", "evenly"], workers: int = 2, batches: int = 4) -> BatchScheduler:
    found = BatchScheduler(batches, batches << 20, deals, workers, most_held=8, pauses=True)
    for worker in range(workers):
        found.join(worker, 1)
    return found


def order(deal: Deal | None) -> tuple[str, list[int]] | None:
    return None if deal is None else (deal.order, [ticket.number for ticket in deal.tickets])


def test_an_epoch_ends_for_each_worker_when_all_of_it_is_done() -> None:
    scheduler = apart("freely")
    assert order(scheduler.ask(0, 1, 1, ())) == ("train", [0])
    assert order(scheduler.ask(1, 1, 1, ())) == ("train", [1])
    assert order(scheduler.ask(0, 1, 2, (0,))) == ("train", [2])
    assert order(scheduler.ask(0, 1, 3, (2,))) == ("train", [3])
    assert order(scheduler.ask(0, 1, 4, ())) == ("wait", [])
    assert scheduler.ask(0, 1, 5, (3,)) is None  # worker 1 has ticket 1
    assert order(scheduler.ask(1, 1, 2, (1,))) == ("pause", [])
    assert [order(deal) for deal in scheduler.due()] == [("pause", [])]
    assert order(scheduler.ask(1, 1, 2, (1,))) == ("pause", [])  # the same ask again
    assert order(scheduler.ask(1, 1, 3, ())) == ("train", [4])  # and the next is for the next epoch
    assert not scheduler.finished


def test_a_lost_workers_batch_is_done_within_its_epoch() -> None:
    scheduler = apart("freely", batches=2)
    assert order(scheduler.ask(0, 1, 1, ())) == ("train", [0])
    assert order(scheduler.ask(1, 1, 1, ())) == ("train", [1])
    assert scheduler.ask(0, 1, 2, (0,)) is None
    scheduler.lose(1)
    (deal,) = scheduler.due()
    assert order(deal) == ("train", [1])
    assert deal.tickets[0].again
    assert order(scheduler.ask(0, 1, 3, (1,))) == ("pause", [])


@pytest.mark.parametrize("deals", ["freely", "evenly"])
def test_a_worker_that_retires_gives_back_what_it_holds_and_waits_for_the_others(
    deals: Literal["freely", "evenly"],
) -> None:
    scheduler = apart(deals, batches=2)
    assert order(scheduler.ask(0, 1, 1, ())) == ("train", [0])
    assert order(scheduler.ask(1, 1, 1, ())) == ("train", [1])
    scheduler.retire(1)
    assert scheduler.ask(1, 1, 2, ()) is None
    assert order(scheduler.ask(0, 1, 2, (0,))) == ("train", [1])
    assert order(scheduler.ask(0, 1, 3, (1,))) == ("pause", [])
    scheduler.retire(0)
    assert order(scheduler.ask(0, 1, 4, ())) == ("finish", [])
    assert [order(deal) for deal in scheduler.due()] == [("finish", [])]
    assert scheduler.finished


@pytest.mark.parametrize("deals", ["freely", "evenly"])
def test_a_stop_of_a_loop_is_told_when_all_dealt_tickets_are_done(deals: Literal["freely", "evenly"]) -> None:
    machine = BatchScheduler(4, 400, deals, workers=2, pauses=True)
    for worker in (0, 1):
        assert machine.join(worker, 1)
        assert orders([machine.ask(worker, 1, 1, ())]) == ["train"]
    machine.stop()
    assert orders([machine.ask(0, 1, 2, ())]) == ["wait"]
    assert machine.ask(0, 1, 3, (0,)) is None
    assert not machine.finished
    assert orders([machine.ask(1, 1, 2, (1,))]) == ["stop"]
    assert orders(machine.due()) == ["stop"]
    assert machine.done == ((0, 1),)


def orders(deals: list[Deal | None]) -> list[str]:
    return ["" if deal is None else deal.order for deal in deals]
