"""Asynchronous SGD: an update with every gradient, with every few of them, or within a bound of staleness (SSP)."""

from __future__ import annotations

from polytempo.core.calls.call_name import call_name
from polytempo.core.rule import Action, Add, Answer, Arrival, Rule, RuleState, Situation, Staleness, Update
from polytempo.server.rules.staleness import constant, weighed


def on_arrival(scale: Staleness = constant) -> Rule:
    """θ ← θ - s(τ) η g with each push, τ = the updates since the version that g was computed on; pulls are answered
    immediately.

    That is for plain SGD; any optimizer makes a step with the learning rate s(τ) η on g.

    No worker waits for another. With λ workers of one speed the mean of τ is λ - 1.

    Source: J. Dean et al., "Large scale distributed deep networks", 2012, section 4.1 (Downpour's server). It has no
    s(τ); `inverse` makes it staleness-aware (Zhang et al., 2016).
    """

    def receive(state: RuleState, arrival: Arrival, situation: Situation) -> tuple[RuleState, list[Action]]:
        if arrival.kind == "push":
            return state, [*applied(arrival, situation, scale), *map(Answer, (arrival.worker, *arrival.others))]
        return state, [Answer(arrival.worker)] if arrival.kind == "pull" else []

    return Rule(call_name(on_arrival, locals()), dict, receive, adds_sums=scale is constant)


def in_shares(scale: Staleness = constant) -> Rule:
    """`on_arrival` with 1/λ of the rate, λ = the members at the time: λ pushes move θ as far as one of their mean."""

    def receive(state: RuleState, arrival: Arrival, situation: Situation) -> tuple[RuleState, list[Action]]:
        share = 1 / max(1, len(situation.members))
        if arrival.kind == "push":
            return state, [*applied(arrival, situation, lambda tau: share * scale(tau)), Answer(arrival.worker)]
        return state, [Answer(arrival.worker)] if arrival.kind == "pull" else []

    return Rule(call_name(in_shares, locals()), dict, receive)


def applied(arrival: Arrival, situation: Situation, scale: Staleness) -> list[Action]:
    """An update by this one gradient, or none if its rate is 0."""
    action = weighed(arrival, situation, scale)
    return [action, Update(1.0)] if isinstance(action, Add) else [action]


def within(bound: int, scale: Staleness = constant) -> Rule:
    """Pushes as `on_arrival`; a pull at clock c is answered once every member has pushed c - `bound` steps.

    So a worker that reads at clock c sees every gradient of the steps up to c - bound, and perhaps newer ones; between
    two pulls a worker does not wait. bound = 0: all wait for all, though each gradient is an update of its own.

    Clocks are relative: when a worker joins, its clock is the clock of the slowest other member, with any number in its
    first request. A worker that joins, or comes back, delays no other for the steps that it missed.

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
    after `arrival`. Unchanged parts are not copied."""
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


def softsync(n: int, scale: Staleness = constant, workers: int | None = None) -> Rule:
    """θ ← θ - (1/c) Σ s(τᵢ) ηᵢ gᵢ as soon as c = ⌊λ/n⌋ gradients are there; each rate is scaled by its own τᵢ.

    That is for plain SGD. Any optimizer makes a step with the rate η̄ = (1/c) Σ s(τᵢ) ηᵢ on Σ s(τᵢ) ηᵢ gᵢ / (c η̄), the
    mean in which each gradient counts by its rate; ηᵢ is the job's learning rate at gradient i's batch.

    λ is `workers`, or the number of members at the time. n = 1 is not hardsync: a fast worker may be in an update
    twice, a slow one not at all. n = λ is `on_arrival`, and so is n above the number of members: c is at least 1. Mean
    staleness (λ - 1)/c if every worker is always busy.

    No worker waits: a push is answered once it is in the sum. When the last member leaves, the sum becomes an update,
    and when λ changes the sum is divided by the number of its gradients: no acknowledged gradient is lost or counts
    twice. But while workers stay, up to c - 1 gradients wait in the sum for the next one: also when the model is
    scored, and at the end of a run.

    Source: S. Gupta, W. Zhang and F. Wang, "Model accuracy and runtime tradeoff in distributed deep learning",
    2015, section 3 (Rudra's protocols); s(τ) inside the sum: Zhang et al., 2016, section 3.
    """
    if n < 1:
        raise ValueError(f"softsync needs n >= 1, got {n}")
    if workers is not None and workers < n:
        raise ValueError(f"softsync(n={n}) needs at least {n} workers, got {workers}; c = ⌊λ/n⌋ would be 0")

    def receive(state: int, arrival: Arrival, situation: Situation) -> tuple[RuleState, list[Action]]:
        if arrival.kind == "pull":
            return state, [Answer(arrival.worker)]
        actions: list[Action] = []
        if arrival.kind == "push":
            actions.append(weighed(arrival, situation, scale))
        summed = state + sum(1 + len(arrival.others) for action in actions if isinstance(action, Add))
        learners = (workers or len(situation.members)) if situation.members else 0
        if summed >= max(1, learners // n):
            actions.append(Update(float(summed)))
            summed = 0
        if arrival.kind == "push":
            actions += map(Answer, (arrival.worker, *arrival.others))
        return summed, actions

    return Rule(call_name(softsync, locals()), int, receive, waits_for_several=True, adds_sums=scale is constant)
