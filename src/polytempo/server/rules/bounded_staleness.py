"""Bounded staleness (SSP): no worker may be more than `bound` steps ahead of the slowest."""

from __future__ import annotations

from polytempo.core.calls.call_name import call_name
from polytempo.core.rule import Action, Answer, Arrival, Rule, RuleState, Situation, Staleness
from polytempo.server.rules.asynchronous import applied
from polytempo.server.rules.staleness import constant


def within(bound: int, scale: Staleness = constant) -> Rule:
    """Pushes as `on_arrival`; a pull at clock c is answered once every member has pushed c - `bound` steps.

    So a worker that reads at clock c sees every gradient of the steps up to c - bound, and perhaps newer ones; between
    two pulls a worker does not wait. bound = 0: all wait for all, though each gradient is an update of its own.

    Clocks are compared from where a worker began: when it joins, its clock is that of the slowest other member, with
    any number in its first request. A worker that joins, or comes back, delays no other for the steps that it missed.

    Workers that push every k-th step only need bound >= k - 1; else all wait for gradients that no worker sends.

    Source: Q. Ho et al., "More effective distributed ML via a stale synchronous parallel parameter server", NIPS
    2013, section 3. There the worker's cache may answer a read; here every pull comes to the shard.
    """
    if bound < 0:
        raise ValueError(f"within needs bound >= 0 steps, got {bound}")

    def receive(state: RuleState, arrival: Arrival, situation: Situation) -> tuple[RuleState, list[Action]]:
        before, worker, actions = min(state["counts"], default=0), arrival.worker, list[Action]()
        state = _advanced(state, arrival)
        pulls, slowest = state["pulls"], min(state["counts"], default=0)
        if arrival.kind == "push":
            actions += applied(arrival, situation, scale)
            if worker not in pulls:  # answers keep the order of requests, so none overtakes a pull that waits
                actions.append(Answer(worker))
        looked_at = {worker} & pulls.keys() if slowest == before else pulls  # the others wait as long as they did
        released = sorted(m for m in looked_at if pulls[m] - bound <= slowest)
        if released:
            state = {**state, "pulls": {m: clock for m, clock in pulls.items() if m not in released}}
        return state, [*actions, *map(Answer, released)]

    def init() -> RuleState:
        return {"clocks": {}, "counts": {}, "offsets": {}, "pulls": {}}

    return Rule(call_name(within, locals()), init, receive)


def _advanced(state: RuleState, arrival: Arrival) -> RuleState:
    """The members' clocks, how many have each, the offsets of their own numbers from these, and the pulls that wait,
    after `arrival`. What does not change is not copied."""
    worker, clocks, offsets, pulls = arrival.worker, state["clocks"], state["offsets"], state["pulls"]
    if arrival.kind == "left":
        offsets, pulls = _without(offsets, worker), _without(pulls, worker)
        return {**_with_clock(state, worker, None), "offsets": offsets, "pulls": pulls}
    if arrival.kind == "joined":
        return _with_clock(state, worker, clocks.get(worker, min(state["counts"], default=0)))
    if worker not in offsets:
        finished = arrival.clock - (arrival.kind != "pull")  # a push is of a step that is only now finished
        state = {**state, "offsets": {**offsets, worker: clocks[worker] - finished}}
    clock = arrival.clock + state["offsets"][worker]
    if arrival.kind == "pull":
        return {**state, "pulls": {**pulls, worker: max(clock, pulls.get(worker, 0))}}
    return _with_clock(state, worker, max(clock, clocks[worker]))


def _with_clock(state: RuleState, worker: int, clock: int | None) -> RuleState:
    """The state with this clock of the worker; None: it has none."""
    clocks, counts = state["clocks"], dict(state["counts"])
    if (before := clocks.get(worker)) == clock:
        return state
    if before is not None:
        counts[before] -= 1
    if clock is not None:
        counts[clock] = counts.get(clock, 0) + 1
    clocks = _without(clocks, worker) if clock is None else {**clocks, worker: clock}
    return {**state, "clocks": clocks, "counts": {at: count for at, count in counts.items() if count}}


def _without(known: dict[int, int], worker: int) -> dict[int, int]:
    return {m: value for m, value in known.items() if m != worker} if worker in known else known
