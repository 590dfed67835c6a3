"""`OptionKeywords`: options as keywords. `make fmt` writes this file from the table `RunOptions`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypedDict

from polytempo.spec.batch_growth import BatchGrowth
from polytempo.spec.precision import Precision
from polytempo.spec.rates.schedules import NamedSchedule
from polytempo.spec.text.profiled_steps import ProfiledSteps

if TYPE_CHECKING:
    from polytempo.core.system.url_path import Place  # imports torch, which the command line reads options without


class OptionKeywords(TypedDict, total=False):
    """Options by name, as `run`, `compare`, `simulate` and `Trainer` take them; `RunOptions` describes them."""

    epochs: float | None
    steps: int | None
    until: Mapping[str, float] | str
    eval_every: int | str | None
    data: str | Path | None
    batch_size: int | None
    global_batch_size: int | None
    accumulate: int
    balance: Literal["equal", "speed"]
    clip_norm: float | None
    lr: float | None
    schedule: NamedSchedule | str | None
    seed: int
    allow_nan: bool
    ema: float | None
    precision: Precision | str | None
    callbacks: Sequence[object] | str
    clients: str | None
    sampling: str | None
    client_test: float | None
    noise_scale: int | None
    batch_growth: BatchGrowth | str
    start_from: str | None
    device: str
    threads: int | None
    inter_threads: int
    timeout_s: float
    transport: Literal["shared", "tcp"]
    on_drift: Literal["stop", "restore", "ignore"]
    restarts: int
    min_workers: int | None
    max_workers: int | None
    scaling: Literal["global", "local"]
    reshape: Mapping[int, int]
    out: Place | str | None
    resume: bool
    checkpoint_every: int | None
    grace_s: float
    trackers: Sequence[object] | str
    tags: Sequence[str] | str
    profile: ProfiledSteps | str | None
