"""A shard and a client that exchange encoded pushes and pulls in memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from polytempo.compression import bf16, feedback, int8, one_bit, top_k
from polytempo.core import Codec
from polytempo.core.rule import Service, UpdateRule
from polytempo.jobs import find
from polytempo.server.layout import Parameter, Span, Spans
from polytempo.server.message import COORDINATOR, Members, Message, Pull, Push
from polytempo.server.rules.asynchronous import on_arrival
from polytempo.server.shard.shard import Shard
from polytempo.server.timing import Timing
from polytempo.server.worker.client import Client, VectorFormat

DIGITS = find("digits")
MODEL = (Parameter("w", 6000, shape=(60, 100)), Parameter("b", 60, shape=(60,)), Parameter("v", 1940, shape=(1940,)))
NUMEL = 8000
BY_ROWS = ((Span(0, 2000),), (Span(2000, 4000),), (Span(4000, 6000),), (Span(6000, 8000),))
"""Four shards, all cuts between rows or parameters."""
FED = [feedback(bf16()), feedback(int8()), feedback(one_bit()), feedback(top_k(0.01))]
LAUNCHER = 9
by_name = {"ids": lambda codec: codec.facts.name}


def gradients(count: int, seed: int = 0) -> list[Tensor]:
    """Whole numbers over 256, so that sums and differences of some of them are exact."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(-1000, 1000, (NUMEL,), generator=generator) / 256 for _ in range(count)]


def shard(codec: Codec | None, spans: Spans = (Span(0, NUMEL),), number: int = 0, **more: Any) -> Shard:
    made = Service(**{"rule": on_arrival(), "optimizer": UpdateRule("sgd", lr=1.0), "codec": codec, **more})
    found = Shard(number, MODEL, spans, torch.zeros(sum(span.numel for span in spans)), made, native=False)
    found.apply(Members(COORDINATOR, 1, 1, ((0, 1), (1, 1))))
    return found


def client(codec: Codec | None, shards: Sequence[Spans] = ((Span(0, NUMEL),),), **more: Any) -> Client:
    chains = [(10 + number,) for number in range(len(shards))]
    return Client(0, 1, shards, chains, LAUNCHER, Timing(), VectorFormat(parameters=MODEL, codec=codec, **more))


def delivered(worker: Client, machines: Sequence[Shard], now_s: float = 0.0) -> list[Message]:
    """Deliver all messages of `worker` to the shards, with their answers; returns these messages."""
    sent = worker.outbox(now_s)
    for to, request in sent:
        assert isinstance(request, Push | Pull)
        for reply in machines[to - 10].apply(request):
            worker.receive(now_s, to, reply)
    return [request for _, request in sent]
