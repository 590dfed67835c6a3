"""`polytempo evaluate`, `predict` and `export`: the model of a run that is over."""

from __future__ import annotations

import math

import torch

from polytempo.cli.options.saved_job import facts_of, saved_job
from polytempo.cli.options.show import notes_on_stderr, show_json
from polytempo.cli.run.trained_options import EvaluateOptions, ExportOptions, PredictOptions
from polytempo.core.system.url_path import place
from polytempo.spec.precision import parse_precision
from polytempo.training.observe.trained_model import TrainedModel, trained_model


def evaluate(asked: EvaluateOptions) -> None:
    """Print loss and accuracy on the test set."""
    with notes_on_stderr():
        trained = _trained(asked, asked.device)
        torch.set_num_threads(asked.threads or torch.get_num_threads())
        bits = facts_of(place(asked.run)).get("precision")
        score = trained.score(asked.data, None if bits is None else parse_precision(bits["dtype"]))
    saved = trained.saved
    if asked.json:
        unit = None if score.target is None else score.target._asdict()
        show_json({"run": asked.run, "job": trained.job.name, "step": saved.step, **score._asdict(), "target": unit})
        return
    accuracy = "" if score.accuracy is None else f", accuracy {score.accuracy:.2%}"
    print(f"step {saved.step}: loss {score.loss:.4f}{accuracy}")
    if score.target is not None:
        name, mean, deviation = score.target
        print(f"loss and metrics: of {name} less {mean:,.6g}, over {deviation:,.6g}")


def predict(asked: PredictOptions) -> None:
    """Write the outputs for the test set as a table."""
    with notes_on_stderr():
        trained = _trained(asked, asked.device)
        torch.set_num_threads(asked.threads or torch.get_num_threads())
        outputs = trained.predict(place(asked.out), asked.data)
    number = math.prod(outputs.shape[1:])
    print(f"{asked.out}: {len(outputs):,} samples, {number:,} output{'s' * (number != 1)} each")


def export(asked: ExportOptions) -> None:
    """Write the model for other programs."""
    with notes_on_stderr():
        out = None if asked.out is None else place(asked.out)
        print(_trained(asked).export(asked.to, out, asked.data))


def _trained(asked: EvaluateOptions | PredictOptions | ExportOptions, device: str = "cpu") -> TrainedModel:
    return trained_model(saved_job(asked.job, place(asked.run)), asked.run, average=asked.average, device=device)
