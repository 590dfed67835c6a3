"""A strategy's service, refused where it could never work: what all strategies with a server check in one place."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, TypeVar

from polytempo.core.codec import Codec, check_codec
from polytempo.core.rule import Modified, Rate, Rule, Service, UpdateRule
from polytempo.core.strategy import Strategy
from polytempo.core.transform import Transform
from polytempo.server.codecs import check_pull_codec, check_push_codec
from polytempo.server.worker.pull import pull
from polytempo.server.worker.push import push

MAX_REPLICAS = 2
MAX_SHARDS = 64
"""Each copy of a shard is a process of its own; more shards than this are a slip, not a plan."""

T = TypeVar("T")


def service(
    rule: Rule,
    *,
    shards: int,
    replicas: int,
    optimizer: UpdateRule | None = None,
    modifiers: tuple[Modified, ...] = (),
    deals: Literal["freely", "evenly"] = "freely",
    warm_start: int = 0,
    waits: bool = False,
    rate: Rate | None = None,
    codec: Codec | None = None,
    pull_codec: Codec | None = None,
    decays: Literal["shards", "workers"] = "shards",
) -> Service:
    """`Service` with its numbers checked, and its codecs.

    `replicas` are the further copies of each shard: with r of them, what was acknowledged survives the loss of any r
    processes. "evenly" is for rules that make workers wait for each other (see `server.coordinator.batch_scheduler`).
    """
    if shards < 1:
        raise ValueError(f"a parameter server needs at least 1 shard, got shards={shards}")
    if shards > MAX_SHARDS:
        raise ValueError(f"a parameter server has at most {MAX_SHARDS} shards, each a process, got shards={shards}")
    if not 0 <= replicas <= MAX_REPLICAS:
        raise ValueError(f"a shard has 0 to {MAX_REPLICAS} further copies, got replicas={replicas}")
    if warm_start < 0:
        raise ValueError(f"warm_start is a number of steps that one worker takes alone, got {warm_start}")
    for each in (codec, pull_codec):
        if each is not None:
            check_codec(each)
    check_push_codec(codec)
    check_pull_codec(pull_codec)
    return Service(
        *(rule, optimizer, modifiers, shards, replicas, deals, warm_start, waits, rate),
        codec=codec,
        pull_codec=pull_codec,
        decays=decays,
    )


def served(
    name: str, service: Service, gradients: Transform | None = None, parameters: Transform | None = None
) -> Strategy:
    """The strategy `name`: unless told otherwise, each gradient is pushed and the parameters are pulled every step."""
    return Strategy(
        name,
        gradients=push() if gradients is None else gradients,
        parameters=pull() if parameters is None else parameters,
        synchronized=False,
        server=service,
    )


def choice(what: str, given: str, choices: Mapping[str, T]) -> T:
    """What `given` stands for among `choices`."""
    if given not in choices:
        raise ValueError(f"{what} must be one of {', '.join(choices)}, got {given!r}")
    return choices[given]
