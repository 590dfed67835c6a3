"""What `polytempo plan JOB` is asked to do, checked before torch is imported."""

from __future__ import annotations

from collections.abc import Mapping
from math import inf
from pathlib import Path
from typing import NamedTuple

from polytempo.cli.options.command_options import CommandOptions, given_options
from polytempo.cli.options.measured_hosts import measured_workers
from polytempo.cli.options.request import check_cluster, check_job, check_strategies
from polytempo.cluster.prices import read_price, read_spread
from polytempo.spec.options import RunOptions

_WORKERS = (1, 2, 4, 8, 16)
_MOST_WORKERS = 4096


class RunPlanRequest(NamedTuple):
    """A job, a target, and what is compared within which limits."""

    job: str
    command: CommandOptions
    """Of it `cluster` and `stragglers`."""
    options: RunOptions
    """Of them `until`, `data` and `seed`."""
    strategies: str | None
    workers: tuple[int, ...]
    batch_sizes: tuple[int, ...] | None
    axes: dict[str, tuple[int, ...] | tuple[str, ...]]
    """codecs, periods, shards, stages, parts: those that were given."""
    memory_bytes: float | None
    deadline_s: float | None
    budget: float | None
    price: float | None
    spread: dict[str, float]


def run_plan_request(
    job: str,
    shared: Mapping[str, object],
    lists: Mapping[str, str | None],
    limits: Mapping[str, float | None],
    page: Path | None,
) -> RunPlanRequest:
    """The request. ValueError for what cannot be planned."""
    check_job(job)
    asked = given_options(shared)
    command, options = asked.command, RunOptions(**asked.run)
    if not options.until:
        raise ValueError("a plan needs a target: give --until, such as --until accuracy=0.97 or --until loss=0.1")
    for name, number in limits.items():
        if number is not None and not 0 < number < inf:
            raise ValueError(f"--{name.replace('_', '-')} {number:g}: must be above 0")
    if page is not None and (page.is_dir() or not page.parent.is_dir()):
        raise ValueError(f"--page {page}: name a file in a folder that exists, such as plan.html")
    if (strategies := lists["strategies"]) is not None:
        check_strategies(strategies)
        if given := [name for name in _AXES if lists[name] is not None]:
            raise ValueError(f"--strategies {strategies}: it says all strategies; leave out --{given[0]}")
    price, spread = _of_cluster(command, limits["price"])
    if limits["budget"] is not None and price is None:
        raise ValueError(
            f"--budget {limits['budget']:g}: it needs the price of a host for an hour; give --price, or host_hour in "
            "the table [price] of the cluster's file"
        )
    memory_gb = limits["memory_gb"]
    return RunPlanRequest(
        job=job,
        command=command,
        options=options,
        strategies=strategies,
        workers=_numbers("workers", lists["workers"], _MOST_WORKERS) or _usual_workers(command.cluster),
        batch_sizes=_numbers("batch-sizes", lists["batch_sizes"]),
        axes={name: found for name in _AXES if (found := _axis(name, lists[name])) is not None},
        memory_bytes=None if memory_gb is None else 1e9 * memory_gb,
        deadline_s=limits["deadline_s"],
        budget=limits["budget"],
        price=price,
        spread=spread,
    )


def _usual_workers(cluster: str | None) -> tuple[int, ...]:
    """1, 2, 4, 8, 16; of hosts that were measured as many of them as took part, and all that did."""
    most = measured_workers(cluster)
    return _WORKERS if most is None else (*(each for each in _WORKERS if each < most), most)


_AXES = ("codecs", "periods", "shards", "stages", "parts")


def _axis(name: str, text: str | None) -> tuple[int, ...] | tuple[str, ...] | None:
    if name != "codecs":
        return _numbers(name, text)
    return None if text is None else tuple(each.strip() for each in text.split(",") if each.strip())


def _numbers(name: str, text: str | None, most: int = 1_000_000) -> tuple[int, ...] | None:
    """Whole numbers with commas between them."""
    if text is None:
        return None
    try:
        found = tuple(sorted({int(each) for each in text.split(",")}))
    except ValueError:
        raise ValueError(f"--{name} {text}: must be whole numbers with commas between, such as 2,4,8") from None
    if not 1 <= found[0] <= found[-1] <= most:
        raise ValueError(f"--{name} {text}: must be from 1 to {most:,}")
    return found


def _of_cluster(command: CommandOptions, price: float | None) -> tuple[float | None, dict[str, float]]:
    """The price, and the spread of measurements, where the cluster is a file."""
    check_cluster(command.cluster, command.stragglers)
    if command.cluster is None or not command.cluster.endswith(".toml"):
        return price, {}
    path = Path(command.cluster)
    return (read_price(path) if price is None else price), read_spread(path)
