"""Federated averaging with a pull of each client towards the round's model."""

from __future__ import annotations

from polytempo.core import Strategy, call_name
from polytempo.core.strategy import LocalTraining
from polytempo.federated.rounds import in_rounds


def fed_prox(cohort: int = 10, mu: float = 0.01, epochs: int = 1, batch_size: int | None = 10) -> Strategy:
    """Clients minimise their loss + μ/2 ‖θₖ - θ‖²: a step's gradient is g + μ (θₖ - θ). Else as `fed_avg`.

    With μ = 0 it is `fed_avg`. Cost: a pass over the parameters in each local step.

    Source: T. Li et al., "Federated optimization in heterogeneous networks", 2020, Algorithm 2. Deviation: every client
    makes whole epochs; the paper's devices stop at a given inexactness.
    """
    return in_rounds(call_name(fed_prox, locals()), cohort, LocalTraining(epochs, batch_size, proximal=mu))
