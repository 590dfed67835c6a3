"""Options of a run: everything apart from the job and its strategy."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from difflib import get_close_matches
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, TypedDict

from polytempo.core.calls.typed_arguments import check_type
from polytempo.core.system.url_path import Place, place
from polytempo.partition.branches import Threads
from polytempo.spec.batch_growth import BatchGrowth, NormTest, check_growth_option, parse_growth
from polytempo.spec.precision import Precision, precision_of
from polytempo.spec.target import check_until, parse_until

_BOUNDS = ("min_workers", "max_workers")


@dataclass(frozen=True)
class RunOptions:
    """Options of a run. None takes the job's value."""

    epochs: float | None = None
    steps: int | None = None
    """End after this many steps in all, counted from the first step of the first run (not from a resume)."""
    until: Mapping[str, float] = field(default_factory=dict)
    """End when a measure on the test set is reached: `{"accuracy": 0.97}` or `{"loss": 0.1}`. A score may come late,
    and holds up no training: then the run ends a little beyond the step that was scored."""
    batch_size: int | None = None
    """Samples per worker and step."""
    global_batch_size: int | None = None
    """Samples of all workers together in each step, for any number of workers; in place of `batch_size`."""
    lr: float | None = None
    seed: int = 0
    data: Path | None = None
    out: Place | None = None
    """The run's folder, or its URL (`"s3://bucket/run"`, any filesystem of fsspec); None leaves nothing behind."""
    resume: bool = False
    threads: int | None = None
    """Threads per worker; None: the cores of this host, shared among its workers (with `inter_threads`: 1). Or the
    answer of `pt.threads`, which says `inter_threads` as well."""
    inter_threads: int = 1
    """Threads for independent branches of the model, each with `threads` of its own."""
    allow_nan: bool = False
    """Go on where a loss, a gradient or a parameter is NaN or infinite; otherwise the run ends there with `NotFinite`.
    Checkpoints with such values are left out either way, and codecs cannot encode them."""
    checkpoint_every: int | None = None
    """Steps between checkpoints; None: at the end of every epoch, at least four steps apart (a simulation: none)."""
    ema: float | None = None
    """Score an exponential moving average of the weights with this decay, such as 0.9999, instead of the weights (see
    `large_batch.WeightAverage`). Training does not see it; checkpoints have both."""
    on_drift: Literal["stop", "restore", "ignore"] = "stop"
    """Where ranks that promise equal models differ: end the run, take the state of the majority, or compare nothing."""
    precision: Precision | None = None
    """Compute with 16-bit parameters that have float32 masters (`pt.precision("bf16")`, or its text); None: float32."""
    noise_scale: int | None = None
    """Steps between two looks at the gradient noise scale, which rows of metrics then have; None: no look. It changes
    no bit of the run."""
    timeout_s: float = 300.0
    """Deadline of every wait for another worker."""
    transport: Literal["shared", "tcp"] = "shared"
    """With a parameter server: through shared memory, or by encrypted TCP on loopback, as between hosts. It is
    always TCP where an engine's processes share no memory."""
    grace_s: float = 30.0
    """Most seconds for a run with an `out` to save and leave after SIGTERM; then it is ended."""
    restarts: int = 20
    """Most processes that replace killed ones, with a parameter server or `min_workers`.
    """
    batch_growth: BatchGrowth = field(default_factory=dict)
    """`{5: 4, 10: 2}` multiplies the global batch by 4 after 5 epochs and by 2 after 10; `pt.norm_test(theta=0.5)` lets
    the gradients' noise decide. A worker computes its part in pieces of at most its first batch. Schedules go by
    epochs, as if the batch had not grown. May be given as text."""
    reshape: Mapping[int, int] = field(default_factory=dict)
    """Numbers of shards after epochs (parameter server, experimental): `{2: 3, 5: 1}` goes on with 3 shards after 2
    epochs and with 1 after 5. Such a run leaves neither snapshots nor a record, so it cannot be resumed or replayed."""

    min_workers: int | None = None
    """Fewest workers of a run without a parameter server: it goes on as long as so many are left. None: it ends with
    the first that is lost, unless `max_workers` is given (then: 1)."""
    max_workers: int | None = None
    """The most workers that a run may grow to while it goes on. None: `workers`."""
    scaling: Literal["global", "local"] = "global"
    """Batch after a change of the number of workers: "global" keeps the samples of a step, and deals them to the
    present workers; "local" keeps each worker's `batch_size`, and the learning rate is proportional to their number."""

    def __post_init__(self) -> None:
        """Refuse values that no run could use. Folders, `until` and others may be given as text, as on the command
        line."""
        if isinstance(self.data, str):
            object.__setattr__(self, "data", Path(self.data))
        if isinstance(self.out, str | Path):
            object.__setattr__(self, "out", place(self.out))
        if isinstance(self.batch_growth, str):
            object.__setattr__(self, "batch_growth", parse_growth(self.batch_growth))
        object.__setattr__(self, "precision", precision_of(self.precision))
        object.__setattr__(self, "until", _goals(self.until))
        for name, hint in _hints().items():
            check_type(name, hint, getattr(self, name))
        for name in (
            "epochs",
            "steps",
            "batch_size",
            "global_batch_size",
            "lr",
            "threads",
            "inter_threads",
            "checkpoint_every",
            "noise_scale",
            "timeout_s",
            "grace_s",
            *_BOUNDS,
        ):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ValueError(f"{name} must be positive, got {value}")
        if self.inter_threads > 1 and self.threads is None:
            object.__setattr__(self, "threads", 1)
        if self.batch_size is not None and self.global_batch_size is not None:
            raise ValueError(
                f"batch_size={self.batch_size} is of each worker, and global_batch_size={self.global_batch_size} of "
                "all together; leave one of them out"
            )
        if self.ema is not None and not 0 < self.ema < 1:
            raise ValueError(f"ema is the decay of a moving average, above 0 and below 1, got {self.ema}")
        if self.restarts < 0:
            raise ValueError(f"restarts must not be negative, got {self.restarts}")
        for name in ("resume", "checkpoint_every"):
            if getattr(self, name) and self.out is None:
                raise ValueError(f"{name} needs the run's folder; give out=… as well")
        if any(epoch < 1 or shards < 1 for epoch, shards in self.reshape.items()):
            raise ValueError(f"reshape maps an epoch, from 1 on, to the number of shards after it, got {self.reshape}")
        check_growth_option(self.batch_growth)
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


@lru_cache(maxsize=1)
def _hints() -> dict[str, Any]:
    """The options' types."""
    return inspect.get_annotations(RunOptions, eval_str=True)


def _goals(until: Mapping[str, float] | str) -> Mapping[str, float]:
    """The option `until`, which may be written as on the command line."""
    try:
        goals = parse_until(until) if isinstance(until, str) else until
        check_until(goals)
    except ValueError as error:
        raise ValueError(f"until={until!r}: {error}") from None
    return goals


class OptionKeywords(TypedDict, total=False):
    """Options by name, as `run`, `compare`, `simulate` and `Trainer` take them; `RunOptions` explains each."""

    epochs: float | None
    steps: int | None
    until: Mapping[str, float] | str
    batch_size: int | None
    global_batch_size: int | None
    lr: float | None
    seed: int
    data: Path | str | None
    out: Place | str | None
    resume: bool
    threads: int | Threads | None
    inter_threads: int
    allow_nan: bool
    checkpoint_every: int | None
    ema: float | None
    on_drift: Literal["stop", "restore", "ignore"]
    precision: Precision | str | None
    noise_scale: int | None
    timeout_s: float
    transport: Literal["shared", "tcp"]
    grace_s: float
    restarts: int
    batch_growth: BatchGrowth | str
    reshape: Mapping[int, int]
    min_workers: int | None
    max_workers: int | None
    scaling: Literal["global", "local"]


def with_keywords(options: RunOptions | None, keywords: OptionKeywords) -> RunOptions:
    """`options` (None: the defaults), with the keywords' values in their place. `ValueError` for a wrong
    keyword."""
    known = [each.name for each in fields(RunOptions)]
    for name in keywords:
        if name not in known:
            close = get_close_matches(name, known, n=1)
            meant = f" (did you mean {close[0]}?)" if close else ""
            raise ValueError(f"there is no option {name!r}{meant}; there are: {', '.join(known)}")
    taken: dict[str, object] = {**keywords}
    if isinstance(both := keywords.get("threads"), Threads):
        if "inter_threads" in keywords:
            raise ValueError(f"threads={both} says inter_threads as well; leave one of them out")
        taken |= {"threads": both.intra, "inter_threads": both.inter}
    return replace(options or RunOptions(), **taken)  # type: ignore[arg-type]  # folders as text become Paths there
