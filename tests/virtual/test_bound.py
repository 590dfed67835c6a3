"""The bound of simulated runs: each cluster makes another part of a step the longest."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import polytempo as pt
from polytempo.cluster import Link
from polytempo.planner.bound_price import reported_with_price, with_price
from polytempo.report.pages.diagnoses import diagnoses
from polytempo.report.runs import load_run
from virtual.test_slow_rank import factor, job

s = pt.strategies
FAST = Link(latency_s=1e-6, bytes_per_s=1e12)


def bound(strategy: Any, flops_per_s: float, link: Link, stragglers: Any = None, **more: Any) -> dict[str, Any]:
    cluster = replace(pt.cluster.ethernet(), flops_per_s=flops_per_s, network=link)
    cluster = cluster if stragglers is None else replace(cluster, stragglers=stragglers)
    found = pt.simulate(job(), strategy, 4, cluster, **{"steps": 12} | more).bound
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("kind", "strategy", "flops_per_s", "link"),
    [
        ("computing", s.sync_sgd(), 1e7, FAST),
        ("latency", s.sync_sgd(route=pt.collectives.ring), 1e9, Link(latency_s=1e-3, bytes_per_s=1e9)),
        ("bytes", s.sync_sgd(route=pt.collectives.ring), 1e9, Link(latency_s=1e-6, bytes_per_s=1e5)),
        ("bytes", s.async_sgd(), 1e9, Link(latency_s=1e-6, bytes_per_s=1e5)),
        ("bubble", s.gpipe(stages=2, micro_batches=1), 1e7, FAST),
    ],
    ids=lambda value: str(value) if isinstance(value, str) else "",
)
def test_the_longest_part_of_a_step_bounds_the_run(kind: str, strategy: Any, flops_per_s: float, link: Link) -> None:
    found = bound(strategy, flops_per_s, link)
    assert found["kind"] == kind
    assert found["gain"] >= 1.0
    assert "assumed" not in found["text"]


def test_a_slow_rank_bounds_the_run_by_name() -> None:
    found = bound(s.sync_sgd(), 1e7, FAST, lambda random, host: 1.8 if host == 2 else 1.0, steps=30)
    assert found["kind"] == "stragglers"
    assert "waits for rank 2" in found["text"]


@pytest.mark.parametrize(
    ("strategy", "flops_per_s", "link", "tried", "least", "most"),
    [
        (s.sync_sgd(route=pt.collectives.ring), 1e9, Link(1e-6, 1e5), {"strategy": "bf16_sgd()"}, 1.5, 2.1),
        (s.sync_sgd(), 1e7, FAST, {"workers": 8}, 1.9, 2.01),
        (s.gpipe(stages=2, micro_batches=1), 1e7, FAST, {}, None, None),
    ],
    ids=["half the bytes", "twice the workers", "no plan tries it"],
)
def test_the_planner_prices_the_change(
    strategy: Any, flops_per_s: float, link: Link, tried: dict[str, Any], least: float | None, most: float | None
) -> None:
    """A run that has made the change is so much faster, to a part in fifty."""
    cluster = replace(pt.cluster.ethernet(), flops_per_s=flops_per_s, network=link)
    result = pt.simulate(job(), strategy, 4, cluster, steps=12)
    found = with_price(result.as_json(), job(), None, cluster)
    assert found["bound"]["tried"] == tried
    if least is None or most is None:
        assert found == result.as_json()
        return
    priced = found["bound"]["priced"]
    assert least < priced < most
    assert found["bound"]["text"].endswith(f"Priced on this cluster: {priced:.2f} times the samples per second.")
    changed = pt.simulate(job(), tried.get("strategy", strategy), tried.get("workers", 4), cluster, steps=12)
    assert changed.samples_per_s / result.samples_per_s == pytest.approx(priced, rel=0.02)


def test_the_price_is_in_the_result_and_on_the_page(tmp_path: Path) -> None:
    cluster = replace(pt.cluster.ethernet(), flops_per_s=1e7, network=FAST)
    result = pt.simulate(job(), s.sync_sgd(), 4, cluster, steps=12, out=tmp_path)
    found = reported_with_price(result, job(), None, cluster, tmp_path)
    assert found.bound is not None
    assert found.bound == with_price(result.as_json(), job(), None, cluster)["bound"] != result.bound
    assert load_run(tmp_path).result["bound"] == found.bound
    assert found.bound["text"] in (tmp_path / "report.html").read_text()
    assert with_price(found.as_json(), job(), None, cluster)["bound"] == found.bound, "no second price"
    unpriced = replace(result, bound=None)
    assert reported_with_price(unpriced, job(), None, cluster, tmp_path) is unpriced


def test_runs_without_values_have_a_bound_too() -> None:
    with_values = bound(s.sync_sgd(), 1e7, FAST, steps=10)
    assert bound(s.sync_sgd(), 1e7, FAST, steps=10, meta=True)["kind"] == with_values["kind"]


def test_the_result_and_the_page_have_the_sentences(tmp_path: Path) -> None:
    cluster = replace(pt.cluster.ethernet(), flops_per_s=1e7, stragglers=factor)
    result = pt.simulate(job(), s.sync_sgd(), 4, cluster, steps=30, out=tmp_path)
    written = json.loads((tmp_path / "result.json").read_text())
    assert result.bound is not None
    assert written["bound"]["text"] == result.bound["text"]
    assert [each["who"] for each in written["diagnoses"]] == ["rank-2"]
    slow, last = diagnoses(load_run(tmp_path).result)
    assert slow.startswith("Rank 2 is ")
    page = (tmp_path / "report.html").read_text()
    assert result.bound["text"] in page
    assert slow in page.replace("&#x27;", "'")
    assert last == result.bound["text"]


def test_results_from_before_have_no_sentences() -> None:
    assert diagnoses({"strategy": "sync_sgd()"}) == []
    many = [{"who": f"rank-{n}", "text": f"rank {n} is slow"} for n in range(9)]
    assert diagnoses({"diagnoses": many})[-1] == "4 more were found slow."
