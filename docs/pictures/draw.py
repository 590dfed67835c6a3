"""Draw messages over time, from traces of the virtual world: `python docs/pictures/draw.py` writes the SVG files here.

A lane is a worker or a shard of a parameter server. Boxes are computations, one shade for each step; arrows are
messages, from the moment they begin to leave to the moment they have arrived; a bar across lanes is a collective.
`late` draws three modules of a network from timetables: a box is a pass of a batch, a bar after it an update.
"""

from __future__ import annotations

import json
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import torch

import polytempo as pt
from polytempo.partition import schedules
from polytempo.partition.schedules.action import Schedule
from polytempo.partition.schedules.timetable import StageTimes, Timetable, played
from polytempo.strategies import async_sgd, gossip, hogwild, local_sgd, one_bit_sgd, ssp, sync_sgd

HERE = Path(__file__).parent
WIDTH, LEFT, RIGHT, LANE, BOX, TITLE, FOOT = 760, 78, 14, 46, 20, 30, 46
SMALLEST_MESSAGE = 500
"""Bytes; smaller ones are a parameter server's bookkeeping, and are left out."""
COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")

STYLE = """
svg.travel { --compute: #1f77b4; --message: #d9480f; --wait: #8a8f98; --server: #2b8a3e; color: #1b1f24; }
@media (prefers-color-scheme: dark) {
  svg.travel { --compute: #4d94cf; --message: #ff9248; --wait: #9aa0aa; --server: #69c07a; color: #e6e8eb; }
}
"""


class Box(NamedTuple):
    """A computation of a lane, in virtual seconds."""

    lane: int
    begin: float
    end: float
    step: int


class Arrow(NamedTuple):
    """A message between lanes."""

    source: int
    target: int
    begin: float
    end: float


class Panel(NamedTuple):
    """One timeline with its title."""

    title: str
    lanes: list[str]
    boxes: list[Box]
    arrows: list[Arrow]
    bars: list[tuple[float, float]]
    """Collectives of all lanes."""


def job() -> pt.Job:
    """A linear model on the bundled digits: 650 parameters."""
    return pt.Job(
        model=lambda: torch.nn.Linear(64, 10),
        data=lambda path: pt.Data(*pt.data.digits()),
        loss=torch.nn.functional.cross_entropy,
        optimizer=lambda parameters, lr: torch.optim.SGD(parameters, lr=lr),
    )


def panel(
    title: str, strategy: pt.Strategy, steps: int, workers: int, cluster: pt.cluster.Cluster, shards: int = 0
) -> Panel:
    """Simulate, and read the trace."""
    with TemporaryDirectory() as folder:
        pt.simulate(
            job(), strategy, workers=workers, steps=steps, batch_size=4, cluster=cluster, out=Path(folder, "run")
        )
        trace = json.loads(Path(folder, "run/trace.json").read_text(encoding="utf-8"))["traceEvents"]
    events = sorted((e for e in trace if e["ph"] == "X"), key=lambda e: (e["ts"], e["pid"]))
    count = workers + shards
    boxes, arrows, bars = [], [], set()
    leaving: dict[tuple[int, int], deque[tuple[float, int]]] = defaultdict(deque)
    arriving: dict[tuple[int, int], list[float]] = defaultdict(list)
    for event in events:
        rank, args, begin, end = event["pid"], event["args"], event["ts"], event["ts"] + event["dur"]
        if event["name"] == "compute" and rank < count:
            boxes.append(Box(rank, begin, end, args["step"]))
        elif event["name"] in ("send", "post"):
            leaving[rank, args["peer"]].append((begin, args["bytes"]))
        elif event["name"] in ("recv", "take"):
            arriving[args["peer"], rank].append(end)
        elif event["name"] in COLLECTIVES and event["dur"] > 0:
            bars.add((max(e["ts"] for e in events if _same(e, event)), end))
    for (source, target), ends in arriving.items():
        for (begin, size), end in zip(leaving[source, target], sorted(ends), strict=False):
            if size >= SMALLEST_MESSAGE and max(source, target) < count:
                arrows.append(Arrow(source, target, begin, end))
    names = [f"worker {i}" for i in range(workers)] + ["shard" for _ in range(shards)]
    return Panel(title, names, _joined(boxes), sorted(arrows), sorted(bars))


def _same(one: dict[str, object], other: dict[str, object]) -> bool:
    """True if two events belong to one collective: it ends at one moment."""
    return one["name"] == other["name"] and abs(_end(one) - _end(other)) < 1e-6


def _end(event: dict[str, object]) -> float:
    return float(str(event["ts"])) + float(str(event["dur"]))


def _joined(boxes: list[Box]) -> list[Box]:
    """Forward, backward and update of a step as one box, where nothing is between."""
    joined: list[Box] = []
    for box in sorted(boxes):
        last = joined[-1] if joined else None
        if last and last.lane == box.lane and last.step == box.step and box.begin - last.end < 1e-6:
            joined[-1] = last._replace(end=box.end)
        else:
            joined.append(box)
    return joined


def drawn(name: str, panels: Sequence[Panel], bars: str = "travels") -> str:
    """The panels below each other, on one scale of time, up to the last computation: behind it is the run's end.

    `bars`: meaning of the messages' colour.
    """
    last = max(end for panel in panels for end in [*(box.end for box in panel.boxes), *(end for _, end in panel.bars)])
    scale = (WIDTH - LEFT - RIGHT) / last
    out, top = [], 0
    for each in panels:
        out += _panel(name, each, top, scale, last)
        top += TITLE + LANE * len(each.lanes)
    height = top + FOOT
    legend = [("var(--compute)", "computes"), ("var(--message)", bars)]
    if any("shard" in each.lanes for each in panels):
        legend.append(("var(--server)", "shard applies"))
    out += _axis(top, last, scale, [*legend, ("var(--wait)", "dotted: waits")])
    body = "\n".join(out)
    return (
        f'<svg class="travel" xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" '
        f'font-family="system-ui, sans-serif" font-size="13">\n<style>{STYLE}</style>\n'
        f'<defs><marker id="{name}-head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="6" markerHeight="6" '
        'orient="auto"><path d="M0 0 L8 4 L0 8 z" fill="var(--message)"/></marker></defs>\n'
        f"{body}\n</svg>\n"
    )


def _panel(name: str, panel: Panel, top: int, scale: float, last: float) -> list[str]:
    def y(lane: int) -> float:
        return top + TITLE + LANE * (lane + 0.5)

    out = [f'<text x="{LEFT}" y="{top + 19}" fill="currentColor" font-weight="600">{panel.title}</text>']
    for lane, label in enumerate(panel.lanes):
        out.append(f'<text x="{LEFT - 10}" y="{y(lane) + 4:.0f}" fill="currentColor" text-anchor="end">{label}</text>')
        out.append(
            f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y(lane):.0f}" y2="{y(lane):.0f}" stroke="var(--wait)" '
            'stroke-dasharray="2 4"/>'
        )
    for begin, end in panel.bars:
        if begin < last:
            x, width = LEFT + begin * scale, max((min(end, last) - begin) * scale, 2)
            bottom = LANE * (len(panel.lanes) - 1) + BOX
            out.append(
                f'<rect x="{x:.1f}" y="{y(0) - BOX / 2:.0f}" width="{width:.1f}" height="{bottom}" rx="2" '
                'fill="var(--message)" fill-opacity="0.55"/>'
            )
    for box in panel.boxes:
        if box.begin < last:
            x, width = LEFT + box.begin * scale, max((min(box.end, last) - box.begin) * scale, 1)
            fill = "var(--server)" if panel.lanes[box.lane] == "shard" else "var(--compute)"
            out.append(
                f'<rect x="{x:.1f}" y="{y(box.lane) - BOX / 2:.0f}" width="{width:.1f}" height="{BOX}" rx="2" '
                f'fill="{fill}" fill-opacity="{0.95 if box.step % 2 == 0 else 0.6}"/>'
            )
    for arrow in panel.arrows:
        if arrow.end <= last:
            down = 1 if arrow.target > arrow.source else -1
            x1, x2 = LEFT + arrow.begin * scale, LEFT + arrow.end * scale
            y1, y2 = y(arrow.source) + down * BOX / 2, y(arrow.target) - down * BOX / 2
            out.append(
                f'<line x1="{x1:.1f}" y1="{y1:.0f}" x2="{x2:.1f}" y2="{y2:.0f}" stroke="var(--message)" '
                f'stroke-width="1.4" marker-end="url(#{name}-head)"/>'
            )
    return out


def _axis(top: int, last: float, scale: float, legend: Sequence[tuple[str, str]]) -> list[str]:
    """Ticks in milliseconds, and the meaning of the colours."""
    tick = next(t for t in (100, 200, 500, 1000, 2000, 5000, 10000) if last / t <= 9)
    out = []
    for i in range(int(last / tick) + 1):
        x = LEFT + i * tick * scale
        text = f"{i * tick / 1000:g}" + (" ms" if i == 0 else "")
        out.append(
            f'<text x="{x:.1f}" y="{top + 14}" fill="var(--wait)" text-anchor="middle" font-size="11">{text}</text>'
        )
    x = LEFT
    for colour, text in legend:
        out.append(f'<rect x="{x}" y="{top + 25}" width="12" height="12" rx="2" fill="{colour}"/>')
        out.append(f'<text x="{x + 18}" y="{top + 35}" fill="currentColor" font-size="12">{text}</text>')
        x += 50 + 7 * len(text)
    return out


def one_copy() -> Panel:
    """A schematic: no trace has it, because virtual workers have models of their own."""
    boxes, bars, begin = [], [], 0.0
    for step, lengths in enumerate(((520, 610, 560, 700), (640, 540, 600, 570), (480, 500, 450, 470))):
        boxes += [Box(lane, begin, begin + length, step) for lane, length in enumerate(lengths)]
        bars.append((begin + max(lengths), begin + max(lengths) + 150))
        begin = bars[-1][1]
    names = [f"worker {i}" for i in range(4)]
    return Panel("shared_memory(): meet, each worker sums and updates its slice, meet", names, boxes, [], bars)


MODULES, STEPS, LATE_LANE, LATE_BOX = 3, 6, 34, 24
TIMES = StageTimes(forward_s=1.0, backward_s=2.0, update_s=0.2, learn_s=0.5)
PASSES = {
    "forward": ("var(--compute)", "forward"),
    "backward": ("var(--message)", "backward"),
    "learn": ("var(--server)", "the estimator learns"),
    "update": ("currentColor", "update"),
}
LATE: dict[str, Callable[[], Schedule]] = {
    "back-propagation: a module waits for all behind it": lambda: schedules.one_f_one_b(MODULES, 1),
    "ddg: the gradient of module k is K-1-k steps late": lambda: schedules.ddg(MODULES),
    "features_replay: the same, with a second forward pass in the backward one": lambda: schedules.features_replay(
        MODULES
    ),
    "pipelined_backprop: 2(K-1-k) steps late": lambda: schedules.pipelined_backprop(MODULES),
    "synthetic_gradients: no update is late, but its gradient is an estimate": lambda: schedules.synthetic_gradients(
        MODULES
    ),
}


def late() -> str:
    """The panels below each other, on one scale of time."""
    tables = {title: played(schedule(), STEPS, TIMES) for title, schedule in LATE.items()}
    scale = (WIDTH - LEFT - RIGHT) / max(table.seconds for table in tables.values())
    height = len(tables) * (TITLE + MODULES * LATE_LANE) + FOOT
    out = [line for row, (title, table) in enumerate(tables.items()) for line in _late_panel(row, title, table, scale)]
    x = float(LEFT)
    for colour, text in PASSES.values():
        out.append(f'<rect x="{x:.0f}" y="{height - 22}" width="12" height="12" rx="2" fill="{colour}"/>')
        out.append(f'<text x="{x + 18:.0f}" y="{height - 12}" fill="currentColor" font-size="12">{text}</text>')
        x += 50 + 7 * len(text)
    body = "\n".join(out)
    return (
        f'<svg class="travel" xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" '
        f'font-family="system-ui, sans-serif" font-size="13">\n<style>{STYLE}</style>\n{body}\n</svg>\n'
    )


def _late_panel(row: int, title: str, table: Timetable, scale: float) -> list[str]:
    top = row * (TITLE + MODULES * LATE_LANE)
    out = [f'<text x="{LEFT}" y="{top + 20}" fill="currentColor" font-weight="600">{title}</text>']
    for module in range(MODULES):
        y = top + TITLE + LATE_LANE * module
        middle = y + LATE_LANE / 2
        out.append(
            f'<text x="{LEFT - 10}" y="{middle + 4:.0f}" fill="currentColor" text-anchor="end">module {module}</text>'
        )
        out.append(
            f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{middle:.0f}" y2="{middle:.0f}" stroke="var(--wait)" '
            'stroke-dasharray="2 4"/>'
        )
        for entry in table.of(module):
            x, width = LEFT + entry.start_s * scale, max((entry.end_s - entry.start_s) * scale - 0.6, 1.2)
            colour, _ = PASSES[entry.turn.action.kind]
            out.append(
                f'<rect x="{x:.1f}" y="{middle - LATE_BOX / 2:.0f}" width="{width:.1f}" height="{LATE_BOX}" rx="2" '
                f'fill="{colour}"/>'
            )
            if entry.turn.micro_batch >= 0 and entry.turn.action.kind != "learn":
                out.append(
                    f'<text x="{x + width / 2:.1f}" y="{middle + 4:.0f}" fill="white" text-anchor="middle" '
                    f'font-size="11">{entry.turn.micro_batch + 1}</text>'
                )
    return out


def pictures() -> dict[str, str]:
    """Every picture by its name."""
    ethernet, some, ring = pt.cluster.ethernet, pt.cluster.lognormal(0.25), pt.collectives.ring
    mixed = ethernet(gbit_per_s=1, gflops=0.01, latency_us=120, stragglers=some)
    slow = ethernet(gbit_per_s=1, gflops=0.02, stragglers=pt.cluster.slow_host(0, 3.0))
    narrow = ethernet(gbit_per_s=0.02, gflops=0.05, latency_us=20)
    host = pt.cluster.one_host(gflops=0.02, stragglers=some)
    panels = {
        "synchronous": [panel("sync_sgd(route=ring)", sync_sgd(ring), 2, 4, mixed)],
        "local": [panel("local_sgd(period=3, route=ring)", local_sgd(3, ring), 6, 4, mixed)],
        "gossip": [panel("gossip(graph=ring_graph)", gossip(), 3, 5, mixed)],
        "asynchronous": [panel("async_sgd(): worker 0 is three times slower", async_sgd(), 4, 3, slow, shards=1)],
        "bounded": [panel("ssp(bound=1): worker 0 is three times slower", ssp(1), 4, 3, slow, shards=1)],
        "compressed": [
            panel("sync_sgd() on a slow link", sync_sgd(), 2, 3, narrow),
            panel("one_bit_sgd(): the same two steps", one_bit_sgd(exact_below=0), 2, 3, narrow),
        ],
        "one-copy": [one_copy()],
        "hogwild": [
            panel("hogwild(): each worker updates the one copy when its gradient is there", hogwild(), 4, 4, host)
        ],
    }
    bars = {"one-copy": "each sums and updates its slice"}
    return {name: drawn(name, each, bars.get(name, "travels")) for name, each in panels.items()} | {"late": late()}


if __name__ == "__main__":
    for name, text in pictures().items():
        (HERE / f"{name}.svg").write_text(text, encoding="utf-8")
        print(HERE / f"{name}.svg")
