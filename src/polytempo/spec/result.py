"""`Result`: a run's account of its end."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from importlib import import_module
from typing import Any, ClassVar

import torch
from torch import Tensor

from polytempo.core.system import files
from polytempo.core.system.url_path import Place
from polytempo.spec.text.notebook_table import facts_html, rows_html


@dataclass(frozen=True)
class Result:
    """The one JSON object that `--json` prints. `seconds` are virtual where `world` is "virtual"."""

    job: str
    strategy: str
    world: str
    workers: int
    steps: int
    epochs: float
    samples: int
    """Samples trained on, over all workers."""
    seconds: float
    """Time spent training, without evaluation and start-up."""
    samples_per_s: float
    loss: float | None
    """Mean loss of the final model on the test set; on the last batches where there is no test set."""
    accuracy: float | None
    train_loss: float | None
    bytes_sent_per_rank: float
    """Bytes of training; scores and checkpoints are not counted."""
    communication_share: float
    """Part of the time that ranks spent waiting for each other, 0 to 1."""
    batch_size: int
    seed: int
    threads: int
    parameters_sha256: str | None
    """Hash of the final parameters (the ranks' mean where they differ) as float32, in order."""
    trace_hash: str
    reached: bool | None = None
    """True if a score has reached `until`, perhaps a little before the end; None without `until`."""
    resumed_at: int | None = None
    """The first step of the last part of a resumed run: bytes and communication are of that part, and steps, samples,
    seconds and samples/s of the whole run."""
    diverged: str | None = None
    """The NaN or infinite value that ended this run of a comparison."""
    left: str | None = None
    """The last step of a run that left after SIGTERM or Ctrl-C. `resume` goes on from there."""
    report: str | None = None
    checkpoint: str | None = None
    ledger: list[dict[str, Any]] | None = None
    """Numbers of samples that an epoch used once, twice and never (see `data.usage`); None with `meta`."""
    server: dict[str, Any] | None = None
    """Facts of a parameter server (see `training.server_facts`): staleness, and each worker's fate."""
    stages: list[dict[str, Any]] | None = None
    """Each stage of a pipeline: its layers and parameters, its updates, how many updates a gradient came after the
    parameters that it was computed with (`delay`, the mean, and `most_delay`), how many micro-batches it held at a
    time, and versions of its parameters. Else None."""
    layers: list[dict[str, Any]] | None = None
    """Each layer that is divided: how many of its outputs, or other indices, each worker of a model holds
    (`sizes`, along the weight's dimension `dim`; none: each has the whole), its parameters, and the bytes that all
    workers of a model send for it in a step, forward and backward. Else None."""
    precision: dict[str, Any] | None = None
    """Training in 16 bits: the `dtype`, the bytes of a worker's parameters (`parameter_bytes`, as many are
    their gradients') and of their float32 masters (`master_bytes`), the last loss scale (1: none), and how many steps
    all workers left out (`skipped_steps`). Else None."""
    membership: list[dict[str, Any]] | None = None
    """Each group of workers of an elastic run: its generation, its first step, the lives of its members, the number of
    newcomers, the processes that were lost before, and the seconds until the first step in it. Else None."""

    callbacks: list[dict[str, Any]] | None = None
    """Each callback: its text (`callback`), the step of its request to stop (`asked_to_stop_at`, or None), and its
    `state`. None without callbacks."""
    metrics: dict[str, float] | None = None
    """The job's `metrics` of the final model, by name; None if it has none, or no test set."""
    started_from: dict[str, Any] | None = None
    """The run that this run started from (`start_from`): the name of its folder (`run`), the `step` and
    `strategy` that saved it, and a hash of its tensors (`sha256`). Else None."""

    bound: dict[str, Any] | None = None
    """The part of a step that bounds the run (see `diagnosis.bound`): its `kind` and `share` of a step, the first
    `change` to try with its `gain` at best, all in one sentence (`text`), the seconds of a step (`values`), the
    change as values of a planned run (`tried`), and on the command line with `--cluster` its price there (`priced`).
    None for an elastic run, and where nothing was measured."""
    diagnoses: list[dict[str, Any]] | None = None
    """Ranks, or workers, that were found slow: `who`, `rank`, `text`, `values`. None where ranks were not compared."""

    _made_by: ClassVar[tuple[Any, Place | None] | None] = None
    """The job and the folder of a run of this process."""

    def made_by(self, job: object, out: Place | None) -> Result:
        """This result, which knows its job and its folder."""
        object.__setattr__(self, "_made_by", (job, out))
        return self

    def model(self) -> Any:
        """The trained model: the job's own module, in evaluation mode, on the CPU.

            model = pt.run(job, "local_sgd(period=8)", workers=2, out="runs/first").model()

        It is read from the run's newest checkpoint, by every strategy; where replicas differ it is their mean.
        `pt.training.trained_model(job, folder).model` reads the same from a folder.

        Errors: ValueError for a run without a folder or a checkpoint, and for a result that was read from a file.
        """
        job, out = self._source("model")
        found: Any = import_module("polytempo.training.observe.trained_model").trained_model(job, out)
        return found.model

    @property
    def history(self) -> Any:
        """The run's rows of training and tests (see `pt.training.history`). ValueError for a run without a folder."""
        found: Any = import_module("polytempo.report.status.history")
        return found.history(self._source("history")[1])

    def _source(self, asked: str) -> tuple[Any, Place]:
        if self._made_by is None:
            raise ValueError(
                f"this result does not know its run; use pt.training.trained_model(job, folder) or "
                f"pt.training.history(folder) in place of {asked}"
            )
        job, out = self._made_by
        if out is None:
            raise ValueError(f"this run has left no folder for its {asked}; give out='runs/first' as well")
        return job, out

    def as_json(self) -> dict[str, Any]:
        """Plain values, ready for `json.dumps`; values that are not finite (a run that diverged) are null."""
        plain = asdict(self)
        if self.metrics is not None:
            plain["metrics"] = _finite(self.metrics)
        return _finite(plain)

    def _repr_html_(self) -> str:
        """The result as a notebook shows it."""
        facts = self._figures() | {
            "trained": f"{self.steps:,} steps, {self.epochs:.4g} epochs, {self.samples:,} samples"
        }
        facts["parameters"] = (self.parameters_sha256 or "none were computed")[:16]
        facts |= {"diverged": self.diverged} if self.diverged else {}
        facts |= {"left": self.left} if self.left else {}
        facts |= {"bound": str(self.bound["text"])} if self.bound else {}
        facts |= {f"slow: {found['who']}": str(found["text"]) for found in self.diagnoses or ()}
        facts |= {"report": self.report} if self.report else {}
        return facts_html(f"{self.job}, {self.strategy}, {self._cast()}", facts)

    def _cast(self) -> str:
        return f"{self.workers:,} {'virtual ' * (self.world == 'virtual')}worker{'s' * (self.workers != 1)}"

    def _figures(self) -> dict[str, str]:
        """The figures of a comparison, as text."""
        return {
            "accuracy": "-" if self.accuracy is None else f"{100 * self.accuracy:.1f} %",
            "loss": "-" if self.loss is None else f"{self.loss:.4g}",
            "virtual seconds" if self.world == "virtual" else "seconds": f"{self.seconds:,.4g}",
            "samples/s": f"{self.samples_per_s:,.0f}",
            "MB sent per worker": f"{self.bytes_sent_per_rank / 1e6:,.4g}",
            "waiting": f"{100 * self.communication_share:.1f} %",
        }

    def write(self, folder: Place) -> None:
        """Leave `result.json`, complete or not at all."""
        files.replace(folder / files.RESULT, json.dumps(self.as_json(), indent=2) + "\n")


class Results(list[Result]):
    """Results of a comparison, in order: a list that a notebook shows as one table."""

    def _repr_html_(self) -> str:
        """A table with a line for each strategy."""
        rows = [{"strategy": result.strategy} | result._figures() for result in self]
        return rows_html(f"{self[0].job}, {self[0]._cast()}" if self else "no results", rows)


def _finite(values: dict[str, Any]) -> dict[str, Any]:
    return {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in values.items()}


def parameters_sha256(parameters: Iterable[Tensor]) -> str:
    """SHA-256 over the parameters' float32 values in order."""
    digest = hashlib.sha256()
    for parameter in parameters:
        flat = parameter.detach().to("cpu", torch.float32).contiguous().view(-1)
        digest.update(flat.numpy().tobytes())
    return digest.hexdigest()
