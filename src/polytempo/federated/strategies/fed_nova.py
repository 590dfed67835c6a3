"""Federated averaging of movements per step, so that clients with more steps do not count twice."""

from __future__ import annotations

from polytempo.core import Strategy, call_name
from polytempo.core.strategy import LocalTraining
from polytempo.federated.rounds import in_rounds, normalised


def fed_nova(cohort: int = 10, epochs: int = 1, batch_size: int | None = 10) -> Strategy:
    """θ ← θ - τ_eff Σₖ pₖ (θ - θₖ) / τₖ with pₖ = nₖ / Σ n, τₖ the steps of client k, τ_eff = Σ pₖ τₖ. Else `fed_avg`.

    Clients of equal size make it `fed_avg`. The plain mean leans to the minima of clients that make many steps.

    Source: J. Wang, Q. Liu, H. Liang, G. Joshi and H. V. Poor, "Tackling the objective inconsistency problem in
    heterogeneous federated optimization", 2020. The rule is for clients with plain SGD; with
    local momentum it is an approximation.
    """
    return in_rounds(call_name(fed_nova, locals()), cohort, LocalTraining(epochs, batch_size), shares=normalised)
