"""`plan_layers`: what each layer of a model would send by data and by model parallelism, over a link."""

from __future__ import annotations

import re
from functools import partial
from typing import Any

from torch import nn

from polytempo.cluster import Link
from polytempo.collectives import halving_doubling_price, ring_price, tree_price
from polytempo.partition.plan import LayerPlan, Reduction, chosen, volumes
from polytempo.partition.plan.choice import By
from polytempo.server.price import server_price

_BITS_PER_S = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
_LATENCY_S = 50e-6


def link_of(text: str, latency_us: float | None = None) -> Link:
    """A link by its rate: "10gbit", "100mbit"; or by rate and latency: "10gbit,5us".

    `latency_us`: from process to process, where the text does not say; 50 by default. Raises ValueError for others.
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(kbit|mbit|gbit)(?:,\s*(\d+(?:\.\d+)?)\s*us)?", text.strip().lower())
    if not found or not float(found[1]):
        raise ValueError(f'no link is called {text!r}; write a rate, as in "10gbit", "100mbit" or "10gbit,5us"')
    latency_s = _LATENCY_S if latency_us is None else latency_us * 1e-6
    return Link(latency_s if found[3] is None else float(found[3]) * 1e-6, float(found[1]) * _BITS_PER_S[found[2]] / 8)


def reductions(shards: int = 1) -> dict[str, Reduction]:
    """Ways to sum gradients, by name: over a tree, by a parameter server of so many shards, a ring, by halving."""
    prices = {
        "tree": tree_price,
        "server": partial(server_price, shards=shards),
        "ring": ring_price,
        "halving_doubling": halving_doubling_price,
    }
    return {name: Reduction(name, price) for name, price in prices.items()}


def plan_layers(
    model: nn.Module,
    sample: Any,
    *,
    workers: int,
    link: str | Link = "10gbit",
    batch_size: int,
    reduction: str = "ring",
    shards: int = 1,
    by: By = "bytes",
) -> LayerPlan:
    """Each layer of `model` by data or by model parallelism, whichever sends less; `pt.hybrid` takes the plan.

        plan = pt.plan_layers(net, images, workers=32, link="10gbit", batch_size=1024)
        plan.model_parallel, plan.seconds_of("data"), plan.seconds_of("hybrid")

    `sample`: what the model is called with; its values and number of samples do not matter. `batch_size`: samples of a
    step of all workers. `link`: its rate, `link_of` has how it is written. `reduction`: how gradients of layers by data
    parallelism are summed: "tree", "server" (a parameter server of `shards`), "ring" or "halving_doubling". `by`: what
    is compared, the source's |D| with |W| ("bytes"), or the seconds of the cost model ("seconds").

    Nothing is computed: layers are seen on tensors without values. Source: F. Iandola et al., "FireCaffe", 2016.
    Errors: ValueError for names that there are not, and numbers below 1; those of `partition.plan.volumes`.
    """
    known = reductions(shards)
    if reduction not in known:
        raise ValueError(f"reduction={reduction!r}: must be one of {', '.join(known)}")
    taken = link_of(link) if isinstance(link, str) else link
    return chosen(
        volumes(model, sample),
        workers=workers,
        batch_size=batch_size,
        latency_s=taken.latency_s,
        bytes_per_s=taken.bytes_per_s,
        reduction=known[reduction],
        by=by,
    )
