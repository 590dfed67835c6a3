"""Dealing while events come in any order: every ticket is done once, and no worker waits for ever."""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from polytempo.server.coordinator.batch_scheduler import BatchScheduler
from some_cases import examples
from unit.crowd import Crowd, Deals

# ---- any order of events ----


@settings(max_examples=examples(150))
@given(
    seed=st.integers(0, 2**32),
    deals=st.sampled_from(["freely", "evenly"]),
    workers=st.integers(1, 4),
    steps=st.integers(1, 4),
    epochs=st.integers(1, 3),
    restarts=st.booleans(),
)
def test_every_ticket_is_done_once_whatever_happens(
    seed: int, deals: Deals, workers: int, steps: int, epochs: int, restarts: bool
) -> None:
    rng = random.Random(seed)
    batches = steps * workers
    tickets = batches * epochs
    warm, run = 0 if deals == "evenly" else rng.randrange(4), rng.randint(1, 4)

    def make() -> BatchScheduler:
        return BatchScheduler(batches, tickets, deals, workers, warm, most_held=rng.randint(1, 5), run=run)

    crowd = Crowd(make(), range(workers))
    for _ in range(rng.randrange(120)):
        disturb(crowd, rng, workers + 2)
        if restarts and rng.random() < 0.02:
            crowd = restarted(crowd, make())
    for worker in {*range(workers)} - crowd.held.keys():  # a place without a worker is lost
        crowd.scheduler.lose(worker)
    if not crowd.held:
        crowd.join(7)
    bring_to_its_end(crowd, rng)
    assert sorted(crowd.done) == list(range(tickets))
    assert crowd.scheduler.done == ((0, tickets - 1),)


def disturb(crowd: Crowd, rng: random.Random, most_workers: int) -> None:
    """One random event."""
    worker, event = rng.randrange(most_workers), rng.random()
    if worker not in crowd.held:
        crowd.join(worker)
    elif event < 0.15:
        crowd.lose(worker)
    elif worker in crowd.waiting and event < 0.5:
        life = worker, crowd.lives[worker]
        assert crowd.scheduler.ask(*life, crowd.asked[life], ()) is None, "a repeat has no other answer than `due`"
        assert crowd.scheduler.ask(worker, life[1] - 1, crowd.asked[life] + 1, range(99)) is None
    elif worker not in crowd.waiting:
        crowd.ask(worker, rng.randint(0, len(crowd.held[worker])))


def restarted(crowd: Crowd, scheduler: BatchScheduler) -> Crowd:
    """All are lost, the coordinator too."""
    scheduler.load(crowd.scheduler.dump())
    later = Crowd(scheduler)
    later.lives, later.done = crowd.lives, crowd.done
    return later


def bring_to_its_end(crowd: Crowd, rng: random.Random) -> None:
    for _ in range(1000):
        if crowd.scheduler.finished:
            return
        free_workers = sorted(crowd.held.keys() - crowd.waiting)
        assert free_workers, "all wait, and nobody for anything"
        worker = rng.choice(free_workers)
        crowd.ask(worker, len(crowd.held[worker]))
    raise AssertionError("no end")


@settings(max_examples=examples(60))
@given(seed=st.integers(0, 2**32), workers=st.integers(2, 4), steps=st.integers(1, 5))
def test_a_rule_that_waits_for_all_but_the_resting_never_waits_for_ever(seed: int, workers: int, steps: int) -> None:
    """Hardsync in small: pushes are answered once every member that does not rest has one waiting."""
    rng = random.Random(seed)
    crowd = Crowd(BatchScheduler(workers * steps, workers * steps * 2, "evenly", workers), range(workers))
    pushed, saving = set[int](), False
    for _ in range(1000):
        if crowd.scheduler.finished:
            break
        if len(crowd.held) > 1 and rng.random() < 0.03:
            lost = rng.choice(sorted(crowd.held))
            crowd.lose(lost)
            pushed.discard(lost)
        if rng.random() < 0.1:
            crowd.scheduler.save()
            saving = True
        if pushed and pushed >= crowd.held.keys() - set(crowd.scheduler.resting):
            for worker in sorted(pushed):
                crowd.ask(worker, len(crowd.held[worker]))
            pushed = set()
            continue
        can_act = sorted(crowd.held.keys() - crowd.waiting - pushed)
        if saving and (rng.random() < 0.3 or not can_act):  # every shard knows of a snapshot at some time
            saving = False
            crowd.scheduler.saved()
            crowd.hear()
            continue
        worker = rng.choice(can_act)  # an empty choice is a deadlock
        if crowd.held[worker]:
            pushed.add(worker)
        else:
            crowd.ask(worker)
    assert crowd.scheduler.finished
