"""`plan_layers`: the bytes of each layer of a model by data and by model parallelism, over a link."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import nn

from polytempo.cluster import Link
from polytempo.cluster.cluster import rate_of
from polytempo.collectives import halving_doubling_price, ring_price, tree_price
from polytempo.core import Codec
from polytempo.partition.plan import LayerPlan, Reduction, chosen, volumes
from polytempo.partition.plan.choice import By, PriceOf
from polytempo.partition.wires import Wires
from polytempo.server.worker.transforms import server_price
from polytempo.spec.text.catalogue import codec_of

LATENCY_S = 50e-6
"""Latency between processes for a link that is given by its rate alone."""


def reductions(shards: int = 1) -> dict[str, Reduction]:
    """Ways to sum gradients, by name: over a tree, by a parameter server of so many shards, a ring, by halving."""
    prices: dict[str, PriceOf] = {
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
    activations: Codec | str | None = None,
    gradients: Codec | str | None = None,
) -> LayerPlan:
    """Plan each layer of `model` by data or model parallelism, by the fewer bytes; `pt.hybrid` takes the plan.

        plan = pt.training.plan_layers(net, images, workers=32, link="10gbit", batch_size=1024)
        plan.model_parallel, plan.seconds_of("data"), plan.seconds_of("hybrid")

    `sample`: the model's arguments; its values and number of samples do not matter. `batch_size`: samples of a
    step of all workers. `link`: its rate, with 50 microseconds of latency, or a `pt.cluster.Link`. `reduction`: how
    gradients of layers by data parallelism are summed: "tree", "server" (a parameter server of `shards`), "ring" or
    "halving_doubling". `by`: the compared sizes, the source's |D| with |W| ("bytes"), or the cost model's times
    ("seconds"). `activations` and `gradients`: codecs for the divided layers' exchanges, also as text such
    as "int8"; `pt.hybrid` takes them with the plan.

    Nothing is computed: layers are seen on tensors without values. Source: F. Iandola et al., "FireCaffe", 2016.
    Errors: ValueError for names that there are not, numbers below 1, and codecs with a memory or with wires of varying
    length; also the errors of `partition.plan.volumes`.
    """
    known = reductions(shards)
    if reduction not in known:
        raise ValueError(f"reduction={reduction!r}: must be one of {', '.join(known)}")
    taken = Link(LATENCY_S, rate_of(link)) if isinstance(link, str) else link
    return chosen(
        volumes(model, sample),
        workers=workers,
        batch_size=batch_size,
        latency_s=taken.latency_s,
        bytes_per_s=taken.bytes_per_s,
        reduction=known[reduction],
        by=by,
        wires=Wires(codec_of(activations), codec_of(gradients)),
    )
