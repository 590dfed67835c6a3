"""Readers of an option's value: names, lists, sizes, rates. ValueError with the remedy. Torch is not loaded."""

from __future__ import annotations

import re
from pathlib import Path

from polytempo import jobs
from polytempo.cluster.cluster import rate_of
from polytempo.spec.table.option import converted
from polytempo.spec.text.call import split_calls
from polytempo.spec.text.declaration import declared
from polytempo.spec.text.names import BUSY

_BYTES = {"": 1, "B": 1, "KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30, "KB": 10**3, "MB": 10**6, "GB": 10**9}
_SCALES = {"k": 1e3, "m": 1e6, "g": 1e9, "b": 1e9}


def written(given: object) -> str:
    """A text that is not empty."""
    text: str = converted(given, str)
    if not text.strip():
        raise ValueError("the value is empty; write a name, or leave the option out")
    return text


def run_folder(text: str) -> str:
    """The folder of a run that exists; a URL is looked at later."""
    if "://" not in text and not Path(text).is_dir():
        raise ValueError("there is no such folder; name the folder of a run, or of one of its checkpoints")
    return text


def runs_folder(text: str) -> str:
    """A folder of runs that exists; a URL is looked at later."""
    if "://" not in text and not Path(text).is_dir():
        raise ValueError("there is no such folder; name the folder that holds your runs, or begin a run first")
    return text


def job(given: object) -> str:
    """A job that exists."""
    jobs.check(text := written(given))
    return text


def job_or_run(given: object) -> str:
    """A job that exists, or the folder or URL of a run."""
    text = written(given)
    return text if is_folder(text) else job(text)


def is_folder(text: str) -> bool:
    """True for a folder that is there, and for a URL."""
    return "://" in text or Path(text).is_dir()


def strategy(given: object) -> str:
    """Strategies that exist, with arguments that they have."""
    for each in split_calls(text := written(given)):
        declared().strategy(each)
    return text


def strategies(given: object) -> str:
    """`strategy`, also for a list of texts."""
    return strategy(", ".join(given) if isinstance(given, list) and all(isinstance(e, str) for e in given) else given)


def cluster(given: object) -> str:
    """A cluster that can be made, or the file of one."""
    text = written(given)
    if not text.endswith(".toml"):
        declared().cluster(text)
    elif not Path(text).is_file():
        raise ValueError("there is no such file; `polytempo calibrate` writes one")
    return text


def distribution(given: object) -> str:
    """A distribution of computing times; `busy` is in the file of a cluster."""
    if (text := written(given)) != BUSY:
        declared().distribution(text)
    return text


def codec(given: object) -> str:
    """A codec that exists."""
    declared().codec(text := written(given))
    return text


def codecs(given: object) -> tuple[str, ...]:
    """Several codecs, with commas between."""
    found = tuple(split_calls(written(given)))
    for each in found:
        declared().codec(each)
    return found


def names(given: str) -> tuple[str, ...]:
    """Names with commas between."""
    found = tuple(each.strip() for each in given.split(","))
    if not all(found):
        raise ValueError("must be names separated by commas, and one of them is empty")
    return found


def whole_numbers(given: str, most: int = 1_000_000) -> tuple[int, ...]:
    """Whole numbers with commas between, sorted."""
    try:
        found = tuple(sorted({int(each) for each in given.split(",")}))
    except ValueError:
        raise ValueError("must be whole numbers separated by commas, such as 2,4,8") from None
    if not 1 <= found[0] <= found[-1] <= most:
        raise ValueError(f"must be from 1 to {most:,}")
    return found


def count(given: str) -> int:
    """A number of parameters: `6e6`, `250k`, `25M` or `1_000_000`."""
    found = re.fullmatch(r"(\d+(?:_\d+)*(?:\.\d+)?(?:e\d{1,2})?)([kmgb]?)", given.strip().lower(), re.ASCII)
    number = float(found[1]) * _SCALES.get(found[2], 1) if found else 0.0
    if not 1 <= number <= 1e12:
        raise ValueError("must be a number of parameters such as 6e6, 250k or 25M, up to 1e12")
    return round(number)


def sizes(given: str) -> tuple[int, ...]:
    """Bytes: `"4KiB, 1.5 MiB, 4096"`."""
    found = [re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-zA-Z]*)", each.strip()) for each in given.split(",")]
    units = [None if each is None else _BYTES.get(each[2].upper()) for each in found]
    if None in units:
        raise ValueError("must be sizes separated by commas, such as 4096, 4KiB or 16MB")
    return tuple(int(float(each[1]) * unit) for each, unit in zip(found, units, strict=True) if each and unit)


def layer_sizes(given: str) -> tuple[int, ...]:
    """Sizes of a perceptron's layers: `784-2048-10`."""
    parts = given.split("-")
    if len(parts) < 2 or not all(part.isdecimal() and int(part) for part in parts):
        raise ValueError("must be the layer sizes of a perceptron, such as 784-2048-2048-10")
    return tuple(map(int, parts))


def rate(given: str) -> float:
    """Bytes a second: `"1gbit"`, `"100 Mbit/s"` or `"2.5Gbit"`."""
    try:
        return rate_of(given)
    except ValueError:
        raise ValueError("write a speed like 100mbit, 1gbit or 2.5gbit") from None
