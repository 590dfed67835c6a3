"""Downpour SGD: workers make steps of their own, push sums of gradients, and fetch the parameters now and then."""

from __future__ import annotations

from polytempo.core import Codec, Strategy, call_name
from polytempo.core.calls.call_name import BRIEF
from polytempo.core.codec import PullCodec
from polytempo.core.rule import Service, Staleness, UpdateRule
from polytempo.server.rules.asynchronous import on_arrival
from polytempo.server.rules.staleness import scale_of
from polytempo.server.service import choice, served
from polytempo.server.worker.transforms import pull, push


def downpour(
    push_every: int = 5,
    pull_every: int = 5,
    shards: int = 1,
    replicas: int = 0,
    optimizer: str = "adagrad",
    lr: float | None = None,
    warm_start: int = 0,
    overlap: bool = True,
    codec: Codec | None = None,
    pull_codec: PullCodec | None = None,
    hierarchical: bool = False,
    scale: str | Staleness = "constant",
) -> Strategy:
    """Every worker: w ← w - α g alone; Σ g pushed every `push_every` steps; w fetched every `pull_every` steps.

    g = ∇loss(w) + δ w holds the job's weight decay δ, locally and in pushes. AdamW's is not a part of a gradient:
    the server has it in its own steps where `optimizer` is "adamw" or "job", and with another one it is refused. The
    job's momentum shapes the local steps; the server's step is of `optimizer` alone.

    The server applies each sum as it arrives, by `optimizer`: "adagrad" (η = γ/√Σ Δw² for each parameter, the sum kept
    in its shard and over the present gradient too; no ε, and 0/0 is 0), "sgd", "adam", "adamw", or "job", the job's
    own. `lr` is the server's γ; without it, the mean of the job's rates at the sum's batches, often too much for
    Adagrad: 0.01 to 0.03 suits small networks. "sgd" bears only a small γ, as it applies whole sums that are many
    updates old. One worker alone takes the first `warm_start` steps. With `overlap` pushes and fetches go on while the
    worker computes: a fetch that was asked for after one step is used after the next.

    `codec` encodes each sum for each shard, `compression.feedback(compression.top_k(0.01))` for example: the part held
    back goes with the worker's next sum, and is lost with the worker's life, as is a sum that a shard drops.
    `pull_codec` encodes fetched parameters, and must keep every one: bf16, fp16, int8, dynamic8, `pca(error=0.1)`.

    `hierarchical`: the workers of a host add up their sums before one of them pushes that, as in `async_sgd`.

    `scale`: the factor of γ by the staleness τ of a sum, in updates, as in `async_sgd`. γ is not changed otherwise.

    Cost: a gradient each `push_every` steps, the parameters each `pull_every`; memory for two sums and a residual.

    Source: J. Dean et al., "Large scale distributed deep networks", 2012, section 4.1 and the client of its appendix.
    There the local step is plain SGD; here it is the job's own optimizer's. There a fetch may end in the middle of one.
    """
    return served(
        call_name(downpour, locals(), brief=(*BRIEF, "scale")),
        Service(
            on_arrival(scale_of(scale)),
            shards=shards,
            replicas=replicas,
            optimizer=_rule(optimizer, lr),
            warm_start=warm_start,
            codec=codec,
            pull_codec=pull_codec,
            hierarchical=hierarchical,
            decays="workers",
        ),
        gradients=push(push_every, overlap=overlap, steps_locally=True),
        parameters=pull(pull_every, overlap=overlap),
    )


def _rule(optimizer: str, lr: float | None) -> UpdateRule | None:
    """The shards' update rule; None: the job's own optimizer."""
    if lr is not None and not lr > 0:
        raise ValueError(f"the server's learning rate must be above 0, got lr={lr}")
    if lr is not None and optimizer == "job":
        raise ValueError("the job's optimizer has its own learning rate; leave out lr, or name another optimizer")
    rules: dict[str, UpdateRule | None] = {
        "adagrad": UpdateRule("adagrad", lr, eps=0.0),
        "sgd": UpdateRule("sgd", lr),
        "adam": UpdateRule("adam", lr),
        "adamw": UpdateRule("adamw", lr),
        "job": None,
    }
    return choice("optimizer", optimizer, rules)
