"""Regions: each has weights of its own, and gives its movement to the shard's own weights now and then."""

from __future__ import annotations

from polytempo.core.calls.call_name import call_name
from polytempo.core.rule import (
    Action,
    Add,
    Answer,
    Arrival,
    DropRegion,
    MergeRegion,
    Rule,
    RuleState,
    Situation,
    Update,
)


def regional(size: int, every: int = 1, share: float = 1.0) -> Rule:
    """Each push updates its region's weights φ; each K-th push of a region (K = `every`) moves θ, the shard's own.

        φ ← a step by the push, at 1/m of the rate, m = the region's workers at the time
        K-th:  θ ← a step by φ₀ - φ, at 1/R of the outer rate, R = the regions at the last push
               φ₀ ← φ ← (1 - a) φ + a θ

    Worker w is of region w // `size`; a = `share`. φ and φ₀ begin as θ is when the region's first worker joins. When
    its last one has left, θ takes in its movement since, and the region ends. Pulls are answered immediately.

    Up to K - 1 pushes of each region are not in θ when it is scored, and at the end of a run. At the end, after
    a worker's last pull, regions without workers keep their movement.

    Errors: ValueError for a size or a number of pushes below 1, and for a share that is not in [0, 1].
    """
    if size < 1:
        raise ValueError(f"a region has at least 1 worker, got {size}")
    if every < 1:
        raise ValueError(f"a region pushes on after so many updates, at least 1, got {every}")
    if not 0 <= share <= 1:
        raise ValueError(f"the share of θ in a region's weights is from 0 to 1, got {share}")

    def of(region: int, workers: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(worker for worker in workers if worker // size == region)

    def merged(state: RuleState, region: int) -> tuple[RuleState, MergeRegion]:
        pushes = {**state["pushes"], region: 0}
        return {**state, "pushes": pushes}, MergeRegion(region, share, 1 / state["regions"])

    def settled(state: RuleState, situation: Situation) -> tuple[RuleState, list[Action]]:
        """The regions without workers end."""
        present, actions = {worker // size for worker in situation.members}, list[Action]()
        if not state["over"]:
            for region, pushes in sorted(state["pushes"].items()):
                if region in present:
                    continue
                if pushes:
                    state, merge = merged(state, region)
                    actions.append(merge)
                actions.append(DropRegion(region))
                state = {**state, "pushes": {r: count for r, count in state["pushes"].items() if r != region}}
        return state, actions

    def receive(state: RuleState, arrival: Arrival, situation: Situation) -> tuple[RuleState, list[Action]]:
        worker, region = arrival.worker, arrival.worker // size
        if arrival.kind == "settled":
            return settled(state, situation)
        if arrival.kind == "joined":
            return {**state, "pushes": {region: 0, **state["pushes"]}, "over": False}, []
        if arrival.kind == "pull":
            return ({**state, "over": True} if arrival.last else state), [Answer(worker)]
        if arrival.kind != "push":
            return state, []
        actions = list[Action]()
        if state["over"]:
            state, actions = settled({**state, "over": False}, situation)
        pushes = state["pushes"][region] + 1
        regions = len({member // size for member in situation.members} | {region})
        state = {**state, "pushes": {**state["pushes"], region: pushes}, "regions": regions}
        share_of_one = 1 / max(1, len(of(region, situation.members)))
        actions += [Add(worker, rate=share_of_one), Update(1.0, region=region)]
        if pushes >= every:
            state, merge = merged(state, region)
            actions.append(merge)
        return state, [*actions, Answer(worker)]

    def init() -> RuleState:
        return {"pushes": {}, "over": False, "regions": 1}

    return Rule(call_name(regional, locals()), init, receive, region_size=size, region_pushes=every)
