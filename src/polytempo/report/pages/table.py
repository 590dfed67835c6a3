"""The page's numbers as HTML: the tiles on top, the summary, and the facts that repeat a run."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from html import escape
from typing import Any, NamedTuple

from polytempo.report.pages.summary import (
    EQUAL,
    EQUALLY,
    TIMES,
    Summary,
    finite,
    human_bytes,
    human_seconds,
    percent,
    summaries,
)
from polytempo.report.pictures.style import LineStyle, css, look
from polytempo.report.runs import RunRecord, plural, short_labels


class Column(NamedTuple):
    """A column of the summary: its two-line heading, its text for a run, and the merit that makes the best run bold."""

    heading: str
    unit: str
    text: Callable[[Summary], str]
    merit: Callable[[Summary], float | None] = lambda line: None
    level: Callable[[float, float], bool] = lambda merit, best: merit == best
    """True if a merit is called equal to the best one."""
    timed: bool = False


def _or_nothing(value: float | None, form: str) -> str:
    return "n/a" if value is None else format(value, form)


def _percent_or_nothing(value: float | None, decimals: int) -> str:
    return "n/a" if value is None else percent(value, decimals)


def _level_accuracy(accuracy: float, best: float) -> bool:
    return round(best - accuracy, 9) <= EQUAL


def _level_ratio(merit: float, best: float) -> bool:
    low, high = sorted((abs(merit), abs(best)))
    return merit * best >= 0 and high <= EQUALLY * low


def _negative(value: float | None) -> float | None:
    return None if value is None or value == math.inf else -value


COLUMNS = (
    Column(
        "Accuracy",
        "test",
        lambda line: _percent_or_nothing(line.accuracy, 2),
        lambda line: line.accuracy,
        _level_accuracy,
    ),
    Column(
        "Loss",
        "final",
        lambda line: "not finite" if line.loss == math.inf else _or_nothing(line.loss, ".4g"),
        lambda line: _negative(line.loss),
        _level_ratio,
    ),
    Column("Time", "", lambda line: human_seconds(line.seconds)),
    Column(
        "Throughput",
        "samples/s",
        lambda line: f"{line.samples_per_s:,.0f}",
        lambda line: line.samples_per_s,
        _level_ratio,
        timed=True,
    ),
    Column(
        "Speed-up", f"{TIMES} baseline", lambda line: "n/a" if line.speed_up is None else f"{line.speed_up:.2f}{TIMES}"
    ),
    Column(
        "Sent",
        "per rank",
        lambda line: human_bytes(line.bytes_sent),
        lambda line: -line.bytes_sent if line.workers > 1 else None,
    ),
    Column("Communication", "share of time", lambda line: _percent_or_nothing(line.communication_share, 1)),
    Column("Samples", "all workers", lambda line: f"{line.samples:,}"),
    Column("Steps", "", lambda line: f"{line.steps:,}"),
    Column("Workers", "", lambda line: f"{line.workers:,}"),
)
"""A reader's first questions stand first: on a phone the others are to the right."""


def summary_table(runs: Sequence[RunRecord]) -> str:
    """A row a run; bold are the best throughput, loss, accuracy and bytes, and all level with them, unless all are."""
    lines = summaries(runs)
    columns = [*COLUMNS[:2], *_metric_columns(lines), *COLUMNS[2:]]
    headings = "".join(f"<th>{escape(column.heading)}<small>{escape(column.unit)}</small></th>" for column in columns)
    best = [_best(column, lines) for column in columns]
    rows = []
    for number, line in enumerate(lines):
        cells = "".join(
            f"<td{' class=best' if number in best[place] else ''}>{escape(column.text(line))}</td>"
            for place, column in enumerate(columns)
        )
        call = "" if line.label.startswith(line.call) else f'<small class="call">{breakable(line.call)}</small>'
        name = f'<span class="run">{swatch(look(number))}<span>{breakable(line.label)}</span></span>{call}'
        rows.append(f'<tr><th scope="row">{name}</th>{cells}</tr>')
    return scrolling(
        '<table id="summary"><thead><tr><th>Strategy<small></small></th>'
        f"{headings}</tr></thead><tbody>{''.join(rows)}</tbody></table>"
    )


def _metric_columns(lines: Sequence[Summary]) -> list[Column]:
    """A column for each of the jobs' metrics; which values are better, only the job's author knows."""
    names = dict.fromkeys(name for line in lines for name, _ in line.metrics)

    def text(name: str, line: Summary) -> str:
        return _or_nothing(dict(line.metrics).get(name), ".4g")

    return [Column(name, "test", partial(text, name)) for name in names]


def scrolling(table: str) -> str:
    """A table in a frame that scrolls where it is too wide, says that it does, and takes the arrow keys."""
    frame = f'<div class="scroll" tabindex="0" role="region" aria-label="Table, scrolls sideways">{table}</div>'
    return f'{frame}<p class="hint">Scroll sideways for more columns \u2192</p>'


def tiles(runs: Sequence[RunRecord]) -> str:
    """The headline numbers of a comparison: who is most accurate (or has the least loss), is fastest, sends least."""
    every = summaries(runs)
    lines = _ended_well(every)
    found = []
    if any(line.accuracy is not None for line in lines):
        best = _leaders(lines, lambda line: line.accuracy, _level_accuracy)
        level = min(line.accuracy or 0.0 for line in best)
        steps = {line: reached for line in best if (reached := _steps_to(runs[every.index(line)], level)) is not None}
        found.append(("Highest test accuracy", percent(best[0].accuracy or 0.0), _of(best, steps)))
    elif any(_negative(line.loss) is not None for line in lines):
        best = _leaders(lines, lambda line: _negative(line.loss), _level_ratio)
        found.append(("Lowest loss", f"{best[0].loss:.4g}", _of(best)))
    best = _leaders(_comparable(lines), lambda line: line.samples_per_s, _level_ratio)
    found.append(("Highest throughput", f"{best[0].samples_per_s:,.0f} samples/s", _of(best)))
    if any(line.workers > 1 for line in lines):
        best = _leaders(lines, lambda line: -line.bytes_sent if line.workers > 1 else None, lambda a, b: a == b)
        found.append(("Least sent per rank", human_bytes(best[0].bytes_sent), _of(best)))
    return _tiles("", found)


def numbers(run: RunRecord) -> str:
    """All numbers of a run that is compared with none, as tiles: its row in the summary."""
    line = summaries([run])[0]
    found = [(column, column.text(line)) for column in COLUMNS if column.heading not in ("Workers", "Speed-up")]
    return _tiles(
        "numbers",
        [(column.heading, text, f"<small>{escape(column.unit)}</small>") for column, text in found if text != "n/a"],
    )


def _tiles(more_class: str, found: Sequence[tuple[str, str, str]]) -> str:
    items = "".join(
        f"<div><dt>{escape(name)}</dt><dd><strong>{escape(value)}</strong>{below}</dd></div>"
        for name, value, below in found
    )
    return f'<dl class="tiles {more_class}">{items}</dl>'


def _leaders(
    lines: Sequence[Summary], merit: Callable[[Summary], float | None], level: Callable[[float, float], bool]
) -> list[Summary]:
    """The line with the highest merit, which exists, and behind it the lines that are level with it."""
    merits = [(value, line) for line in lines if (value := merit(line)) is not None]
    highest, first = max(merits, key=lambda each: each[0])
    return [first, *(line for value, line in merits if line is not first and level(value, highest))]


def _of(lines: Sequence[Summary], steps: Mapping[Summary, int] | None = None) -> str:
    """The run with that number; of several that are level their count and one name, the first by `steps` if known."""
    said = breakable(lines[0].label)
    if len(lines) > 1 and steps:
        first, reached = min(steps.items(), key=lambda each: each[1])
        said = f"{len(lines)} strategies are level; {breakable(first.label)} is the first, after {reached:,} steps"
    elif len(lines) > 1:
        said = f"{len(lines)} strategies are level, such as {said}"
    calls = escape("\n".join(line.call for line in lines))
    return f'<span title="{calls}">{said}</span>'


def _steps_to(run: RunRecord, accuracy: float) -> int | None:
    """Steps before the first test with that accuracy; None without such a test."""
    rows = ((finite(row.get("accuracy")), row.get("step")) for row in run.rows("test"))
    return min(
        (step for found, step in rows if found is not None and found >= accuracy and step is not None), default=None
    )


_HELD = (("parameter_bytes", "weights a worker"), ("master_bytes", "masters"))


def facts(runs: Sequence[RunRecord]) -> str:
    """One line of the facts that all runs have in common."""
    words = [plural(len(runs), "run")]
    for key, words_for in (
        ("job", "job {}".format),
        ("workers", lambda value: plural(value, "worker")),
        ("epochs", lambda value: f"{value:g} epoch{'' if value == 1 else 's'}"),
        ("batch_size", "batch size {} per worker".format),
        ("threads", lambda value: f"{plural(value, 'thread')} per worker"),
        ("seed", "seed {}".format),
    ):
        values = {run.result.get(key) for run in runs}
        if len(values) == 1 and None not in values:
            words += [words_for(value) for value in values]
    bits = {_precision_words(run.result.get("precision")) for run in runs}
    return " · ".join(words + [each for each in bits if each and len(bits) == 1])


def _precision_words(precision: Mapping[str, Any] | None) -> str:
    """Bits of the models' computing: "bf16 (19.2 kB of weights a worker, 38.4 kB of masters)"."""
    if precision is None:
        return ""
    held = [f"{human_bytes(precision[key])} of {what}" for key, what in _HELD]
    if precision["loss_scale"] != 1:
        held.append(f"loss scale {precision['loss_scale']:g}, {plural(precision['skipped_steps'], 'step')} left out")
    return f"{precision['dtype']} ({', '.join(held)})"


def details_table(runs: Sequence[RunRecord]) -> str:
    """Facts to repeat a run and to check the repetition, folded away."""
    keys = ("world", "job", "epochs", "batch_size", "seed", "threads", "parameters_sha256", "trace_hash")
    headings = "".join(f"<th>{escape(key.replace('_', ' '))}</th>" for key in ("strategy", *keys))
    rows = "".join(
        f'<tr><th scope="row" title="{escape(str(run.result["strategy"]))}">{escape(label)}</th>'
        + "".join(f'<td class="text"><code>{escape(_short(run.result.get(key)))}</code></td>' for key in keys)
        + "</tr>"
        for run, label in zip(runs, short_labels(runs), strict=True)
    )
    return (
        "<details><summary>Seeds and hashes: to repeat "
        f"{'this run' if len(runs) == 1 else 'these runs'}</summary>"
        f"{scrolling(f'<table><thead><tr>{headings}</tr></thead><tbody>{rows}</tbody></table>')}</details>"
    )


def breakable(label: str) -> str:
    """A label as HTML that may break into lines at its parentheses, after underscores and after commas."""
    return escape(label).replace("(", "(<wbr>").replace("_", "_<wbr>").replace("=", "=<wbr>")


def swatch(style: LineStyle) -> str:
    """A short piece of a run's line with its marker, as SVG."""
    dash = f' stroke-dasharray="{style.dash.svg}"' if style.dash.svg else ""
    marker = f'<polygon points="{style.symbol.outline}"/>' if style.symbol.outline else '<circle r="4.5"/>'
    return (
        f'<svg class="swatch" viewBox="-15 -6 30 12" aria-hidden="true" style="color:{css(style.color)}">'
        f'<path d="M-15 0H15"{dash}/>{marker}</svg>'
    )


def _best(column: Column, lines: Sequence[Summary]) -> set[int]:
    rivals = _comparable(_ended_well(lines)) if column.timed else _ended_well(lines)
    merits = [column.merit(line) if line in rivals else None for line in lines]
    known = [merit for merit in merits if merit is not None]
    best = {n for n, merit in enumerate(merits) if merit is not None and column.level(merit, max(known))}
    return best if len(best) < len(known) else set()


def _ended_well(lines: Sequence[Summary]) -> list[Summary]:
    """Lines without runs that diverged: a run that ends early sends least. All lines, if all diverged."""
    return [line for line in lines if line.loss != math.inf] or list(lines)


def _comparable(lines: Sequence[Summary]) -> list[Summary]:
    """Lines with comparable times: virtual seconds never stand beside real ones."""
    return [line for line in lines if not line.simulated] or list(lines)


def _short(value: object) -> str:
    text = "n/a" if value is None else str(value)
    return text[:16] + "…" if len(text) == 64 else text
