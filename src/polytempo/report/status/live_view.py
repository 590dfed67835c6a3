"""The view of `polytempo top`: three lines about the run, a table of its processes, and its faults."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from polytempo.report.pages.summary import human_seconds
from polytempo.report.status.live_status import LiveStatus, ProcessStatus
from polytempo.report.status.progress import status_line
from polytempo.report.status.records import ProcessEvent
from polytempo.spec.text.plain_text import plain_text

_COLOURS = {
    "running": "green",
    "finished": "green",
    "stopped": "yellow",
    "preempted": "yellow",
    "killed": "red",
    "failed": "red",
}
_SILENT_S = 5.0
"""A launcher that has written nothing for so long is named; it writes once a second."""
_SHOWN_EVENTS = 8
_AROUND = 9
"""Lines that are neither processes nor events."""


def view(status: LiveStatus, *, now_s: float, launcher_lives: bool | None = None, lines: int = 40) -> RenderableType:
    """The status as rich shows it, in about so many lines; `now_s`: seconds since 1970.

    `launcher_lives`: whether the launcher's process is there, where that can be known from here.
    """
    events = status.events[-_SHOWN_EVENTS:]
    room = max(4, lines - _AROUND - len(events))
    parts: list[RenderableType] = [_title(status), _heading(status, now_s, launcher_lives), _progress(status)]
    if status.processes:
        parts.append(_processes(status.processes, room))
    if events:
        parts.append(_faults(status, events))
    return Group(*parts)


def _title(status: LiveStatus) -> Text:
    kind = "virtual " if status.world == "virtual" else ""
    told = f"{status.job}, {status.strategy}, {status.workers} {kind}worker{'s' * (status.workers != 1)}"
    return Text(plain_text(told), "bold")


def _heading(status: LiveStatus, now_s: float, launcher_lives: bool | None) -> Text:
    """The state of the run, and whether this is news."""
    told_s = now_s - status.written_s
    gone = status.state == "running" and launcher_lives is False
    text = Text("launcher gone" if gone else status.state, "red" if gone else _COLOURS[status.state])
    if status.why:
        text.append(f": {plain_text(status.why)}", "default")
    if status.began_s:
        end_s = now_s if status.state == "running" and not gone else status.written_s
        text.append(f", {human_seconds(max(0.0, end_s - status.began_s))} since its start", "default")
    if gone:
        text.append(f"; process {status.launcher_pid} ended without a word, so this is how the run stood", "default")
    elif status.state == "running" and told_s > _SILENT_S:
        text.append(f"; no news for {human_seconds(told_s)}", "yellow")
    counts = Counter(each.state for each in status.processes)
    if status.state == "running" and counts:
        named = ", ".join(f"{count} {state}" for state, count in counts.most_common())
        hosts = len(status.hosts)
        text.append(f"; processes: {named}" + (f", on {hosts} hosts" if hosts > 1 else ""), "default")
    return text


def _progress(status: LiveStatus) -> Text:
    row, tested = status.train or {}, status.test or {}
    if not row and not tested:
        return Text("no row of metrics yet")
    line = status_line(
        int(row.get("step") or tested.get("step") or 0),
        status.steps,
        row.get("loss"),
        tested.get("accuracy"),
        status.samples_per_s,
    )
    epoch = row.get("epoch")
    if epoch is not None:
        of = f" of {status.epochs:g}" if status.epochs is not None else ""
        line += f", epoch {epoch:.2f}{of}"
    if status.group is not None:
        group = status.group
        line += f"; group {group.generation}: {group.workers} workers since step {group.step:,}"
    if status.staleness is not None:
        line += f", staleness {status.staleness:.2f}"
    if (scale := row.get("noise_scale")) is not None:
        line += f", noise scale {scale:,.0f} samples"
    return Text(line)


def _processes(processes: Sequence[ProcessStatus], room: int) -> Table:
    """A row for each process; stopped ones come first, and rows without room are counted."""
    hosts = {each.host for each in processes} - {""}
    table = Table(box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1))
    table.add_column("process", no_wrap=True, overflow="ellipsis")
    if hosts:
        table.add_column("host", no_wrap=True, overflow="ellipsis")
    table.add_column("state", no_wrap=True)
    told = {
        name: any(getattr(each, name) is not None for each in processes)
        for name in ("samples_per_s", "idle_share", "staleness", "memory_bytes")
    }
    headings = {"samples_per_s": "samples/s", "idle_share": "waits", "staleness": "staleness", "memory_bytes": "memory"}
    for name, heading in headings.items():
        if told[name]:
            table.add_column(heading, justify="right", no_wrap=True)
    usual = ("running", "ended")
    ordered = sorted(processes, key=lambda each: each.state in usual)  # stable: otherwise by their numbers
    for each in ordered[:room]:
        cells = [Text(plain_text(told)) for told in (each.who, *([each.host] if hosts else []))]
        cells.append(Text(each.state, _COLOURS.get(each.state, "default")))
        numbers = [_number(each.samples_per_s, ",.0f")] * told["samples_per_s"]
        waits = None if each.idle_share is None else 100 * each.idle_share
        numbers += [_number(waits, ".0f", " %")] * told["idle_share"]
        numbers += [_number(each.staleness, ".2f")] * told["staleness"]
        memory = None if each.memory_bytes is None else each.memory_bytes / 1e6
        numbers += [_number(memory, ",.0f", " MB")] * told["memory_bytes"]
        table.add_row(*cells, *numbers)
    if (more := len(ordered) - room) > 0:
        table.add_row(f"and {more} more")
    return table


def _faults(status: LiveStatus, events: Sequence[ProcessEvent]) -> Text:
    earlier = status.num_events - len(events)
    heading = "faults" if status.group is None else "lost, left and joined"
    text = Text(f"{heading}{f', the last {len(events)} of {status.num_events}' if earlier > 0 else ''}\n", "bold")
    lines = [f"  {event.at_s:8.1f} s  {event.who} {event.how}; {event.then}" for event in events]
    return text.append("\n".join(map(plain_text, lines)), "default")


def _number(value: float | None, form: str, unit: str = "") -> str:
    return "" if value is None else format(value, form) + unit
