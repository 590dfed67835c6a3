"""Federated averaging that weighs clients with a large loss more, so that accuracies of clients differ less."""

from __future__ import annotations

from polytempo.core import Strategy, call_name
from polytempo.core.strategy import LocalTraining
from polytempo.federated.rounds import in_rounds


def q_fed_avg(cohort: int = 10, q: float = 1.0, epochs: int = 1, batch_size: int | None = 10) -> Strategy:
    """θ ← θ - Σ pₖ Fₖ^q Δₖ / Σ pₖ (Fₖ^q + q Fₖ^(q-1) ‖Δₖ‖² / η), where Δₖ = θ - θₖ. Else as `fed_avg`.

    Fₖ is the mean loss of the round's model on the client's own samples, pₖ = nₖ / Σ n, η the clients' learning rate.
    The objective is Σ pₖ Fₖ^(q+1) / (q+1); the denominator bounds its curvature, so q needs no rate of its own. q = 0
    is `fed_avg`; the larger q, the nearer to the minimum of the largest loss.

    Cost: as `fed_avg`, and a forward pass over a client's data before its training; 8 bytes a client between workers.

    Source: T. Li, M. Sanjabi, A. Beirami and V. Smith, "Fair resource allocation in federated learning", 2020,
    Algorithm 2, with L = 1/η. Deviations: clients are drawn alike and weigh by pₖ, while the paper draws them by pₖ; a
    loss below 1e-10 counts as 1e-10.
    """
    if not q >= 0:
        raise ValueError(f"q must be at least 0, got {q}")
    return in_rounds(call_name(q_fed_avg, locals()), cohort, LocalTraining(epochs, batch_size, fairness=q))
