"""Rounds of clients with a merge that a minority of wrong clients cannot steer."""

from __future__ import annotations

from dataclasses import replace

from polytempo.aggregation import median
from polytempo.core import Strategy, call_name, identity
from polytempo.core.arithmetic.merge import Merge, begins_at_last, check_merge, least_ranks
from polytempo.core.calls.refusals import refuse
from polytempo.federated.rounds import by_samples, rounds_of
from polytempo.federated.strategies.fed_avg import fed_avg


def fed_robust(inner: Strategy | None = None, merge: Merge = median) -> Strategy:
    """`inner` (None: `fed_avg()`) with Δ = merge(Δ₁, …, Δ_cohort) in the place of the mean movement.

        pt.federated.fed_robust(pt.federated.fed_adam(cohort=10), pt.aggregation.trimmed_mean(2))

    `merge` is one of `pt.aggregation`: median, trimmed_mean, krum, multi_krum, bulyan, vote. Clients count alike: a
    wrong one could give a wrong number of samples. Clients' own tensors, proximal terms and codecs are as in `inner`.

    Errors: `Incompatible` (PT2511) for an inner strategy that weighs clients otherwise, or that adds control variates:
    a wrong client would steer these sums; (PT2544) for a merge that begins at its last answer. ValueError for a
    cohort of fewer clients than `merge` needs, and in a round of fewer (`private`).

    Cost: every worker receives the movements of all clients: cohort models of memory.

    Source: D. Yin et al., "Byzantine-robust distributed learning", 2018, for medians and trimmed means of gradients;
    here of movements, as in K. Pillutla, S. M. Kakade and Z. Harchaoui, "Robust aggregation for federated learning",
    2022, which has a geometric median.
    """
    inner = fed_avg() if inner is None else inner
    rounds = rounds_of(inner, "fed_robust")
    check_merge(merge)
    if begins_at_last(merge):
        refuse({"robust rounds", "merge with memory"}, merge=getattr(merge, "__name__", merge))
    if rounds.number < (least := least_ranks(merge)):
        raise ValueError(
            f"{getattr(merge, '__name__', merge)} needs at least {least} clients, and a round of {inner} has "
            f"{rounds.number}; use a larger cohort, or a merge with smaller numbers"
        )
    local = rounds.local
    if rounds.secure is not None:
        refuse({"secure sum", "single movements"}, strategy=inner, reason="a merge compares single movements")
    if rounds.shares is not by_samples or local.fairness or local.controls or local.buffering:
        refuse({"robust rounds", "weighed clients"}, strategy=inner)
    return replace(
        inner,
        name=call_name(fed_robust, {"inner": inner, "merge": merge}, brief=()),
        gradients=identity(),
        meeting=replace(rounds, merge=merge),
    )
