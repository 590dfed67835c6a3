"""Refusals of `through`: impossible ways of a codec, objects that are not codecs, messages of impossible length."""

from __future__ import annotations

import re
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch

from laws.codecs import ROWS, Row
from polytempo import compression as c
from polytempo import strategies
from polytempo.aggregation import krum, low_rank, median, vote
from polytempo.collectives import halving_doubling, hierarchical, native, ring, star, tree
from polytempo.compression.exchange.packing import Packing, whole
from polytempo.compression.exchange.through import through
from polytempo.core import Codec, Transform
from virtual.ways import EXACT_BELOW, values


def refused() -> list[tuple[str, Callable[[], Transform], str]]:
    """An impossible call, and the remedy that the error names."""
    found: list[tuple[str, Callable[[], Transform], str]] = []
    for row in ROWS:
        remembers = row.make().init(torch.zeros(1)) is not None
        if not row.summable:
            for route in (native, ring, tree, star, halving_doubling, hierarchical()):
                name = getattr(route, "__name__", str(route))
                text = f"wires cannot be summed, so route={re.escape(name)} is impossible; use route=all_gather"
                found.append(
                    (f"{row.text} {name}", lambda row=row, route=route: through(row.make(), route=route), text)
                )
        if not row.fixed or remembers:
            text = "remembers more than a residual" if row.fixed else "wires vary in length"
            found.append(
                (f"{row.text} cut", lambda row=row: through(row.make(), route=c.reduce_scatter), f"{text}.*all_gather")
            )
    for merge, route in product((median, krum(1), vote), (native, ring, tree)):
        text = f"{merge.__name__} is not a sum, so route={route.__name__} is impossible; use route=all_gather"
        found.append(
            (f"{merge.__name__} {route.__name__}", lambda m=merge, r=route: through(c.fp16(), m, r), re.escape(text))
        )
    for merge in (krum(1), vote):
        text = f"{re.escape(merge.__name__)} needs whole vectors.* reduce_scatter cuts them; use route=all_gather"
        found.append((f"{merge.__name__} cut", lambda m=merge: through(c.fp16(), m, c.reduce_scatter), text))
    found.append(("exact_below", lambda: through(c.fp16(), exact_below=-1), "exact_below must be .* >= 0, got -1"))
    return found


@pytest.mark.parametrize(
    ("make", "message"), [each[1:] for each in refused()], ids=[each[0].replace(" at 0x", " ") for each in refused()]
)
def test_what_cannot_be_fails_when_it_is_built(make: Callable[[], Transform], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


Wrong = Callable[[], Any]
NO_CODEC: list[tuple[Any, str]] = [
    (c.bf16, r"a codec is the answer of one of pt\.compression, got <function bf16>; write bf16\(\)"),
    ("top_k", r"got 'top_k'; write top_k\(\)"),
    ("top_k(0.1)", r"got 'top_k\(0\.1\)'$"),
    (type(c.bf16()), r"got <class '.*'>; write \w+\(\)"),
    (0.01, r"got 0\.01$"),
    (low_rank, r"PowerSGD \(low_rank\) is an aggregation, not a codec: use strategies\.power_sgd"),
    (low_rank(2), r"PowerSGD \(low_rank\) is an aggregation, not a codec: use strategies\.power_sgd"),
]


@pytest.mark.parametrize(("given", "message"), NO_CODEC, ids=[message for _, message in NO_CODEC])
def test_what_is_no_codec_fails_when_it_is_built(given: Any, message: str) -> None:
    """The factory itself, above all: the error says how it is written."""
    takers: list[Wrong] = [
        lambda: c.feedback(given),
        lambda: through(given),
        lambda: strategies.local_sgd(codec=given),
        lambda: strategies.diloco(codec=given),
        lambda: strategies.async_sgd(codec=given),
        lambda: strategies.downpour(pull_codec=given),
    ]
    for make in takers:
        with pytest.raises(TypeError, match=message):
            make()


@pytest.mark.parametrize("codec", [c.bf16(), c.top_k()], ids=lambda codec: codec.facts.name)
def test_a_route_is_no_string(codec: Codec) -> None:
    route: Any = "ring"
    with pytest.raises(TypeError, match="a route takes a port and a buffer, and 'ring' does not"):
        through(codec, route=route)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.text)
def test_a_message_of_impossible_length_is_refused(row: Row) -> None:
    tensors = values(0, 0, torch.float32)
    packing = Packing(whole(tensors, row.make(), EXACT_BELOW), tensors)
    message, _ = packing.encode(tensors, {name: row.make().init(t) for name, t in tensors.items()}, 1, 0)
    outs = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    for wrong in (message[:0], message[:8], message[:-8]):
        with pytest.raises(ValueError, match="a message"):
            packing.add_(wrong.clone(), outs, 1, 0)
