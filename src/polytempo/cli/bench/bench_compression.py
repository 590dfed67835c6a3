"""`polytempo bench compression`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from polytempo.bench.compression import Candidate, CompressionPlan
from polytempo.bench.compression import compression as measure_compression
from polytempo.cli.bench.bench import perform
from polytempo.cluster import Link
from polytempo.compression import through
from polytempo.core import Transform
from polytempo.spec.text.catalogue import NAMES


def compression(values: Mapping[str, Any], given: Mapping[str, Any]) -> None:
    """`polytempo bench compression`."""
    plan = plan_of(values)
    perform("compression", lambda: measure_compression(plan), given)


def plan_of(values: Mapping[str, Any]) -> CompressionPlan:
    """The plan with these values, as `bench_values` reads them."""
    return CompressionPlan(
        sizes=values["sizes"],
        link=Link(values["latency_s"], values["bytes_per_s"]),
        workers=values["workers"],
        candidates=[candidate(call) for call in values["codecs"]],
        steps=values["steps"],
        cluster=values["cluster"],
    )


def candidate(text: str) -> Candidate:
    """The codec, or `low_rank`, that `text` spells."""
    found: Any = NAMES.codec(text)
    if isinstance(found, Transform):
        return Candidate(text, found)
    return Candidate(found.facts.name, through(found), found)
