"""A strategy with a parameter server: its service and codecs are checked in one place, when it is built."""

from __future__ import annotations

from collections.abc import Mapping
from math import inf
from typing import TypeVar

import torch

from polytempo.core import Codec
from polytempo.core.codec import DeltaCodec, PullCodec, check_codec
from polytempo.core.rule import Service, UpdateRule
from polytempo.core.strategy import Strategy
from polytempo.core.transform import Transform
from polytempo.server.worker.transforms import pull, push

MAX_REPLICAS = 2
MAX_SHARDS = 64
"""Each copy of a shard is a process of its own; more shards than this are a mistake."""

T = TypeVar("T")


def check_service(service: Service) -> None:
    """Raise ValueError for numbers or codecs that no parameter server can have.

    `replicas` are the further copies of each shard: with r of them, acknowledged pushes survive the loss of any r
    processes. Deals "evenly" is for rules that make workers wait for each other (see
    `server.coordinator.batch_scheduler`).
    """
    if service.shards < 1:
        raise ValueError(f"a parameter server needs at least 1 shard, got shards={service.shards}")
    if service.shards > MAX_SHARDS:
        raise ValueError(
            f"a parameter server has at most {MAX_SHARDS} shards, each a process, got shards={service.shards}"
        )
    if not 0 <= service.replicas <= MAX_REPLICAS:
        raise ValueError(f"a shard has 0 to {MAX_REPLICAS} further copies, got replicas={service.replicas}")
    if service.warm_start < 0:
        raise ValueError(f"warm_start is a number of steps that one worker takes alone, got {service.warm_start}")
    if service.codec is not None:
        check_codec(service.codec)
    check_push_codec(service.codec)
    check_pull_codec(service.pull_codec)
    if service.hierarchical:
        _check_sums(service)
    if service.rule.region_size:
        _check_regions(service)


def _check_regions(service: Service) -> None:
    """Raise ValueError where workers rest, help each other, or have gradients corrected: regions know none of these."""
    asked = {
        "waits=True": service.waits,
        'deals="evenly"': service.deals == "evenly",
        "modifiers": bool(service.modifiers),
        "reassigns": service.reassigns is not None,
        "numbers_per_batch": service.numbers_per_batch > 1,
    }
    if unfit := [name for name, has in asked.items() if has]:
        raise ValueError(
            f"{service.rule.name} has regions of workers, each with weights of its own, which do not go with "
            f"{', '.join(unfit)}; leave these out, or use a rule without regions, such as in_shares()"
        )


def _check_sums(service: Service) -> None:
    """Raise ValueError where a shard cannot use the sum of several workers' gradients as it would use each of them."""
    if not service.rule.adds_sums:
        raise ValueError(
            f"hierarchical=True sums the gradients of a host's workers before they are pushed, and {service.rule.name} "
            "treats each by its own staleness; leave hierarchical out, or take async_sgd, downpour or softsync with "
            'scale="constant"'
        )
    if service.codec is not None:
        raise ValueError(
            f"hierarchical=True sums gradients within a host, and codec={service.codec.facts.name} encodes each "
            "worker's own, with a residual of its own; leave out one of the two (pull_codec may stay)"
        )
    assert not service.modifiers
    assert service.reassigns is None


def served(
    name: str, service: Service, gradients: Transform | None = None, parameters: Transform | None = None
) -> Strategy:
    """The strategy `name` with that server: by default it pushes each gradient and pulls the parameters every step.

    Raises ValueError where `check_service` does.
    """
    check_service(service)
    return Strategy(
        name,
        gradients=push() if gradients is None else gradients,
        parameters=pull() if parameters is None else parameters,
        synchronized=False,
        meeting=service,
    )


def outer_step(lr: float, momentum: float, momentum_every: int = 1, option: str = "momentum_every") -> UpdateRule:
    """The server's step of DiLoCo's family: Nesterov's, with a momentum in every n-th update. ValueError for n < 1."""
    if momentum_every < 1:
        raise ValueError(
            f"{option} is a number of updates, at least 1, such as the number of workers, got {momentum_every}"
        )
    if not lr > 0 or not 0 <= momentum < 1:
        raise ValueError(f"the server's outer step needs a rate > 0 and a momentum in [0, 1), got {lr} and {momentum}")
    if momentum == 0:
        return UpdateRule("sgd", lr)
    return UpdateRule("sgd", lr, momentum=momentum, nesterov=True, momentum_every=momentum_every)


def outer_rule(optimizer: Transform | None, lr: float, momentum: float, momentum_every: int) -> UpdateRule:
    """`optimizer` as the server's step; without one `outer_step` of the numbers, which are 0.7, 0 and 1 by default.

    Errors: ValueError for an optimizer and other numbers, and for an optimizer without a step at a server.
    """
    own = outer_step(lr, momentum, momentum_every)
    if optimizer is None:
        return own
    name = optimizer.name or "a transform"
    if (lr, momentum, momentum_every) != (0.7, 0.0, 1):
        raise ValueError(
            f"outer_lr={lr}, outer_momentum={momentum} and momentum_every={momentum_every} belong to Nesterov's steps, "
            f"and outer_optimizer={name} has numbers of its own; give one or the other"
        )
    if not isinstance(optimizer.at_server, UpdateRule):
        raise ValueError(
            f"a parameter server has no outer step {name}; take adam(), nesterov() or heavy_ball() without clip; "
            "momentum_every delays Nesterov's momentum"
        )
    return optimizer.at_server


def choice(what: str, given: str, choices: Mapping[str, T]) -> T:
    """The value of `given` among `choices`. ValueError where there is none, with the names that there are."""
    if given not in choices:
        raise ValueError(f"{what} must be one of {', '.join(choices)}, got {given!r}")
    return choices[given]


_LARGE = torch.empty(1024, 1024, device="meta")
"""Laws of codecs must hold for this tensor: codecs are chosen before there is a model."""
_LOSES = 0.1
"""The largest part of the squared norm: a model works with an error of some per cent, not of one half."""


def check_push_codec(codec: Codec | None) -> None:
    """Raise ValueError for a codec with incomplete wires: a shard knows only the message."""
    if codec is not None and codec.facts.sparse and codec.facts.summable:
        raise ValueError(
            f"{codec.facts.name} wires leave out which entries they hold, for all ranks draw the same in the same "
            "step, and workers of a parameter server are at different steps; use top_k(ratio) with complete wires"
        )


def check_pull_codec(codec: PullCodec | None) -> None:
    """Raise ValueError for a codec that leaves weights out, changes them much, or keeps a state: all are pulled."""
    if codec is None:
        return
    if isinstance(codec, DeltaCodec):
        check_pull_codec(codec.codec)
        return
    check_codec(codec)
    fit = "bf16(), fp16(), int8(), dynamic8() or pca(error=0.1)"
    if codec.facts.memory != "none":
        raise ValueError(
            f"pull_codec={codec.facts.name} keeps a residual for one receiver, and a shard sends the same weights to "
            f"every worker that pulls; use {fit}, without feedback"
        )
    if codec.facts.sparse:
        raise ValueError(
            f"pull_codec={codec.facts.name} does not keep every weight, and no later pull brings the missing ones; "
            f"use {fit}"
        )
    loses = _loses(codec)
    if loses == inf:
        raise ValueError(f"pull_codec={codec.facts.name} promises nothing of a weight's size; use {fit}")
    if loses > _LOSES:
        raise ValueError(
            f"pull_codec={codec.facts.name} may change the weights of a large tensor by {loses:.1%} of their squared "
            f"norm, where {_LOSES:.0%} is the most that a model can bear; use a finer one, or {fit}"
        )


def _loses(codec: Codec) -> float:
    """The most of a large tensor's squared norm that its error may have: all, where the law promises nothing."""
    law = codec.facts.law
    match law.kind:
        case "lossless":
            return 0.0
        case "contraction":
            return 1.0 - law.bound(_LARGE)
        case "unbiased":
            return law.bound(_LARGE)
    return max(1.0, law.bound(_LARGE))
