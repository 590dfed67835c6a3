"""Synchronous rules: when enough gradients wait, the step ends and they become one update.

    worker 0 ──push──▶ waits ─┐
    worker 1 ──push──────────▶├─ enough ─▶ Add 0, Add 1, Add 2, Update, Answer 0, Answer 1, Answer 2
    worker 2 ──push──▶ waits ─┘

Enough are the gradients of all members (`hardsync`), the first n (`first`), or all but some (`all_but`: backup
workers). Gradients are added in the order of workers, not of arrival, so that the same steps give the same bits in
every run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from math import inf

from polytempo.core.calls.call_name import call_name
from polytempo.core.rule import Action, Add, Answer, Arrival, Drop, Rule, RuleState, Situation, Update

WaitingPushes = Sequence[tuple[int, int]]
"""The (clock, samples) of one worker's pushes that wait, oldest first."""

_NOTHING = -1
"""The samples of a push that was dropped because its batch is in the weights already: its worker has done its part
of the step, though its gradient is not added. At another shard the same push may count."""

SampleWeights = Callable[[Sequence[int]], Sequence[float]]
"""The samples of each of a step's gradients -> how much each counts in their mean."""

Enough = Callable[[dict[int, WaitingPushes], int], bool]
"""(each worker's pushes that wait, the number of workers that the step counts) -> whether the step is over."""


def oldest(waiting: WaitingPushes) -> WaitingPushes:
    """The oldest of a worker's pushes: one belongs to each step."""
    return waiting[:1]


def by_samples(samples: Sequence[int]) -> Sequence[float]:
    """Each gradient counts by its samples, so that the mean is over all of them; the largest counts 1.

    Alike ones count 1 each, so their mean has the bits of a mean.
    """
    most = max(samples, default=0)
    return [count / most for count in samples] if most else [1.0] * len(samples)


def in_samples(samples: Sequence[int]) -> Sequence[float]:
    """Each gradient counts its number of samples, where the sum already has gradients that were counted so."""
    return [float(count) for count in samples]


def stepwise(
    name: str,
    enough: Enough,
    belonging: Callable[[WaitingPushes], WaitingPushes] = oldest,
    weights: SampleWeights = by_samples,
) -> Rule:
    """A rule that ends a step when its gradients are `enough`: θ ← θ - η Σ mᵢ gᵢ / Σ mᵢ, mᵢ = the samples behind gᵢ.

    A push is answered after the update that includes it, and so is a pull behind it. A worker that pushes again before
    that is ahead by a step: that push waits for the next one. A worker that joins while a step is under way (some
    gradient waits) counts from the next one; its pull is answered when that begins, so its first gradient is fresh.
    """

    def receive(state: RuleState, arrival: Arrival, situation: Situation) -> tuple[RuleState, list[Action]]:
        worker, members = arrival.worker, situation.members
        waiting, newcomers = dict(state["waiting"]), tuple(state["newcomers"])
        if arrival.kind == "pull":
            return state, [] if worker in waiting or worker in newcomers else [Answer(worker)]
        if arrival.kind == "push":
            assert worker in members  # the shard refuses strangers; waiting for one would never end
            waiting[worker] = (*waiting.get(worker, ()), (arrival.clock, arrival.samples))
        if arrival.kind == "had" and worker in members:
            waiting[worker] = (*waiting.get(worker, ()), (arrival.clock, _NOTHING))
        if arrival.kind == "joined" and waiting and worker not in waiting:
            newcomers = (*newcomers, worker)
        if arrival.kind == "left":
            others = frozenset(members) - {worker} if waiting or newcomers else frozenset[int]()
            waiting = {m: pushes for m, pushes in waiting.items() if m in others}
            newcomers = tuple(m for m in newcomers if m in others)
        actions: list[Action] = []
        while True:
            there = {m: pushes for m, pushes in waiting.items() if m not in newcomers} if newcomers else waiting
            if not (there or newcomers) or (there and not enough(there, len(members) - len(newcomers))):
                return {"waiting": waiting, "newcomers": newcomers}, actions
            step = {m: belonging(there[m]) for m in members if m in there}
            actions += _update(step, weights)
            actions += [Answer(m) for m in members if m in step or m in newcomers]
            waiting = {m: rest for m, pushes in waiting.items() if (rest := pushes[len(step.get(m, ())) :])}
            newcomers = ()

    return Rule(name, lambda: {"waiting": {}, "newcomers": ()}, receive, waits_for_several=True)


def _update(step: dict[int, WaitingPushes], weights: SampleWeights) -> list[Action]:
    """The weighted mean of the step's gradients; nothing if there are none."""
    pushed = [(worker, samples) for worker, pushes in step.items() for _, samples in pushes if samples != _NOTHING]
    counts = weights([samples for _, samples in pushed])
    adds = [Add(worker, count) for (worker, _), count in zip(pushed, counts, strict=True)]
    return [*adds, Update(sum(counts))] if adds else []


def hardsync() -> Rule:
    """θ ← θ - η Σ mᵢ gᵢ / Σ mᵢ once every member's gradient gᵢ of the step, of mᵢ samples, is there. None is stale.

    λ workers with μ samples each make the step of one worker with λμ: (1/λ) Σ gᵢ. A worker that leaves is not waited
    for; a worker that joins counts from the next step (`server.rules.synchronous_step`).

    Source: S. Gupta, W. Zhang and F. Wang, "Model accuracy and runtime tradeoff in distributed deep learning", 2015,
    section 3. There all have μ samples, and the sum is in the order of arrival.
    """
    return stepwise("hardsync()", lambda waiting, workers: len(waiting) == workers)


def first(n: int) -> Rule:
    """θ ← θ - η Σ mᵢ gᵢ / Σ mᵢ over the first n gradients of the step, gᵢ of mᵢ samples; later ones are dropped.

    A gradient is of the present step if it was computed on the present version of the weights (its basis), and late if
    that version is older; the worker's own clock does not matter. So a worker with a late gradient pulls and is in the
    present step again, with any number in its next push. With several shards each decides for its own part.

    With n members or fewer it is `hardsync`, to the bit. The worker's time for a late gradient is lost, and so are its
    samples: if some samples make a batch slow, the model sees them less often.

    Source: J. Chen, X. Pan, R. Monga, S. Bengio and R. Jozefowicz, "Revisiting distributed synchronous SGD", 2016,
    section 3. There n + b workers are started, so that the batch stays as large as without backups.
    """
    if n < 1:
        raise ValueError(f"first needs n >= 1 gradients, got {n}")
    steps = stepwise(call_name(first, locals()), lambda waiting, workers: len(waiting) >= min(n, workers))

    def receive(state: RuleState, arrival: Arrival, situation: Situation) -> tuple[RuleState, list[Action]]:
        if arrival.kind == "push" and arrival.basis < situation.version:
            return state, [Drop(arrival.worker, "late"), Answer(arrival.worker)]
        if arrival.kind == "had" and arrival.basis < situation.version:
            return state, []
        return steps.receive(state, arrival, situation)

    return steps._replace(receive=receive, needs_newest=True)


def all_but(backups: int) -> Rule:
    """`first(n)` with n = the members at the time less `backups`, at least 1. all_but(0) waits for all members."""
    if backups < 0:
        raise ValueError(f"all_but needs backups >= 0 workers, got {backups}")

    first_of = lru_cache(maxsize=8)(first)  # the members seldom change

    def receive(state: RuleState, arrival: Arrival, situation: Situation) -> tuple[RuleState, list[Action]]:
        return first_of(max(1, len(situation.members) - backups)).receive(state, arrival, situation)

    return first(1)._replace(name=call_name(all_but, locals()), receive=receive)


def quorum(least: int, grace_s: float = 0.0) -> Rule:
    """θ ← θ - (c/λ) η Σ mᵢ gᵢ / Σ mᵢ once `least` of λ members' pushes are there; c ≥ `least` of them make the update.

    With `grace_s` the update waits so long for further pushes after the first `least`, unless all are there.
    A worker waits for the update with its push, and for no more. A later push is in a later update, so none is lost,
    and every push counts 1/λ of a step of all. With fewer members than `least` all are enough. `least` = 1 without
    `grace_s`: each push is an update of its own, as by `in_shares`; `least` ≥ λ: `hardsync`.

    Errors: ValueError for `least` below 1, and for seconds that are not finite and 0 or more.
    """
    if least < 1:
        raise ValueError(f"a quorum needs at least 1 worker, got {least}")
    if not 0 <= grace_s < inf:
        raise ValueError(f"grace_s is a finite number of seconds, 0 or more, got {grace_s}")
    name = call_name(quorum, locals(), brief=("grace_s",))
    all_there = stepwise(name, lambda waiting, workers: len(waiting) == workers)
    closed = stepwise(name, lambda waiting, workers: len(waiting) >= min(least, workers))

    def window_s(state: RuleState, situation: Situation) -> float | None:
        newcomers = state["newcomers"]
        there = sum(worker not in newcomers for worker in state["waiting"])
        return grace_s if there and there >= min(least, len(situation.members) - len(newcomers)) else None

    def receive(state: RuleState, arrival: Arrival, situation: Situation) -> tuple[RuleState, list[Action]]:
        steps = all_there if grace_s and arrival.kind != "elapsed" else closed
        state, actions = steps.receive(state, arrival, situation)
        adds, found = list[Add](), list[Action]()
        for action in actions:
            if isinstance(action, Add):
                adds.append(action)
                continue
            share = min(1.0, len(adds) / max(1, len(situation.members)))
            found += [add._replace(rate=share) for add in adds]
            found.append(action)
            adds = []
        return state, found

    return closed._replace(receive=receive, window_s=window_s if grace_s else None)
