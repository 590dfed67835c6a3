"""`polytempo bench compression`: what is asked for, read from text."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from polytempo import aggregation
from polytempo.bench.compression import Candidate, CompressionPlan
from polytempo.bench.compression import compression as measure_compression
from polytempo.cli.bench import perform
from polytempo.cluster import Link
from polytempo.compression import through
from polytempo.core import Transform
from polytempo.spec.call import parse_call, split_calls
from polytempo.spec.catalogue import CODECS
from polytempo.spec.resolution import Factory, Function, resolve

MEASURED = (
    "fp16, bf16, feedback(int8), feedback(dynamic8), feedback(one_bit), feedback(sign), "
    "feedback(threshold(density=0.01)), feedback(top_k(ratio=0.01)), feedback(random_k(ratio=0.01)), dgc(ratio=0.001), "
    "qsgd, terngrad, natural, low_rank(rank=1), low_rank(rank=4)"
)
"""What is measured where nothing is named: with feedback what can take it (`int8_sgd` itself has none)."""
MODEL, LINK = "784-2048-2048-10", "1gbit"

_FUNCTIONS: Mapping[str, Function] = {**CODECS, "low_rank": aggregation.low_rank}
_INNER = {name: Factory(function) for name, function in CODECS.items() if name != "feedback"}
_BITS = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}


def compression(given: Mapping[str, Any]) -> None:
    """`polytempo bench compression`."""
    plan = plan_of(given)
    perform("compression", lambda: measure_compression(plan), given)


def plan_of(given: Mapping[str, Any]) -> CompressionPlan:
    """The plan that the options spell. `ValueError` for what they cannot mean."""
    quick = bool(given["quick"])
    latency_us = 50.0 if given["latency_us"] is None else given["latency_us"]
    if not 0 <= latency_us < float("inf"):
        raise ValueError(f"--latency-us {latency_us:g}: must be 0 or more microseconds")
    steps = (3 if quick else 9) if given["rounds"] is None else given["rounds"]
    if steps < 1:
        raise ValueError(f"--rounds {steps}: must be at least 1")
    codecs = MEASURED if given["codecs"] is None else given["codecs"]
    if not codecs.strip():
        raise ValueError(
            f"--codecs {codecs!r}: the value is empty; write codecs, such as 'int8, top_k', or leave the option out"
        )
    return CompressionPlan(
        sizes=parse_model(MODEL if given["model"] is None else given["model"]),
        link=Link(latency_us * 1e-6, parse_link(LINK if given["link"] is None else given["link"])),
        workers=4 if given["workers"] is None else given["workers"],
        candidates=[candidate(call) for call in split_calls(codecs)],
        steps=steps,
    )


def parse_model(text: str) -> list[int]:
    """`"784-2048-10"` as the sizes of a perceptron's layers."""
    parts = text.split("-")
    if len(parts) < 2 or not all(part.isdecimal() and int(part) for part in parts):
        raise ValueError(f"--model {text}: must be the layer sizes of a perceptron, such as {MODEL}")
    return [int(part) for part in parts]


def parse_link(text: str) -> float:
    """`"1gbit"`, `"100 Mbit/s"` or `"2.5Gbit"` as bytes a second."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmg]bit)(?:/s)?", text.strip().lower())
    if not found or not float(found[1]):
        raise ValueError(f"--link {text}: write a speed like 100mbit, 1gbit or 2.5gbit")
    return float(found[1]) * _BITS[found[2]] / 8


def candidate(text: str) -> Candidate:
    """The codec, or `low_rank`, that `text` spells."""
    found: Any = resolve(parse_call(text), _FUNCTIONS, {"codec": _INNER}, what="codec")
    if isinstance(found, Transform):
        return Candidate(text, found)
    return Candidate(found.name, through(found), found)
