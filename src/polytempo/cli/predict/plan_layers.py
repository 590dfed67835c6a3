"""`polytempo plan layers`: data or model parallelism for each layer of a job's model, and the bytes of a step."""

from __future__ import annotations

from dataclasses import asdict

from polytempo.cli.options.plan import found_job
from polytempo.cli.options.show import notes_on_stderr, show_json, show_table, size
from polytempo.cli.predict.plan_options import LayersOptions, codec_arguments
from polytempo.partition.plan import LayerPlan, PlannedLayer
from polytempo.partition.plan.choice import SCHEMES, prices_of
from polytempo.partition.wires import AS_THEY_ARE
from polytempo.report.pages.summary import human_seconds
from polytempo.spec.job_calls import data_of, model_of
from polytempo.training.parts.layer_plan import plan_layers as planned
from polytempo.training.parts.layer_plan import reductions
from polytempo.training.parts.staged_training import sample_of

_COLUMNS = ("layer", "kind", "|W|", "|D|", "|D|/|W|", "Gflop", "flop/byte", "way")
_SHOWN = {"tree": "tree", "server": "server", "ring": "ring", "halving_doubling": "halving/doubling"}


def plan_layers(asked: LayersOptions) -> None:
    """Plan the job's model, and show the tables of its layers and of schemes."""
    job, codecs = found_job(asked.job), {"activations": asked.activations, "gradients": asked.gradients}
    with notes_on_stderr():
        model = model_of(job)
        own = (asked.batch_size or job.batch_size) * asked.workers
        batch_size = asked.global_batch_size or own
        found = planned(
            model,
            sample_of(job, data_of(job, asked.data), 2),
            workers=asked.workers,
            link=asked.network,
            batch_size=batch_size,
            reduction=asked.reduction,
            shards=asked.shards,
            by=asked.by,
            **codecs,
        )
    prices = prices_of(found, list(reductions(asked.shards).values()))
    if asked.json:
        show_json(_plain(job.name, found) | codecs | {"seconds": prices})
        return
    show_table(_COLUMNS, [*(_row(found, each) for each in found.layers), _total(found)])
    print(
        f"\n{found.workers} workers, {batch_size:,} samples a step, {found.bytes_per_s * 8e-9:g} Gbit/s, "
        f"{1e6 * found.latency_s:g} us; bytes of a step, and its time by the way that gradients are summed:"
    )
    if found.wires != AS_THEY_ARE:
        print(f"model: {found.wires}")
    columns = ("by", "a worker", *(_SHOWN[name] for name in prices))
    show_table(columns, [_scheme(found, prices, scheme) for scheme in SCHEMES])
    if asked.shards > 1:
        print(f"server: {asked.shards} shards")
    if found.model_parallel:
        print(f"--strategy \"hybrid('{', '.join(found.model_parallel)}'{codec_arguments(asked)})\"")


def _row(found: LayerPlan, each: PlannedLayer) -> tuple[str, ...]:
    layer = each.volume
    return (
        *(layer.name or "(model)", layer.kind, size(each.data_bytes), size(each.model_bytes)),
        _ratio(each.model_bytes, each.data_bytes),
        f"{layer.flops * found.batch_size / 1e9:.3g}",
        f"{each.flops_per_byte:,.0f}",
        each.way,
    )


def _total(found: LayerPlan) -> tuple[str, ...]:
    return (
        *("all", "", size(found.weight_bytes), size(found.input_bytes)),
        _ratio(found.input_bytes, found.weight_bytes),
        f"{found.flops / 1e9:.3g}",
        "",
        "hybrid" if 0 < len(found.model_parallel) < len(found.layers) else found.layers[0].way,
    )


def _ratio(inputs: float, weights: int) -> str:
    return f"{inputs / weights:.3g}" if weights else "-"


def _scheme(found: LayerPlan, prices: object, scheme: str) -> tuple[str, ...]:
    assert isinstance(prices, dict)
    volume = found.bytes_of(scheme)  # type: ignore[arg-type]
    return (scheme, size(volume), *(human_seconds(each[scheme]) for each in prices.values()))


def _plain(job: str, found: LayerPlan) -> dict[str, object]:
    layers = [
        asdict(each.volume)
        | {name: value for name, value in vars(each).items() if name != "volume"}
        | {"flops": each.volume.flops * found.batch_size}
        for each in found.layers
    ]
    bytes_of = {scheme: found.bytes_of(scheme) for scheme in SCHEMES}
    shown = {"workers": found.workers, "batch_size": found.batch_size, "latency_s": found.latency_s}
    return {"job": job, **shown, "bytes_per_s": found.bytes_per_s, "layers": layers, "bytes": bytes_of}
