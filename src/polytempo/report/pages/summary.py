"""The numbers of several runs side by side, and the words for them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from polytempo.report.runs import RunRecord, short_labels

EQUAL = 0.005
"""Accuracies that differ by no more are called equal: half a point, the chance of one seed and a small test set."""
EQUALLY = 1.05
"""Times, rates and losses with no greater ratio are called equal."""
TIMES = "\u00d7"
"""The multiplication sign."""


class Summary(NamedTuple):
    """One run's line in the table. None where a run has no such number; a loss that is not finite is infinite."""

    label: str
    call: str
    """The strategy's call in full."""
    simulated: bool
    workers: int
    steps: int
    samples: int
    seconds: float
    samples_per_s: float
    speed_up: float | None
    loss: float | None
    accuracy: float | None
    bytes_sent: float
    communication_share: float | None
    metrics: tuple[tuple[str, float | None], ...] = ()
    """The job's own metrics: name and value."""


def summaries(runs: Sequence[RunRecord]) -> list[Summary]:
    """One line a run, in their order. Speed-up is samples/s over the baseline's (see `baseline_sentences`)."""
    lines = []
    for run, label in zip(runs, short_labels(runs), strict=True):
        result = run.result
        against = float(runs[baseline_of(runs, run.simulated)].result["samples_per_s"])
        lines.append(
            Summary(
                label,
                str(result["strategy"]),
                run.simulated,
                int(result["workers"]),
                int(result["steps"]),
                int(result["samples"]),
                float(result["seconds"]),
                float(result["samples_per_s"]),
                float(result["samples_per_s"]) / against if against > 0 else None,
                math.inf if result.get("diverged") else _loss(result.get("loss")),
                finite(result.get("accuracy")),
                float(result["bytes_sent_per_rank"]),
                finite(result.get("communication_share")),
                tuple((str(name), finite(value)) for name, value in (result.get("metrics") or {}).items()),
            )
        )
    return lines


def baseline_sentences(runs: Sequence[RunRecord]) -> list[str]:
    """The base of speed-ups, in words; simulated and real runs have one each."""
    sentences = []
    for simulated in sorted({run.simulated for run in runs}):
        number = baseline_of(runs, simulated)
        alone = runs[number].result["workers"] == 1
        mixed = len({run.simulated for run in runs}) == 2
        which = "the run with one worker" if alone else "the first of them" if mixed else "the first run"
        of_them = _kind(simulated) if mixed else "Speed-ups"
        sentences.append(f"{of_them} are samples/s relative to {short_labels(runs)[number]}, {which}.")
    return sentences


def _kind(simulated: bool) -> str:
    return "Speed-ups of simulated runs" if simulated else "Speed-ups of runs on real processes"


def baseline_of(runs: Sequence[RunRecord], simulated: bool) -> int:
    """The number of the run that others of its world are measured against: one worker's, or the first."""
    same_world = [number for number, run in enumerate(runs) if run.simulated == simulated]
    alone = [number for number in same_world if runs[number].result["workers"] == 1]
    return (alone or same_world)[0]


def finite(value: object) -> float | None:
    """`value` as a float, or None if it is not a finite number."""
    if isinstance(value, (int, float)) and math.isfinite(value):
        return float(value)
    return None


def _loss(value: object) -> float | None:
    return math.inf if value is not None and finite(value) is None else finite(value)


def percent(share: float, decimals: int = 2) -> str:
    """A share in percent, its sign after a space that no line breaks at: `percent(0.975, 1)` is `97.5 %`."""
    return f"{100 * share:.{decimals}f}\u00a0%"


def human_bytes(num_bytes: float) -> str:
    """Bytes in decimal units with three digits: `human_bytes(1_234_567)` is `1.23 MB`."""
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if num_bytes < 999.5:
            return f"{num_bytes:.0f} {unit}" if unit == "B" or num_bytes >= 99.95 else f"{num_bytes:.3g} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:,.3g} PB"


def human_seconds(seconds: float) -> str:
    """Seconds in the unit that suits them: `840 ms`, `12.3 s`, `4 min 05 s`, `2 h 03 min`."""
    if seconds < 0.9995:
        return f"{seconds * 1000:.3g} ms"
    if seconds < 100:
        return f"{seconds:.3g} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    return f"{minutes // 60:,} h {minutes % 60:02d} min"
