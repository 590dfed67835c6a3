"""`SearchSpace`: the runs that a plan compares: strategies x workers x batches.

strategies   routes, codecs, periods, shards of a parameter server, stages of a pipeline, parts of layers
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple

from polytempo.core import Strategy
from polytempo.runs.frame.arguments import check_workers
from polytempo.spec.text.catalogue import parse_strategy

CODECS = {
    "bf16": "bf16_sgd()",
    "int8": "int8_sgd()",
    "one_bit": "one_bit_sgd()",
    "sign": "sign_sgd()",
    "qsgd": "qsgd()",
    "terngrad": "terngrad()",
    "top_k": "top_k_sgd(ratio=0.01)",
    "low_rank": "power_sgd(rank=2)",
}
"""Codec -> the strategy that encodes gradients by it."""
_OF_MOVEMENT = {"one_bit": "feedback(one_bit())", "top_k": "feedback(top_k(ratio=0.1))"}
"""Codecs for the movement of workers in a period of local SGD, by the same names."""
SYNCHRONOUS = "sync_sgd(route=native)"


class PlannedRun(NamedTuple):
    """One run that might be made."""

    strategy: str
    """The strategy's full name."""
    workers: int
    batch_size: int
    """Samples in a step of each model."""
    models: int = 1
    """Replicas: workers / workers that hold one model together."""
    family: str = SYNCHRONOUS
    """The strategy of the trials: it needs as many samples, because a route, shard or stage changes none."""
    balance: Literal["equal", "speed"] = "equal"
    """"speed": the replicas' parts of a step's samples follow their speeds (`by_speed`)."""

    @property
    def global_batch(self) -> int:
        """Samples of all workers in a step."""
        return self.models * self.batch_size

    def __str__(self) -> str:
        by_speed = ", by speed" if self.balance == "speed" else ""
        return f"{self.strategy}, {self.workers} x {self.batch_size}{by_speed}"


class LeftOut(NamedTuple):
    """A run that is not compared, and why."""

    what: str
    why: str


class SearchSpace(NamedTuple):
    """All combinations of these."""

    strategies: tuple[str, ...]
    workers: tuple[int, ...]
    batch_sizes: tuple[int, ...]

    def runs(self) -> tuple[list[PlannedRun], list[LeftOut]]:
        """Possible runs, and impossible runs. One worker needs no strategy: it has synchronous SGD alone.

        Errors: ValueError for a strategy that does not exist.
        """
        found: dict[tuple[str, int, int], PlannedRun] = {}
        left: list[LeftOut] = []
        for strategy in map(parse_strategy, self.strategies):
            family = family_of(strategy)
            for workers in self.workers:
                if workers == 1 and max(self.workers) > 1 and strategy.name != SYNCHRONOUS:
                    continue
                try:
                    check_workers(strategy, workers)
                except ValueError as error:
                    left.append(LeftOut(f"{strategy}, {workers} workers", str(error)))
                    continue
                for batch_size in self.batch_sizes:
                    run = PlannedRun(strategy.name, workers, batch_size, workers // strategy.holders, family)
                    found[run[:3]] = run
        return list(found.values()), left


def family_of(strategy: Strategy) -> str:
    """The strategy that needs as many samples and is cheaper to try.

    Routes change no mean, shards no rule, and stages that wait for each other and parts of layers no gradient.
    """
    call, _, rest = strategy.name.partition("(")
    waits = call in ("gpipe", "one_f_one_b", "interleaved", "zero_bubble", "split", "hybrid")
    if call == "sync_sgd" or (waits and "inner=" not in rest):
        return SYNCHRONOUS
    if strategy.server is not None and strategy.server.shards > 1:
        return parse_strategy(strategy.name.replace(f"shards={strategy.server.shards}", "shards=1")).name
    return strategy.name


def usual_strategies(
    codecs: Sequence[str] = ("bf16", "one_bit", "low_rank"),
    periods: Sequence[int] = (4, 16),
    shards: Sequence[int] = (1,),
    stages: Sequence[int] = (),
    parts: Sequence[int] = (),
) -> tuple[str, ...]:
    """Synchronous SGD over two routes, ACCO, gossip, SPARTA, SGD with each codec, local strategies with each period,
    servers, pipelines, split layers.

    All of them keep the job's optimizer: strategies that are an optimizer need a learning rate of their own.

    Errors: ValueError for a codec that is not in `CODECS`.
    """
    if unknown := [codec for codec in codecs if codec not in CODECS]:
        raise ValueError(f"codec {unknown[0]!r} is not tried by plans; there are: {', '.join(CODECS)}")
    return tuple(_usual(codecs, periods, shards, stages, parts))


def _usual(
    codecs: Sequence[str], periods: Sequence[int], shards: Sequence[int], stages: Sequence[int], parts: Sequence[int]
) -> Iterator[str]:
    yield from ("sync_sgd()", "sync_sgd(route=halving_doubling)", "acco()", "gossip()", "sparta()")
    for codec in codecs:
        yield CODECS[codec]
    for period in periods:
        yield f"local_sgd(period={period})"
        yield f"diloco(period={period})"
        if period > 1:  # an answer comes a step late
            yield f"streaming_diloco(period={period})"
        for local in ("sparse_loco", "noloco", "async_diloco"):
            yield f"{local}(period={period})"
        for codec in codecs:
            if codec in _OF_MOVEMENT:
                yield f"local_sgd(period={period}, codec={_OF_MOVEMENT[codec]})"
    for count in shards:
        yield f"async_sgd(shards={count})"
    for count in stages:
        yield f"one_f_one_b(stages={count})"
    for count in parts:
        yield f"split(parts={count})"
