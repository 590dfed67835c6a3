"""`polytempo compress`: the size of each layer in the file, and the accuracy on the way."""

from __future__ import annotations

from typing import Any

import torch

from polytempo.cli.options.plan import found_job
from polytempo.cli.options.saved_job import saved_job
from polytempo.cli.options.show import notes_on_stderr, show_json, show_table, size
from polytempo.cli.run.compress_options import CompressOptions
from polytempo.core.system.url_path import place
from polytempo.training.job.evaluate import Score
from polytempo.training.smaller.compress import CompressedNetwork
from polytempo.training.smaller.compress import compress as compressed

_STEPS = ("before", "pruned", "after")


def compress(asked: CompressOptions) -> None:
    """Compress, and show the result."""
    with notes_on_stderr():
        torch.set_num_threads(asked.threads or torch.get_num_threads())
        job = found_job(asked.job) if asked.job is not None else saved_job(None, place(asked.run))
        found = compressed(
            job,
            asked.run,
            keep=asked.keep,
            bits=asked.bits,
            rounds=asked.rounds,
            epochs=asked.epochs,
            share_epochs=asked.share_epochs,
            lr=asked.lr,
            seed=asked.seed,
            data=asked.data,
            out=asked.out,
        )
    if asked.json:
        show_json(_as_data(found))
        return
    columns = ("tensor", "elements", "kept", "values", "bits an element", "size")
    show_table(columns, [_row(*each) for each in found.tensors if each.numel])
    print(f"{found.file}: {size(found.num_bytes)} for {size(found.dense_bytes)}, {found.ratio:.1f} times smaller")
    scores = [(step, getattr(found, step)) for step in _STEPS]
    print(", ".join(f"{step}: {_said(score)}" for step, score in scores if score is not None))


def _row(name: str, numel: int, kept: int, centroids: int, num_bytes: int) -> tuple[str, ...]:
    values = f"{centroids:,}" if centroids else "-"
    return name, f"{numel:,}", f"{kept / numel:.1%}", values, f"{8 * num_bytes / numel:.2f}", size(num_bytes)


def _said(score: Score) -> str:
    return f"loss {score.loss:.4g}" + ("" if score.accuracy is None else f", accuracy {score.accuracy:.2%}")


def _as_data(found: CompressedNetwork) -> dict[str, Any]:
    scores = {step: score._asdict() for step in _STEPS if (score := getattr(found, step)) is not None}
    tensors = [each._asdict() for each in found.tensors]
    return found._asdict() | {"ratio": found.ratio, "tensors": tensors} | {step: scores.get(step) for step in _STEPS}
