"""`polytempo plan split`: how each layer of a job's model would be split over ranks, and what its exchanges cost."""

from __future__ import annotations

import sys
from dataclasses import asdict
from pathlib import Path

from polytempo.cli.options.plan import found_job
from polytempo.cli.options.show import notes_on_stderr, show_json, show_table, size
from polytempo.cli.predict.plan_requests import SplitRequest
from polytempo.partition.plan import SplitLayerPlan, SplitPlan, split_plan
from polytempo.partition.tensor.rules import rule_text
from polytempo.partition.wires import AS_THEY_ARE, WAYS, Wires
from polytempo.report.pages.summary import human_seconds
from polytempo.spec.job_calls import data_of, model_of
from polytempo.spec.text.catalogue import codec_of
from polytempo.training.parts.staged_training import sample_of

_COLUMNS = ("layer", "kind", "|W|", "way", "sent forward", "backward", "takes", "computing saved")


def plan_split(asked: SplitRequest, data: Path | None, *, as_json: bool) -> None:
    """Plan the job's model, and show the table of its layers and the strategy that splits them."""
    job = found_job(asked.job)
    with notes_on_stderr():
        batch_size = asked.batch_size or job.batch_size
        wires = Wires(*map(codec_of, asked.codecs))
        found = split_plan(model_of(job), sample_of(job, data_of(job, data), 2), asked.parts, wires)
    costs = {each.volume.name: _Cost(found, each, batch_size, asked) for each in found.layers}
    slower = found.slower(
        batch_size,
        latency_s=asked.latency_us * 1e-6,
        bytes_per_s=asked.bytes_per_s,
        flops_per_s=asked.gflops * 1e9,
    )
    if as_json:
        show_json(
            {
                "job": job.name,
                "parts": asked.parts,
                "batch_size": batch_size,
                "bytes_per_s": asked.bytes_per_s,
                "latency_s": asked.latency_us * 1e-6,
                "flops_per_s": asked.gflops * 1e9,
                **asked.codecs._asdict(),
                "rules": {name: str(way) for name, way in found.rules.items()},
                "layers": [_plain(each, costs[each.volume.name]) for each in found.layers],
            }
        )
    else:
        show_table(_COLUMNS, [*(_row(each, costs[each.volume.name]) for each in found.layers), _total(costs)])
        print(
            f"\n{asked.parts} workers hold one model, {batch_size:,} samples a step, {asked.bytes_per_s * 8e-9:g} "
            f"Gbit/s, {asked.latency_us:g} us, {asked.gflops:g} Gflop/s a worker"
        )
        if wires != AS_THEY_ARE:
            print(wires)
        strategy = f"split('{rule_text(found.rules)}', parts={asked.parts}{asked.codecs.text})"
        print(f'--strategy "{strategy}"' if found.rules else "there is no layer to split")
    if slower:
        print(f"note: {slower}", file=sys.stderr)


class _Cost:
    """Of one layer in a step."""

    def __init__(self, plan: SplitPlan, layer: SplitLayerPlan, batch_size: int, asked: SplitRequest) -> None:
        self.forward, self.backward = (plan.passing_bytes(layer, way, batch_size) for way in WAYS)
        self.seconds = plan.seconds_of(layer, batch_size, asked.latency_us * 1e-6, asked.bytes_per_s)
        self.saved_s = plan.saved_s(layer, batch_size, asked.gflops * 1e9)


def _row(each: SplitLayerPlan, cost: _Cost) -> tuple[str, ...]:
    layer = each.volume
    return (
        *(layer.name or "(model)", layer.kind, size(layer.weight_bytes), str(each.way or "whole")),
        *(size(cost.forward), size(cost.backward), human_seconds(cost.seconds), human_seconds(cost.saved_s)),
    )


def _total(costs: dict[str, _Cost]) -> tuple[str, ...]:
    forward, backward, seconds, saved_s = (
        sum(getattr(cost, name) for cost in costs.values()) for name in ("forward", "backward", "seconds", "saved_s")
    )
    return ("all", "", "", "", size(forward), size(backward), human_seconds(seconds), human_seconds(saved_s))


def _plain(each: SplitLayerPlan, cost: _Cost) -> dict[str, object]:
    way = None if each.way is None else str(each.way)
    told = {"forward_bytes": cost.forward, "backward_bytes": cost.backward}
    return {**asdict(each.volume), "way": way, **told, "seconds": cost.seconds, "saved_s": cost.saved_s}
