"""`polytempo plan split`: the split of each layer of a job's model over ranks, and the cost of its exchanges."""

from __future__ import annotations

import sys
from dataclasses import asdict

from polytempo.cli.options.plan import found_job
from polytempo.cli.options.show import notes_on_stderr, show_json, show_table, size
from polytempo.cli.predict.plan_options import SplitOptions, codec_arguments
from polytempo.partition.plan import SplitLayerPlan, SplitPlan, split_plan
from polytempo.partition.tensor.rules import rule_text
from polytempo.partition.wires import AS_THEY_ARE, WAYS, Wires
from polytempo.report.pages.summary import human_seconds
from polytempo.spec.job_calls import data_of, model_of
from polytempo.spec.text.catalogue import codec_of
from polytempo.training.parts.staged_training import sample_of

_COLUMNS = ("layer", "kind", "|W|", "way", "sent forward", "backward", "takes", "computing saved")


def plan_split(asked: SplitOptions) -> None:
    """Plan the job's model, and show the table of its layers and the strategy that splits them."""
    job, network = found_job(asked.job), asked.network
    codecs = {"activations": asked.activations, "gradients": asked.gradients}
    with notes_on_stderr():
        batch_size = asked.batch_size or job.batch_size
        wires = Wires(*map(codec_of, codecs.values()))
        found = split_plan(model_of(job), sample_of(job, data_of(job, asked.data), 2), asked.parts, wires)
    costs = {each.volume.name: _Cost(found, each, batch_size, asked) for each in found.layers}
    slower = found.slower(
        batch_size,
        latency_s=network.latency_s,
        bytes_per_s=network.bytes_per_s,
        flops_per_s=asked.gflops * 1e9,
    )
    if asked.json:
        show_json(
            {
                "job": job.name,
                "parts": asked.parts,
                "batch_size": batch_size,
                "bytes_per_s": network.bytes_per_s,
                "latency_s": network.latency_s,
                "flops_per_s": asked.gflops * 1e9,
                **codecs,
                "rules": {name: str(way) for name, way in found.rules.items()},
                "layers": [_plain(each, costs[each.volume.name]) for each in found.layers],
            }
        )
    else:
        show_table(_COLUMNS, [*(_row(each, costs[each.volume.name]) for each in found.layers), _total(costs)])
        print(
            f"\n{asked.parts} workers hold one model, {batch_size:,} samples a step, {network.bytes_per_s * 8e-9:g} "
            f"Gbit/s, {1e6 * network.latency_s:g} us, {asked.gflops:g} Gflop/s a worker"
        )
        if wires != AS_THEY_ARE:
            print(wires)
        strategy = f"split('{rule_text(found.rules)}', parts={asked.parts}{codec_arguments(asked)})"
        print(f'--strategy "{strategy}"' if found.rules else "there is no layer to split")
    if slower:
        print(f"note: {slower}", file=sys.stderr)


class _Cost:
    """Costs of one layer in a step."""

    def __init__(self, plan: SplitPlan, layer: SplitLayerPlan, batch_size: int, asked: SplitOptions) -> None:
        self.forward, self.backward = (plan.passing_bytes(layer, way, batch_size) for way in WAYS)
        self.seconds = plan.seconds_of(layer, batch_size, asked.network.latency_s, asked.network.bytes_per_s)
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
