"""The options of `polytempo bench`, read from text and checked before torch is imported. None: all that there are."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from polytempo.cluster.measured import read_cluster
from polytempo.cluster.rate import rate_of
from polytempo.spec.text.call import split_calls
from polytempo.spec.text.declaration import declared

MEASURED = (
    "fp16, bf16, feedback(int8), feedback(dynamic8), feedback(one_bit), feedback(sign), "
    "feedback(threshold(density=0.01)), feedback(top_k(ratio=0.01)), feedback(random_k(ratio=0.01)), dgc(ratio=0.001), "
    "qsgd, terngrad, natural, low_rank(rank=1), low_rank(rank=4)"
)
"""The codecs to measure if none is named: with feedback where a codec takes it (`int8_sgd` itself has none)."""
MODEL, LINK = "784-2048-2048-10", "1gbit"
RESULT = "result.json"

_UNITS = {"": 1, "B": 1, "KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30, "KB": 10**3, "MB": 10**6, "GB": 10**9}
_SIZES = "4KiB,64KiB,1MiB,16MiB,256MiB"
_MAX_FOLDERS = 10_000


def collectives_values(given: Mapping[str, Any]) -> dict[str, Any]:
    """What `bench collectives` measures. `ValueError` for what the options cannot mean."""
    quick = bool(given["quick"])
    bench_folder("collectives", given["out"])
    sizes = _or(given["sizes"], "4KiB,1MiB" if quick else _SIZES)
    return {
        "ranks": _numbers("--ranks", _or(given["ranks"], "2" if quick else "2,4")),
        "sizes": [parse_size(each) for each in _parts("--sizes", sizes)],
        "operations": None if given["operations"] is None else _parts("--operations", given["operations"]),
        "rounds": _at_least_one("--rounds", _or(given["rounds"], 2 if quick else 7)),
        "turn_s": _positive("--turn-s", _or(given["turn_s"], 0.01 if quick else 0.1)),
    }


def training_values(given: Mapping[str, Any]) -> dict[str, Any]:
    """What `bench training` measures."""
    quick = bool(given["quick"])
    bench_folder("training", given["out"])
    models = _or(given["models"], "mlp" if quick else None)
    return {
        "models": None if models is None else _parts("--models", models),
        "workers": _or(given["workers"], 2),
        "rounds": _at_least_one("--rounds", _or(given["rounds"], 2 if quick else 9)),
        "turn_s": _positive("--turn-s", _or(given["turn_s"], 0.1 if quick else 1.0)),
    }


def memory_values(given: Mapping[str, Any]) -> dict[str, Any]:
    """What `bench memory` measures."""
    quick = bool(given["quick"])
    bench_folder("memory", given["out"])
    return {
        "workers": _or(given["workers"], 2 if quick else 4),
        "parameters": _count("--parameters", _or(given["parameters"], "1M" if quick else "100M")),
        "steps": _at_least_one("--steps", _or(given["steps"], 2 if quick else 3)),
    }


def compression_values(given: Mapping[str, Any]) -> dict[str, Any]:
    """What `bench compression` measures."""
    bench_folder("compression", given["out"])
    cluster = None if given.get("cluster") is None else read_cluster(given["cluster"])
    if cluster is not None and (given["link"] is not None or given["latency_us"] is not None):
        raise ValueError(f"--cluster {given['cluster']}: it says the network; leave out --link and --latency-us")
    latency_us = _or(given["latency_us"], 50.0)
    if not 0 <= latency_us < float("inf"):
        raise ValueError(f"--latency-us {latency_us:g}: must be 0 or more microseconds")
    codecs = _or(given["codecs"], MEASURED)
    if not codecs.strip():
        raise ValueError(
            f"--codecs {codecs!r}: the value is empty; write codecs, such as 'int8, top_k', or leave the option out"
        )
    calls = split_calls(codecs)
    for call in calls:
        declared().codec(call)
    return {
        "sizes": parse_model(_or(given["model"], MODEL)),
        "latency_s": latency_us * 1e-6 if cluster is None else cluster.network.latency_s,
        "bytes_per_s": parse_link(_or(given["link"], LINK)) if cluster is None else cluster.network.bytes_per_s,
        "cluster": cluster,
        "workers": _or(given["workers"], 4),
        "codecs": calls,
        "steps": _at_least_one("--rounds", _or(given["rounds"], 3 if given["quick"] else 9)),
    }


def parse_size(text: str) -> int:
    """`"4KiB"`, `"1.5 MiB"` or `"4096"` as bytes. ValueError names what was written and what could be."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-zA-Z]*)", text.strip())
    unit = _UNITS.get(found[2].upper()) if found else None
    if not found or unit is None:
        raise ValueError(f"--sizes {text}: must be sizes separated by commas, such as 4096, 4KiB or 16MB")
    return int(float(found[1]) * unit)


def parse_model(text: str) -> list[int]:
    """`"784-2048-10"` as the sizes of a perceptron's layers."""
    parts = text.split("-")
    if len(parts) < 2 or not all(part.isdecimal() and int(part) for part in parts):
        raise ValueError(f"--model {text}: must be the layer sizes of a perceptron, such as {MODEL}")
    return [int(part) for part in parts]


def parse_link(text: str) -> float:
    """`"1gbit"`, `"100 Mbit/s"` or `"2.5Gbit"` as bytes a second."""
    try:
        return rate_of(text)
    except ValueError as error:
        raise ValueError(f"--link {error}") from None


def bench_folder(name: str, out: Path | None) -> Path:
    """A folder without a result: the one that was asked for, or a new one under `runs/`."""
    if out is not None:
        if out.exists() and not out.is_dir():
            raise ValueError(f"--out {out}: this is a file; name a folder")
        if (out / RESULT).exists():
            raise ValueError(f"--out {out}: a result is in it; name another folder")
        return out
    for number in range(1, _MAX_FOLDERS + 1):
        folder = Path("runs") / (f"bench-{name}" if number == 1 else f"bench-{name}-{number}")
        if not folder.exists():
            return folder
    raise ValueError(f"runs holds {_MAX_FOLDERS:,} folders named bench-{name}; name another one with --out")


def _or(given: Any, default: Any) -> Any:
    """What was given, zero and nothing too: they are refused, not replaced."""
    return default if given is None else given


def _parts(option: str, text: str) -> list[str]:
    parts = [part.strip() for part in text.split(",")]
    if not all(parts):
        raise ValueError(f"{option} {text}: must be names separated by commas, and one of them is empty")
    return parts


def _numbers(option: str, text: str) -> list[int]:
    parts = _parts(option, text)
    if not all(part.isdecimal() for part in parts):
        raise ValueError(f"{option} {text}: must be whole numbers separated by commas, such as 2,4")
    return [int(part) for part in parts]


def _count(option: str, text: str) -> int:
    """`"100M"`, `"1_000_000"` or `"250k"` as a number."""
    scale = {"K": 10**3, "M": 10**6, "G": 10**9, "B": 10**9}.get(text[-1:].upper(), 1)
    digits = text[:-1] if scale > 1 else text
    if not digits.replace("_", "").isdecimal():
        raise ValueError(f"{option} {text}: must be a whole number such as 1000000, 250k or 100M")
    return int(digits) * scale


def _at_least_one(option: str, number: int) -> int:
    if number < 1:
        raise ValueError(f"{option} {number}: must be at least 1")
    return number


def _positive(option: str, number: float) -> float:
    if not 0 < number < float("inf"):
        raise ValueError(f"{option} {number:g}: must be a number of seconds above 0")
    return number
