"""`polytempo sharpness`: how much the training loss grows around a checkpoint, as numbers and pictures."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from polytempo import large_batch
from polytempo.cli.look.look_options import SharpnessOptions
from polytempo.cli.options.saved_job import saved_job
from polytempo.cli.options.show import notes_on_stderr, show_json, show_table
from polytempo.core.system.url_path import Place, place
from polytempo.report.pictures.loss_landscape import draw_line, draw_plane
from polytempo.spec.job import Job
from polytempo.spec.job_calls import data_of, model_of
from polytempo.training.job.training_loss import TrainingLoss
from polytempo.training.observe.saved_model import run_of
from polytempo.training.observe.whole_checkpoint import load_run_model


class _Subject(NamedTuple):
    """The subject of the measurements."""

    folder: Place
    job: Job
    step: int
    model: nn.Module
    loss: TrainingLoss

    @property
    def trained(self) -> list[nn.Parameter]:
        """The parameters that take a gradient, as one vector's parts."""
        return [parameter for parameter in self.model.parameters() if parameter.requires_grad]


def sharpness(asked: SharpnessOptions) -> None:
    """Measure, draw the requested pictures, and show the results."""
    with notes_on_stderr(), _threads(asked.threads):
        subject = _subject(asked)
        found = _measured(subject, asked) | _drawn(subject, asked)
    if asked.json:
        show_json(found)
    else:
        show_table(("", ""), _rows(found), header=False)


def _subject(asked: SharpnessOptions) -> _Subject:
    job = saved_job(asked.job, place(asked.run))
    model = model_of(job).eval()
    saved = load_run_model(model, asked.run)
    loss = TrainingLoss(job, model, data_of(job, asked.data), asked.samples, asked.seed)
    return _Subject(saved.folder, job, saved.step, model, loss)


def _measured(subject: _Subject, asked: SharpnessOptions) -> dict[str, Any]:
    """All numbers, by name."""
    loss, trained, seed, epsilon, rho = subject.loss, subject.trained, asked.seed, asked.epsilon, asked.rho
    with torch.no_grad():
        here = sum(float(part) for part in loss())
    top = large_batch.top_eigenvalue(loss, trained, seed=seed)
    found: dict[str, Any] = {
        "checkpoint": str(subject.folder),
        "job": subject.job.name,
        "step": subject.step,
        "parameters": sum(each.numel() for each in trained),
        "samples": loss.samples,
        "loss": here,
        "epsilon": epsilon,
        "sharpness": large_batch.sharpness(loss, trained, epsilon, seed=seed),
        "rho": rho,
        "neighbourhood_loss": large_batch.neighbourhood_loss(loss, trained, rho),
        "top_eigenvalue": top._asdict(),
    }
    if asked.subspace is not None:
        inside = large_batch.sharpness(loss, trained, epsilon, subspace=asked.subspace, seed=seed)
        found |= {"subspace": asked.subspace, "sharpness_in_subspace": inside}
    return found


def _drawn(subject: _Subject, asked: SharpnessOptions) -> dict[str, Any]:
    """The requested pictures, and their places."""
    folder = place(asked.out) if asked.out is not None else run_of(place(asked.run))
    points = asked.points or 25
    found: dict[str, Any] = {}
    if asked.line is not None:
        at = [-0.25 + 1.5 * k / (points - 1) for k in range(points)]
        other, losses = _along(subject, asked.line, at)
        draw_line(folder / "line.png", at, losses, (asked.run, asked.line))
        found["line"] = {"to": str(other), "at": at, "losses": losses, "picture": str(folder / "line.png")}
    if asked.surface:
        seed, width = asked.seed, asked.width or 1.0
        at = [width * (2 * k / (points - 1) - 1) for k in range(points)]
        directions = [large_batch.filter_direction(subject.trained, 2 * seed + k) for k in range(2)]
        values = large_batch.losses_around(subject.loss, subject.trained, directions[0], directions[1], at)
        draw_plane(folder / "surface.png", at, values, asked.run)
        found["surface"] = {"at": at, "losses": values, "picture": str(folder / "surface.png")}
    return found


def _along(subject: _Subject, other: str, at: Sequence[float]) -> tuple[Place, list[float]]:
    """The other checkpoint, and the loss along the line, with running statistics on it, too: ends are as saved."""
    end = model_of(subject.job)
    folder = load_run_model(end, other).folder
    pairs = [(one, two) for one, two in zip(_numbers(subject.model), _numbers(end), strict=True) if _finite(one, two)]
    ends = [one for one, _ in pairs], [two for _, two in pairs]
    return folder, large_batch.losses_between(subject.loss, *ends, at)


def _numbers(model: nn.Module) -> list[Tensor]:
    return [each for each in (*model.parameters(), *model.buffers()) if each.is_floating_point()]


def _finite(one: Tensor, two: Tensor) -> bool:
    """A mask of infinities has no way in between."""
    return bool(one.isfinite().all() and two.isfinite().all())


def _rows(found: dict[str, Any]) -> list[tuple[str, str]]:
    top = found["top_eigenvalue"]
    rows = [
        ("checkpoint", f"{found['checkpoint']}, step {found['step']:,}"),
        ("measured on", f"{found['samples']:,} training samples, {found['parameters']:,} parameters"),
        ("loss", f"{found['loss']:.4g}"),
        (f"sharpness, box {found['epsilon']:g}", f"{found['sharpness']:.4g} %"),
    ]
    if "subspace" in found:
        rows.append((f"in {found['subspace']} random dimensions", f"{found['sharpness_in_subspace']:.4g} %"))
    rows.append((f"loss within {found['rho']:g} (SAM)", f"{found['neighbourhood_loss']:.4g}"))
    rows.append(("top eigenvalue", f"{top['value']:.4g} (within {top['residual']:.2g}, {top['steps']} products)"))
    return [*rows, *((name, found[name]["picture"]) for name in ("line", "surface") if name in found)]


@contextmanager
def _threads(number: int | None) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(number or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)
