"""The planner's price of the change that a run's bound names first, for a cluster that is known."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from polytempo.cluster import Cluster
from polytempo.core.system.folder_lock import held
from polytempo.core.system.url_path import Place
from polytempo.planner.run_price import Pricer
from polytempo.planner.search_space import PlannedRun
from polytempo.runs.frame.run_page import reported
from polytempo.spec.job import Job
from polytempo.spec.result import Result

_PRICED = " Priced on this cluster:"
_MOST_WORKERS = 1024
"""Larger simulations take too long for a sentence."""


def with_price(result: dict[str, Any], job: Job, data: str | Path | None, cluster: Cluster) -> dict[str, Any]:
    """The figures of a run, real or simulated, with the price of the change in `bound`: `priced`, samples per second on
    `cluster` over the present ones there. An earlier price is replaced.

    Unchanged where no plan tries the change, or a price cannot be found. Cost: the job's data once more, and two priced
    simulations, some 0.1 s.
    """
    bound = result.get("bound") or {}
    if not bound.get("tried") or result["workers"] > _MOST_WORKERS:
        return result
    gain = priced_gain(result, bound["tried"], job, data, cluster)
    if gain is None:
        return result
    text = f"{bound['text'].partition(_PRICED)[0]}{_PRICED} {gain:.2f} times the samples per second."
    return result | {"bound": bound | {"priced": gain, "text": text}}


def reported_with_price(
    result: Result, job: Job, data: str | Path | None, cluster: Cluster, out: Place | None
) -> Result:
    """The result with the price (see `with_price`), which the result and the page in the run's folder have, too."""
    bound = with_price(result.as_json(), job, data, cluster)["bound"]
    if bound == result.bound:
        return result
    priced = replace(result, bound=bound)
    if out is None:
        return priced
    with held(out):
        return reported(priced, out)


def priced_gain(
    result: dict[str, Any], tried: dict[str, Any], job: Job, data: str | Path | None, cluster: Cluster
) -> float | None:
    """Samples per second of the run with the values `tried`, over its own, both by the planner's price."""
    run = PlannedRun(result["strategy"], result["workers"], result["batch_size"])
    try:
        pricer = Pricer(job, data, cluster)
        return pricer.price(run._replace(**tried)).samples_per_s / pricer.price(run).samples_per_s
    except Exception:  # the sentence is an addition: no fault of a job in other sizes may cost the run's result
        return None
