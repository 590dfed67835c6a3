"""`RunOptions`: the part of the table of options that runs read.

To add an option, add its field here: keywords, command line, files and documentation follow (see `option`); `make fmt`
writes the keywords' types for editors and mypy.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import floor, inf, isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, NamedTuple

from msgspec import Meta

from polytempo.spec.batch_growth import BatchGrowth, NormTest, growth_of
from polytempo.spec.callbacks.early_stop import is_better_small
from polytempo.spec.callbacks.reading import Callbacks, callbacks_like, callbacks_of
from polytempo.spec.precision import Precision, precision_of
from polytempo.spec.rates.schedules import NamedSchedule, schedule_of_text, schedules_like
from polytempo.spec.table.option import (
    ONE_STRATEGY,
    PROCESSES,
    TRAIN,
    Count,
    NumThreads,
    Option,
    Positive,
    entries,
    unknown_option,
)
from polytempo.spec.table.option_keywords import OptionKeywords
from polytempo.spec.text.profiled_steps import ProfiledSteps, profiled_steps
from polytempo.spec.text.tags import tags_of
from polytempo.spec.tracker_call import TrackerCall, trackers_like, trackers_of

if TYPE_CHECKING:
    from polytempo.core.system.url_path import Place  # imports torch, which the command line reads options without
else:
    Place = Path


__all__ = ["OptionKeywords", "RunOptions", "with_keywords"]


def _folder(given: object) -> Path | None:
    if given is not None and not isinstance(given, str | Path):
        raise ValueError("must be a folder, as a text or a Path")
    return Path(given) if isinstance(given, str) else given


def data_path(given: object) -> str | Path | None:
    """A folder or file as a Path; a URL stays text."""
    return given if isinstance(given, str) and "://" in given else _folder(given)


def _place(given: object) -> Place | None:
    """A folder as a Path, a URL as a UrlPath."""
    if given is None or (isinstance(given, str | Path) and ":" not in str(given)):
        return _folder(given)
    from polytempo.core.system.url_path import UrlPath, place

    if not isinstance(given, str | Path | UrlPath):
        raise ValueError("must be a folder or its URL, as a text, a Path or a UrlPath")
    return place(given)


def _device(given: object) -> str:
    """A device's name as torch writes it, or `auto`; torch is not loaded."""
    text = str(given)
    if re.fullmatch(r"[a-z][a-z_]*(:[0-9]+)?", text) is None:
        raise ValueError("must be auto, cpu, or a device as torch names it, such as cuda or cuda:1")
    return text


def _start(given: object) -> str | None:
    if given is not None and (not str(given) or callable(getattr(given, "model", None))):
        raise ValueError("must be a run's folder, as a text or a Path")
    return None if given is None else str(given)


class ScoreInterval(NamedTuple):
    """The option `eval_every`: scores are this far apart, in "steps" or in "epochs"."""

    number: float
    unit: Literal["steps", "epochs"]

    def is_due(self, step: int, before: float, epoch: float) -> bool:
        """True for a score after so many steps and epochs. `before`: the epochs before the last step."""
        if self.unit == "steps":
            return step % int(self.number) == 0
        return _multiples(epoch, self.number) > _multiples(before, self.number)

    def batches(self, epoch: int, step: int) -> int:
        """The interval in batches. `epoch`, `step`: the batches of an epoch and of a step."""
        return max(1, round(self.number * (step if self.unit == "steps" else epoch)))

    def __str__(self) -> str:
        return f"{self.number!r} {self.unit}" if self.unit == "epochs" else str(int(self.number))


def _multiples(epoch: float, number: float) -> int:
    """The multiples of `number` up to `epoch`; quotients are rounded, so 0.3 is three times 0.1."""
    return floor(round(epoch / number, 9))


def interval_of(given: object) -> ScoreInterval | None:
    """The value of an option `eval_every`, also from a number or text. ValueError for other values."""
    if given is None or isinstance(given, ScoreInterval):
        return given
    number, _, unit = ("" if isinstance(given, bool) else str(given)).strip().partition(" ")
    unit = {"": "steps", "step": "steps", "epoch": "epochs"}.get(unit.strip(), unit.strip())
    try:
        found = float(number)
    except ValueError:
        found = 0.0
    if 0 < found < inf and unit == "epochs":
        return ScoreInterval(found, "epochs")
    if 0 < found < inf and unit == "steps" and found.is_integer():
        return ScoreInterval(found, "steps")
    raise ValueError("must be a number of steps, such as 50, or of epochs, such as '0.5 epochs'")


LENGTH, TRAINING, PROCESS, FOLDER = "Length", "Training", "Processes", "Folder"
"""Headings of `--help`."""


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """Options of a run. None takes the job's value."""

    epochs: Annotated[Positive | None, Option(LENGTH, "E")] = None
    """Passes over the training data. Default: the job's."""
    steps: Annotated[Count | None, Option(LENGTH, "K")] = None
    """Stop after K steps in all, also where a run is resumed."""
    until: Annotated[Mapping[str, float], Option(LENGTH, "GOAL", read=goals_of)] = field(default_factory=dict)
    """Stop at a test score: accuracy=0.97, loss=0.1, f1=0.9 by one of the job's metrics, or several, which all count.

    As text, or `{"accuracy": 0.97}`. A value with "loss" in its name is to be at most the goal, others at least. A
    score may come late, and holds up no training: then the run ends a little beyond the step that was scored.
    """

    eval_every: Annotated[ScoreInterval | None, Option(LENGTH, "K", read=interval_of)] = None
    """Score every K steps, or so many epochs: 50, '0.5 epochs' or '2 epochs'. Default: at every epoch's end.

    The default leaves out epochs that end within four steps of a score. `until` is looked at when a score comes. The
    end of a run is scored in any case. Scores change no bit of the training and take none of its time.
    """

    data: Annotated[str | Path | None, Option(TRAINING, "PATH", read=data_path)] = None
    """The folder or file with the job's data, or its URL, which the job gets as text."""
    batch_size: Annotated[Count | None, Option(TRAINING, "B")] = None
    """Samples per worker and step. Default: the job's."""
    global_batch_size: Annotated[Count | None, Option(TRAINING, "B")] = None
    """Samples per step of all workers together, in place of --batch-size."""
    accumulate: Annotated[Count, Option(TRAINING, "K")] = 1
    """Compute a worker's batch in K micro-batches, and exchange behind the last one. Default: 1.

    Steps and their batches stay as they are: `batch_size` and `global_batch_size` are of a step, of all micro-batches
    together. Memory for activations shrinks by K. Norms that compute statistics of a batch see micro-batches.
    """
    balance: Annotated[Literal["equal", "speed"], Option(TRAINING, "KIND")] = "equal"
    """Deal each global batch in equal parts, or by the workers' measured speed. Default: equal.

    "speed": the global batch stays, and every eighth step a worker's part moves towards its speed, at least half and at
    most twice the equal part. Gradients weigh by samples, so the mean is the global batch's. See `docs/diagnosis.md`.
    """
    clip_norm: Annotated[Positive | None, Option(TRAINING, "C")] = None
    """Clip gradients: scale a step's gradient by min(1, C / its norm). Default: no clipping.

    The norm is of the whole model's gradient, as in torch's `clip_grad_norm_`, behind the exchange of gradients and
    before the optimizer. Workers that exchange parameters, or have a parameter server, each clip their own gradients.
    """
    lr: Annotated[Positive | None, Option(TRAINING, "R")] = None
    """Learning rate. Default: the job's."""
    schedule: Annotated[
        NamedSchedule | None, Option(TRAINING, "CALL", read=schedule_of_text, complete=schedules_like)
    ] = None
    """Change the learning rate by plateau(patience=3), CosineAnnealingLR(T_max=run), my_module:warm_up, ….
    Default: the job's schedule.

    Text: `plateau`, a class of torch.optim.lr_scheduler, or a function of one's own, with arguments by name;
    'run', '0.1 run' and '10 epochs' become steps.
    """
    seed: Annotated[int, Meta(ge=0, le=2**63 - 1), Option(TRAINING, "S")] = 0
    """Seed of initial weights, sample order and random numbers. Default: 0."""
    allow_nan: Annotated[bool, Option(TRAINING)] = False
    """Continue if a loss or a parameter is NaN or infinite.

    Otherwise the run ends there with `NotFinite`. Checkpoints with such values are left out either way, and codecs
    cannot encode them.
    """
    ema: Annotated[Annotated[float, Meta(gt=0, lt=1)] | None, Option(TRAINING, "D")] = None
    """Score a moving average of the weights with decay D, such as 0.9999.

    See `large_batch.WeightAverage`. Training does not see it; checkpoints have both.
    """
    precision: Annotated[Precision | None, Option(TRAINING, "DTYPE", read=precision_of)] = None
    """Compute in fewer bits: autocast (parameters stay float32), bf16, 'fp16(loss_scale=dynamic)', int8, int4, ternary.

    `pt.precision("bf16")`, or its text; None: float32.
    """
    callbacks: Annotated[
        Sequence[object], Option(TRAINING, "CALL", read=callbacks_of, flag="--callback", complete=callbacks_like)
    ] = ()
    """Call early_stop(patience=3), keep(best=2), time_budget(3600), my_module:Mine(limit=2), …; again for another.

    As text, `pt.callbacks.early_stop(patience=3)`, or an object of a class derived from `pt.callbacks.Callback`. They
    may ask for the run's end, a checkpoint or an evaluation. See `docs/callbacks.md`.
    """
    clients: Annotated[str | None, Option(TRAINING, "PARTITION")] = None
    """Deal the training data to clients: 'iid(100)', 'dirichlet(100, alpha=0.5)', 'shards(100, per_client=2)' or
    'by_size(100)'.

    For strategies of rounds, such as `fed_avg`. Default: the clients of the job's data (`pt.federated.clients`).
    """
    sampling: Annotated[str | None, Option(TRAINING, "RULE")] = None
    """Draw a round's clients by a rule: 'drop_outs(0.1)', 'day_and_night(24)', 'over_selected(0.3)', 'weighted' or
    'both(drop_outs(0.1), over_selected(0.3))'.

    For strategies of rounds, such as `fed_avg`. Default: the rule of the job's data, else all clients are alike.
    """
    client_test: Annotated[Annotated[float, Meta(gt=0, lt=1)] | None, Option(TRAINING, "PART")] = None
    """Hold out this part of each client's samples, such as 0.2, and score the model on them, client by client.

    Scores then have the spread of the clients' accuracies, and the job's own test set is scored as `job_test`.
    """
    noise_scale: Annotated[Count | None, Option(TRAINING, "K", ONE_STRATEGY)] = None
    """Measure the gradient noise scale every K steps, such as 32.

    Rows of metrics then have it. It changes no bit of the run.
    """
    batch_growth: Annotated[BatchGrowth, Option(TRAINING, "RULE", ONE_STRATEGY, read=growth_of)] = field(
        default_factory=dict
    )
    """Let the global batch grow: by 4 after 5 epochs and by 2 after 10 with 5:4,10:2; by 1.1 after each step with
    'geometric(ratio=1.1)'; by its gradients' noise with 'norm_test(theta=0.5)'.

    As text, `{5: 4, 10: 2}`, `pt.training.geometric(ratio=1.1)`, or `pt.training.norm_test(theta=0.5)`. A worker
    computes its part in pieces of at most its first batch. Schedules go by epochs, as if the batch had not grown.
    """

    start_from: Annotated[str | None, Option(TRAINING, "RUN", read=_start)] = None
    """Begin with the weights of another run: its folder, also with a step, as runs/first@400.

    Of any strategy; or a file of named tensors, *.safetensors. Parameters and buffers are taken; optimizer and schedule
    begin as in any run. A run that is resumed goes on from its own checkpoint.
    """

    device: Annotated[str, Option(PROCESS, "D", read=_device)] = "auto"
    """Compute on auto, cpu, cuda, cuda:1, xpu, mps, …. Default: auto, an accelerator if there is one.

    Without a number the workers of a host share its devices round robin. Strategies with one copy of the weights, and
    branches in threads, compute on the CPU. See `docs/on-a-gpu.md`.
    """

    threads: Annotated[NumThreads | None, Option(PROCESS, "T")] = None
    """Threads per worker. Default: the cores, divided among the workers."""
    inter_threads: Annotated[NumThreads, Option(PROCESS, "T", PROCESSES)] = 1
    """Threads for independent branches of the model, each with --threads. Default: 1.

    With more than one, `threads` are 1 unless they are given (see `pt.partition.threads`).
    """
    timeout_s: Annotated[Positive, Option(PROCESS, "SECONDS", PROCESSES)] = 300.0
    """Longest wait for another worker. Default: 300 s."""
    transport: Annotated[Literal["shared", "tcp"], Option(PROCESS, "T", PROCESSES)] = "shared"
    """With a parameter server: send messages through shared memory or tcp. Default: shared.

    "tcp" is encrypted TCP on loopback, as between hosts. It is always TCP where an engine's processes share no memory.
    """
    on_drift: Annotated[Literal["stop", "restore", "ignore"], Option(PROCESS, "ACTION", TRAIN)] = "stop"
    """If models that must be equal differ between ranks: stop the run, restore the majority's state, or ignore it.
    Default: stop."""
    restarts: Annotated[int, Meta(ge=0, le=100_000), Option(PROCESS, "N", PROCESSES)] = 20
    """Number of killed processes that a run replaces. Default: 20.

    Runs go on with a parameter server, or with `min_workers`.
    """
    min_workers: Annotated[Count | None, Option(PROCESS, "N", TRAIN)] = None
    """Go on while at least N workers are left, and replace lost ones. Default: stop.

    Without a parameter server. None: the run ends with the first worker that is lost, unless `max_workers` is given
    (then: 1).
    """
    max_workers: Annotated[Count | None, Option(PROCESS, "N", TRAIN)] = None
    """The most workers that a run may grow to while it goes on. Default: --workers."""
    scaling: Annotated[Literal["global", "local"], Option(PROCESS, "KIND", TRAIN)] = "global"
    """Where the number of workers changes, keep the global batch, or the local one. Default: global.

    "local" keeps each worker's `batch_size`, and the learning rate is proportional to their number.
    """
    reshape: Annotated[Mapping[Count, Count], Option(PROCESS, "TABLE", ())] = field(default_factory=dict)
    """{2: 3, 5: 1} goes on with 3 shards after 2 epochs and with 1 after 5.

    With a parameter server, experimental. Such a run leaves neither snapshots nor a record, so it cannot be resumed or
    replayed.
    """

    out: Annotated[Place | None, Option(FOLDER, "DIR", read=_place)] = None
    """The folder for the results, or its URL, such as s3://bucket/run. Default: a new one under runs/.

    A URL is of any filesystem of fsspec. None leaves nothing behind, where Python starts the run.
    """
    resume: Annotated[bool, Option(FOLDER, programs=PROCESSES, flag="--resume/--no-resume")] = False
    """Continue from the last checkpoint."""
    checkpoint_every: Annotated[Count | None, Option(FOLDER, "K", PROCESSES)] = None
    """Save a checkpoint every K steps. Default: every epoch.

    None: at the end of every epoch, at least four steps apart (a simulation: none).
    """
    grace_s: Annotated[Positive, Option(FOLDER, "S", TRAIN)] = 30.0
    """Seconds for a run to save and leave after SIGTERM. Default: 30."""
    trackers: Annotated[
        Sequence[object], Option(FOLDER, "T", read=trackers_of, flag="--track", complete=trackers_like)
    ] = ()
    """Show the run in tensorboard, wandb:project=x, mlflow:http://host:5000, prometheus:9464, …; again for another.

    As text, `pt.trackers.wandb(project="x")`, or an object with the four calls of `pt.trackers.Tracker`. They read the
    run's folder in a process beside the run, which does not wait for them. See `docs/trackers/index.md`.
    """
    tags: Annotated[Sequence[str], Option(FOLDER, "TAG", read=tags_of, flag="--tag")] = ()
    """Find the run by this word in `polytempo runs` and on the live page, which can change tags; again for another."""
    profile: Annotated[ProfiledSteps | None, Option(FOLDER, "STEPS", PROCESSES, read=profiled_steps)] = None
    """Record steps with torch.profiler, such as 20:30, on the first 8 ranks; 20:30@0,3 and 20:30@all choose others.

    20:30 are the ten steps 20 to 29, counted from 0. `polytempo profile RUN` shows them as a table, and writes a trace
    for Perfetto. It changes no bit of the run. See `docs/seeing-a-run.md`.
    """

    def __post_init__(self) -> None:
        """Refuse values that no run could use. Text is read as on the command line."""
        for name, entry in entries(RunOptions).items():
            given = getattr(self, name)
            try:
                object.__setattr__(self, name, entry.checked(given))
            except ValueError as error:
                raise ValueError(f"{name}={given!r}: {error}") from None
        if self.inter_threads > 1 and self.threads is None:
            object.__setattr__(self, "threads", 1)
        if self.batch_size is not None and self.global_batch_size is not None:
            raise ValueError(
                f"batch_size={self.batch_size} is of each worker, and global_batch_size={self.global_batch_size} of "
                "all together; leave one of them out"
            )
        for name in ("resume", "checkpoint_every", "trackers", "tags", "profile"):
            if getattr(self, name) and self.out is None:
                raise ValueError(f"{name} needs the run's folder; give out=… as well")
        if isinstance(self.batch_growth, NormTest) and self.noise_scale is not None:
            raise ValueError(
                f"{self.batch_growth} measures the noise scale itself; leave out noise_scale={self.noise_scale}"
            )
        if self.reshape and self.resume:
            raise ValueError("a run with reshape leaves no snapshots to resume from; leave one of them out")

    @property
    def elastic(self) -> bool:
        """True if workers may be lost, leave and join while the run goes on, without a parameter server."""
        return self.min_workers is not None or self.max_workers is not None

    @property
    def looks_every(self) -> int | None:
        """Steps between two looks at the gradients' noise, to tell it or to let batches grow; None: no look."""
        return self.batch_growth.every if isinstance(self.batch_growth, NormTest) else self.noise_scale

    def as_plain(self) -> dict[str, object]:
        """Numbers and text, for `RunOptions(**…)` in another process and folder."""
        return {name: _plain(getattr(self, name)) for name in entries(RunOptions)}


def _plain(value: object) -> object:
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, Callbacks):
        return [str(each) for each in value]
    if type(value) is tuple:  # rules of growth and intervals are named tuples, and have texts
        return [str(each) for each in value if isinstance(each, TrackerCall)]  # objects stay in this process
    return str(value.absolute() if hasattr(value, "absolute") else value)


def with_keywords(options: RunOptions | None, keywords: OptionKeywords) -> RunOptions:
    """`options`, or the defaults, with the keywords in their place. `ValueError` for a wrong keyword."""
    for name in keywords:
        if name not in entries(RunOptions):
            raise ValueError(unknown_option(name, entries(RunOptions)))
    return replace(options or RunOptions(), **keywords)  # type: ignore[arg-type]  # text becomes values there


def parse_until(text: str) -> dict[str, float]:
    """The targets: `"accuracy=0.97"`, `"loss<=0.1"`, or both with a comma between. `ValueError` for other texts."""
    found: dict[str, float] = {}
    for part in text.split(","):
        measure, equals, written = (piece.strip() for piece in part.partition("="))
        if measure.endswith((">", "<")):
            sign, measure = measure[-1], measure[:-1].strip()
            if is_better_small(measure, "auto") != (sign == "<"):
                raise ValueError(f"a goal of {measure} is written {measure}{'<>'[sign == '<']}=…")
        try:
            goal = float(written)
        except ValueError:
            goal = None
        if not equals or goal is None or not measure:
            raise ValueError("must be written accuracy=0.97 or loss=0.1")
        if measure in found:
            raise ValueError(f"gives {measure} twice")
        found[measure] = goal
    return found


def goals_of(given: object) -> Mapping[str, float]:
    """The value of an option `until`, also from text. ValueError for a measure or a value that no run could reach."""
    goals = parse_until(given) if isinstance(given, str) else given
    if not isinstance(goals, Mapping):
        raise ValueError("must be a text such as accuracy=0.97, or a dict such as {'accuracy': 0.97}")
    for measure, goal in goals.items():
        if not isinstance(measure, str) or not measure:
            raise ValueError(f"{measure!r} is not a name; give accuracy, loss or the name of one of the job's metrics")
        if isinstance(goal, bool) or not isinstance(goal, int | float) or not isfinite(goal):
            raise ValueError(f"{measure} must be a number, not {goal!r}")
        if measure == "accuracy" and not 0 < goal <= 1:
            raise ValueError("accuracy is a number between 0 and 1: 97 % is accuracy=0.97")
    return goals


def goals_met(measured: Mapping[str, float | None], goals: Mapping[str, float]) -> bool | None:
    """True if a score reaches all of `goals`: losses at most, others at least; None without goals. NaN reaches none.

    ValueError where the score lacks one of the numbers: a metric that makes several has names such as `f1/0`.
    """
    if not goals:
        return None
    for name in goals:
        if name not in measured:
            raise ValueError(f"until {name}=…: a score has {', '.join(measured)}; give one of these")
    return all(
        (value := measured.get(name)) is not None
        and (value <= goal if is_better_small(name, "auto") else value >= goal)
        for name, goal in goals.items()
    )
