"""Federated averaging with control variates, which take the clients' drift out of their steps."""

from __future__ import annotations

from functools import partial

from torch.optim import SGD

from polytempo.core import Strategy, call_name
from polytempo.core.strategy import LocalTraining
from polytempo.federated.rounds import in_rounds


def scaffold(cohort: int = 10, epochs: int = 1, batch_size: int | None = 10, server_lr: float = 1.0) -> Strategy:
    """Clients step by g - cₖ + c; cₖ ← cₖ - c + (θ - θₖ) / (τₖ ηₖ); c ← Σ pₖ cₖ over all clients. Else as `fed_avg`.

    τₖ are the client's steps and ηₖ its learning rate, so its new variate is its mean gradient of the round. pₖ is its
    part of all samples. θ ← θ - η Σ (nₖ / Σ n) (θ - θₖ), where η is `server_lr`. All variates begin at 0: a client's
    first round is as in `fed_avg`. With one step a round and all clients it is `fed_avg`. A round
    with ηₖ = 0 changes no variate.

    The job's optimizer must be SGD without momentum, because only its movement is a sum of gradients (PT2510).

    Cost: twice the bytes of `fed_avg`; a pass over the parameters in each local step. Memory: a model for each client
    that has taken part, on the worker that played it last; it moves where another one plays the client, and is a part
    of checkpoints. Beyond 1 GiB a worker keeps variates in files.

    Source: S. P. Karimireddy et al., "SCAFFOLD: Stochastic controlled averaging for federated learning", 2020,
    Algorithm 1, option II. Deviation: clients weigh by their samples, in θ and in c; with equal sizes
    it is the paper's.
    """
    if not server_lr > 0:
        raise ValueError(f"the server needs server_lr > 0, got {server_lr}")
    local = LocalTraining(epochs, batch_size, controls=True)
    return in_rounds(call_name(scaffold, locals()), cohort, local, server=partial(SGD, lr=server_lr))
