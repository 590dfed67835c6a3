"""`polytempo bench compression`."""

from __future__ import annotations

from typing import Any

from polytempo.bench.compression import Candidate, CompressionPlan
from polytempo.bench.compression import compression as measure_compression
from polytempo.cli.bench.bench import perform
from polytempo.cli.bench.bench_options import MEASURED, CompressionOptions
from polytempo.cli.options.network_options import network_of
from polytempo.cluster.cluster_file import read_cluster
from polytempo.compression import through
from polytempo.core import Transform
from polytempo.spec.text.call import split_calls
from polytempo.spec.text.catalogue import NAMES


def compression(asked: CompressionOptions) -> None:
    """`polytempo bench compression`."""
    plan = plan_of(asked)
    perform("compression", lambda: measure_compression(plan), asked.out, as_json=asked.json)


def plan_of(asked: CompressionOptions) -> CompressionPlan:
    """The plan with these options."""
    return CompressionPlan(
        sizes=asked.model,
        link=network_of(asked.link, asked.latency_us, asked.cluster, "1gbit"),
        workers=asked.workers,
        candidates=[candidate(call) for call in asked.codecs or split_calls(MEASURED)],
        steps=asked.rounds or (3 if asked.quick else 9),
        cluster=None if asked.cluster is None else read_cluster(asked.cluster),
    )


def candidate(text: str) -> Candidate:
    """The codec, or `low_rank`, that `text` spells."""
    found: Any = NAMES.codec(text)
    if isinstance(found, Transform):
        return Candidate(text, found)
    return Candidate(found.facts.name, through(found), found)
