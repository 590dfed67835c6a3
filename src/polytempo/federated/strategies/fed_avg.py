"""Federated averaging: some clients train from the same model, and its next value is the mean of theirs."""

from __future__ import annotations

from polytempo.core import Strategy, call_name
from polytempo.core.strategy import LocalTraining
from polytempo.federated.rounds import in_rounds


def fed_avg(cohort: int = 10, epochs: int = 1, batch_size: int | None = 10) -> Strategy:
    """Let `cohort` clients take `epochs` passes over their own data in each round; then θ ← Σₖ (nₖ / Σ n) θₖ.

        pt.run("mnist", pt.federated.fed_avg(cohort=10), clients="shards(100, per_client=2)", data=path, steps=100)

    A client begins with θ and a new optimizer, the job's, and makes steps of `batch_size` samples (None: all that it
    has). The cohort is drawn from (seed, round), without repetition. An epoch of the run is a round. McMahan's C, the
    part of the clients, is cohort / clients; E is `epochs`, B is `batch_size`.

    Workers play the clients one after the other; weights have the same bits for any number of workers up to `cohort`.
    With one client, or all of them, and E = 1, B = None it is SGD on the joined batch.

    Cost: a client receives the model and sends one once a round. Memory of a worker: ⌈log₂ cohort⌉ + 3 models, and one
    optimizer state, for any number of clients.

    Source: B. McMahan, E. Moore, D. Ramage, S. Hampson and B. Agüera y Arcas, "Communication-efficient learning of deep
    networks from decentralized data", 2017, Algorithm 1. Deviation: the mean is of the clients that took part, as in
    the corrected version of the paper.
    """
    return in_rounds(call_name(fed_avg, locals()), cohort, LocalTraining(epochs, batch_size))
