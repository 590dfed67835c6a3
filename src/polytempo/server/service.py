"""A strategy with a parameter server: its service is checked in one place, for all such strategies."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

from polytempo.core.codec import check_codec
from polytempo.core.rule import Service
from polytempo.core.strategy import Strategy
from polytempo.core.transform import Transform
from polytempo.server.codecs import check_pull_codec, check_push_codec
from polytempo.server.worker.transforms import pull, push

MAX_REPLICAS = 2
MAX_SHARDS = 64
"""Each copy of a shard is a process of its own; more shards than this are a mistake."""

T = TypeVar("T")


def check_service(service: Service) -> None:
    """Raise ValueError for numbers or codecs that no parameter server can have.

    `replicas` are the further copies of each shard: with r of them, what was acknowledged survives the loss of any r
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
    for codec in (service.codec, service.pull_codec):
        if codec is not None:
            check_codec(codec)
    check_push_codec(service.codec)
    check_pull_codec(service.pull_codec)
    if service.hierarchical:
        _check_sums(service)


def _check_sums(service: Service) -> None:
    """Raise ValueError where a shard cannot use the sum of several workers' gradients as it would use each of them."""
    if not service.rule.adds_sums:
        raise ValueError(
            f"hierarchical=True sums the gradients of a host's workers before they are pushed, and {service.rule.name} "
            "treats each by its own staleness; leave hierarchical out, or take async_sgd, downpour, or softsync with "
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


def choice(what: str, given: str, choices: Mapping[str, T]) -> T:
    """The value of `given` among `choices`. ValueError where there is none, with the names that there are."""
    if given not in choices:
        raise ValueError(f"{what} must be one of {', '.join(choices)}, got {given!r}")
    return choices[given]
