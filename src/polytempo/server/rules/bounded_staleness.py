"""Bounded staleness (SSP): no worker may be more than `bound` steps ahead of the slowest."""

from __future__ import annotations

from polytempo.core.call_name import call_name
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
        state, worker, actions = _advanced(state, arrival, situation), arrival.worker, list[Action]()
        if arrival.kind == "push":
            actions += applied(arrival, situation, scale)
            if worker not in state["pulls"]:  # answers keep the order of requests, so none overtakes a pull that waits
                actions.append(Answer(worker))
        slowest = min(state["clocks"].values(), default=0)
        released = sorted(m for m, clock in state["pulls"].items() if clock - bound <= slowest)
        pulls = {m: clock for m, clock in state["pulls"].items() if m not in released}
        return {**state, "pulls": pulls}, [*actions, *map(Answer, released)]

    def init() -> RuleState:
        return {"clocks": {}, "offsets": {}, "pulls": {}}

    return Rule(call_name(within, locals()), init, receive)


def _advanced(state: RuleState, arrival: Arrival, situation: Situation) -> RuleState:
    """The members' clocks, the offsets of their own numbers from these, and the pulls that wait, after `arrival`."""
    worker = arrival.worker
    clocks, offsets, pulls = dict(state["clocks"]), state["offsets"], dict(state["pulls"])
    if arrival.kind == "left":
        offsets = {m: offset for m, offset in offsets.items() if m != worker}
        clocks.pop(worker, None)
        pulls.pop(worker, None)
    if arrival.kind in ("joined", "left"):
        slowest = min((clocks[m] for m in situation.members if m in clocks), default=0)
        clocks = {m: clocks.get(m, slowest) for m in situation.members}
    if arrival.kind in ("pull", "push", "had") and worker not in offsets:
        finished = arrival.clock - (arrival.kind != "pull")  # a push is of a step that is only now finished
        offsets = {**offsets, worker: clocks[worker] - finished}
    if arrival.kind == "pull":
        pulls[worker] = max(arrival.clock + offsets[worker], pulls.get(worker, 0))
    if arrival.kind in ("push", "had"):
        clocks[worker] = max(arrival.clock + offsets[worker], clocks[worker])
    return {"clocks": clocks, "offsets": offsets, "pulls": pulls}
