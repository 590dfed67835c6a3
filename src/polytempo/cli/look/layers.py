"""`polytempo look`: the layers that runs have learned, side by side."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from polytempo import jobs
from polytempo.cli.look.look_options import LookOptions
from polytempo.cli.options.plan import found_job
from polytempo.cli.options.saved_job import facts_of
from polytempo.cli.options.show import notes_on_stderr, show_json, show_table
from polytempo.core.system.url_path import Place, place
from polytempo.report.pictures.layer_pictures import RunPart, draw_activations, draw_filters, draw_similarity
from polytempo.spec.job import Job
from polytempo.spec.job_calls import data_of, model_of
from polytempo.training.observe.layer_activations import (
    Layer,
    LayerActivations,
    evaluation_samples,
    layer_activations,
    layers_of,
    named_layer,
)
from polytempo.training.observe.saved_model import run_of
from polytempo.training.observe.similarity import alignment, centered
from polytempo.training.observe.whole_checkpoint import load_run_model


class _Run(NamedTuple):
    """A run, its model's layers, and their activations."""

    name: str
    strategy: str
    layers: list[Layer]
    activations: LayerActivations
    grams: dict[str, Tensor]
    """Gram matrices of the centered activations, (samples, samples), by the layer's own name."""

    @property
    def about(self) -> str:
        """The second line of its panel."""
        scored = self.activations.accuracy
        return self.strategy if scored is None else f"{self.strategy}\naccuracy {scored:.1%}"

    def part(self, values: Tensor) -> RunPart:
        """The panel of these values."""
        return RunPart(self.name, self.about, values.double().numpy())


def look(asked: LookOptions) -> None:
    """Read the runs' models, compare their layers' activations, draw, and show."""
    with notes_on_stderr():
        places = [place(run) for run in asked.runs]
        job = _job(asked, places)
        batch, samples, of = evaluation_samples(data_of(job, asked.data), asked.samples, asked.seed)
        runs = [
            _run(job, where, name, asked.layer, batch, samples)
            for where, name in zip(places, _names(asked.runs), strict=True)
        ]
        folder = place(asked.out) if asked.out is not None else run_of(places[0])
        found: dict[str, Any] = {"job": job.name, "samples": samples, "of": of}
        found |= _all_layers(runs, folder) if asked.layer is None else _one_layer(runs, asked.layer, folder)
    if asked.json:
        show_json(found)
    else:
        _show(found)


def _names(runs: tuple[str, ...]) -> list[str]:
    """The folders' own names, or, where two runs have the same, their whole paths."""
    short = [run_of(place(run)).name for run in runs]
    return short if len(set(short)) == len(short) else list(runs)


def _job(asked: LookOptions, places: list[Place]) -> Job:
    """The job of all runs. ValueError where they have several, where it has to be named, or another one is."""
    saved = {str(facts_of(where).get("job")) for where in places}
    if len(saved) > 1:
        raise ValueError(f"the runs are of jobs {', '.join(sorted(saved))}; compare runs of one job")
    [name] = saved
    if asked.job is None and name not in jobs.names():
        raise ValueError(f"{asked.runs[0]} is a run of {name!r}, a job of your own; name it: --job path/to/file.py:job")
    job = found_job(asked.job or name)
    if job.name != name:
        raise ValueError(f"{asked.runs[0]} is a run of {name!r}, and --job {asked.job} is {job.name!r}; name the same")
    return job


def _run(job: Job, where: Place, name: str, chosen: str | None, batch: Any, samples: int) -> _Run:
    load_run_model(model := model_of(job), where)
    layers = layers_of(model)
    wanted = layers if chosen is None else [named_layer(layers, chosen)]
    activations = layer_activations(job, model, wanted, batch, samples)
    grams = {name: rows @ rows.T for name, rows in ((n, centered(each)) for n, each in activations.by_layer.items())}
    if chosen is not None and not grams:
        raise ValueError(f"layer {chosen!r} gives no activations for each sample (not called, or of another shape)")
    return _Run(name, str(facts_of(where).get("strategy")), wanted, activations, grams)


def _all_layers(runs: list[_Run], folder: Place) -> dict[str, Any]:
    """A row for each layer, with its CKA between the first run and each other; and all layers with all as a picture."""
    first, others = runs[0], runs[1:]
    layers = [each for each in first.layers if all(each.name in run.grams for run in runs)]
    rows = [
        {
            "layer": each.name,
            "short": each.short,
            "weight": list(each.weight.shape),
            "activations": list(first.activations.by_layer[each.name].shape[1:]),
            "cka": [alignment(first.grams[each.name], other.grams[each.name]) for other in others],
        }
        for each in layers
    ]
    found: dict[str, Any] = {"runs": [_scored(run) for run in runs], "layers": rows}
    if others:
        parts = [
            RunPart(
                run.name,
                run.about,
                np.array([[alignment(first.grams[a.name], run.grams[b.name]) for b in layers] for a in layers]),
            )
            for run in others
        ]
        picture = folder / "similarity.png"
        draw_similarity(picture, [each.short for each in layers], first.name, parts)
        found["pictures"] = [str(picture)]
    return found


def _one_layer(runs: list[_Run], name: str, folder: Place) -> dict[str, Any]:
    """Pictures of the layer's weights and activations, and its CKA between all pairs of runs."""
    first = runs[0]
    [layer] = first.layers
    title = layer.short if not layer.name else f"{layer.short} ({layer.name})"
    order = slice(None) if first.activations.classes is None else first.activations.classes.argsort(stable=True)
    inputs = _pictures(first.activations.inputs)
    size = None if inputs is None else tuple(inputs.shape[1:])
    weights, activations = folder / f"{layer.short}-weights.png", folder / f"{layer.short}-activations.png"
    draw_filters(weights, title, [run.part(run.layers[0].weight) for run in runs], size)
    given = [run.activations.by_layer[layer.name] for run in runs]
    if given[0].dim() != 4:
        few = torch.linspace(0, len(given[0]) - 1, min(64, len(given[0]))).long()
        given = [each[order][few] for each in given]
    sorted_by = "samples" if first.activations.classes is None else "samples in the order of their classes"
    draw_activations(
        activations,
        title,
        [run.part(each) for run, each in zip(runs, given, strict=True)],
        None if inputs is None else inputs.double().numpy(),
        sorted_by,
    )
    cosines = [
        float(nn.functional.cosine_similarity(run.layers[0].weight.flatten(), layer.weight.flatten(), dim=0))
        for run in runs
    ]
    return {
        "layer": layer.name,
        "short": layer.short,
        "weight": list(layer.weight.shape),
        "runs": [_scored(run) | {"weights_cosine": cosine} for run, cosine in zip(runs, cosines, strict=True)],
        "cka": [[alignment(one.grams[layer.name], other.grams[layer.name]) for other in runs] for one in runs],
        "pictures": [str(weights), str(activations)],
    }


def _scored(run: _Run) -> dict[str, Any]:
    return {
        "run": run.name,
        "strategy": run.strategy,
        "loss": run.activations.loss,
        "accuracy": run.activations.accuracy,
    }


def _pictures(inputs: Tensor | None) -> Tensor | None:
    """(samples, height, width) of inputs that are gray pictures; else None."""
    if inputs is None:
        return None
    if inputs.dim() == 4 and inputs.shape[1] == 1:
        return inputs[:, 0]
    return inputs if inputs.dim() == 3 and min(inputs.shape[1:]) > 1 and inputs.is_floating_point() else None


def _show(found: dict[str, Any]) -> None:
    print(f"{found['samples']:,} {found['of']} samples of {found['job']}")
    runs = found["runs"]
    if "layers" in found:
        show_table(("run", "strategy", "loss", "accuracy"), [_row(run) for run in runs])
        others = [f"CKA with {run['run']}" for run in runs[1:]]
        rows = [
            (
                each["layer"],
                each["short"],
                _times(each["weight"]),
                _times(each["activations"]),
                *(f"{value:.3f}" for value in each["cka"]),
            )
            for each in found["layers"]
        ]
        show_table(("layer", "short", "weight", "activations", *others), rows)
    else:
        columns = [f"CKA: {run['run']}" for run in runs]
        rows = [
            (*_row(run), f"{run['weights_cosine']:.3f}", *(f"{value:.3f}" for value in row))
            for run, row in zip(runs, found["cka"], strict=True)
        ]
        print(f"layer {found['layer'] or 'the model'} ({found['short']}), weight {_times(found['weight'])}")
        first = f"weights' cosine with {runs[0]['run']}"
        show_table(("run", "strategy", "loss", "accuracy", first, *columns), rows)
    for picture in found.get("pictures", []):
        print(picture)


def _row(run: dict[str, Any]) -> tuple[str, ...]:
    scored = "" if run["accuracy"] is None else f"{run['accuracy']:.2%}"
    return run["run"], run["strategy"], f"{run['loss']:.4g}", scored


def _times(shape: list[int]) -> str:
    return " x ".join(map(str, shape))
