"""Asynchronous federated averaging: the server updates when a buffer of movements is full, of any age."""

from __future__ import annotations

from functools import partial

from torch.optim import SGD

from polytempo.core import Strategy, call_name
from polytempo.core.calls.typed_arguments import check_whole
from polytempo.core.strategy import Buffering, LocalTraining
from polytempo.federated.rounds import in_rounds


def fed_buff(
    cohort: int = 10,
    concurrency: int = 20,
    epochs: int = 1,
    batch_size: int | None = 10,
    server_lr: float = 1.0,
    oldest: int = 8,
    sigma: float = 1.0,
    lost: float = 0.0,
) -> Strategy:
    """θ ← θ - η Σₖ (nₖ / Σ n) Δₖ / √(1 + τₖ) over a buffer of `cohort` arrivals; τₖ is the age of client k's model.

    `concurrency` clients train at any time, each from the newest model at its begin; when one arrives, another begins.
    Δₖ = θ_{t-τ} - θₖ. η is `server_lr`. An update is a step of the run. Arrivals older than `oldest` updates are thrown
    away, and so is a movement with probability `lost`: its client dropped out at the end of its training.

    Arrivals come from a clock of the clients: a client trains for its samples times exp(σ zₖ) exp(σ z), with zₖ drawn
    once and z each time. So a run is a function of its seed, on real processes and under the virtual clock, for any
    number of workers; `pt.federated.Arrivals` has the times. The virtual clock charges the workers' computation, and
    does not have the clients' times.

    With clients on machines of their own (`serve`) arrivals are theirs, and `sigma` has no meaning.

    Cost: as `fed_avg` for each arrival. Memory of a worker: oldest + 1 models more, which checkpoints have, too.

    Source: J. Nguyen et al., "Federated learning with buffered asynchronous aggregation", 2022, Algorithm 1, without
    secure sums. Deviations: clients weigh by their samples, a client is in a buffer at most once, and ages are bounded.
    """
    check_whole(concurrency=concurrency, oldest=oldest)
    if concurrency < 1 or oldest < 0 or not sigma >= 0 or not server_lr > 0 or not 0 <= lost < 1:
        raise ValueError(
            "fed_buff needs concurrency >= 1, oldest >= 0, sigma >= 0, server_lr > 0 and 0 <= lost < 1; got "
            f"{concurrency}, {oldest}, {sigma}, {server_lr} and {lost}"
        )
    local = LocalTraining(epochs, batch_size, buffering=Buffering(concurrency, oldest, sigma, lost))
    return in_rounds(call_name(fed_buff, locals()), cohort, local, server=partial(SGD, lr=server_lr))
