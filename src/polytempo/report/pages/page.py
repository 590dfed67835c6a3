"""`report.html`: one self-contained page about one run or several. It loads nothing and needs no network."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from html import escape

from polytempo.core.system.files import replace
from polytempo.core.system.url_path import Place
from polytempo.report.pages import clients, noise, own_numbers, served, stages
from polytempo.report.pages import layer_parts as parts
from polytempo.report.pages.diagnoses import diagnoses
from polytempo.report.pages.document import WITHOUT_SCRIPT, document, place_of
from polytempo.report.pages.headline import headline, remarks
from polytempo.report.pages.summary import TIMES, baseline_sentences
from polytempo.report.pages.table import breakable, details_table, facts, numbers, summary_table, swatch, tiles
from polytempo.report.pictures import plots
from polytempo.report.pictures.figure import Figure
from polytempo.report.pictures.marks import SIGNS, ChartMark, marks_of
from polytempo.report.pictures.style import css, look
from polytempo.report.pictures.timeline import WORDS, Timeline, timeline
from polytempo.report.runs import RunRecord, labels, short_labels
from polytempo.worlds.trace import COMMUNICATION

_SIMULATED = (
    "ran under a virtual clock: seconds, throughput and shares of time are of the described cluster, not "
    "of this computer."
)

_MOST_NAMED = 5


def write_report(path: Place, runs: Sequence[RunRecord], *, title: str, notes: Sequence[str] = ()) -> None:
    """Write the page about `runs` (at least one) to `path`, complete or not at all. `notes` stand below its finding."""
    if not runs:
        raise ValueError("a report needs at least one run; pass the records of the runs that finished")
    replace(path, page(runs, title=title, notes=notes))


def page(runs: Sequence[RunRecord], *, title: str, notes: Sequence[str] = ()) -> str:
    """The page as HTML, with plotly.js and the figures in it, gzipped: about 0.6 MB."""
    figures: dict[str, Figure] = {}
    sections = (
        _curves(runs, figures)
        + _clients(runs, figures)
        + _own(runs, figures)
        + _noise(runs, figures)
        + _bars(runs, figures)
        + _servers(runs, figures)
    )
    sections += _stages(runs, figures) + _parts(runs, figures) + _timelines(runs, figures)
    body = f"""{_findings(runs, notes)}
{_summary(runs)}
{WITHOUT_SCRIPT}
{sections}
{details_table(runs)}"""
    return document(title, facts(runs), body, figures)


def _findings(runs: Sequence[RunRecord], notes: Sequence[str]) -> str:
    found = f'<p class="headline">{escape(headline(runs))}</p>' if headline(runs) else ""
    return found + "".join(
        f'<p class="remark">{escape(remark)}</p>' for remark in (*remarks(runs), *_diagnoses(runs), *notes)
    )


def _diagnoses(runs: Sequence[RunRecord]) -> list[str]:
    """Slow ranks and the bound, each with the run's name if there are several."""
    alone = len(runs) == 1
    pairs = zip(runs, short_labels(runs), strict=True)
    return [said if alone else f"{name}: {said}" for run, name in pairs for said in diagnoses(run.result)]


def _summary(runs: Sequence[RunRecord]) -> str:
    """The numbers, and caveats about comparing them. A single run is not compared."""
    if len(runs) == 1:
        return numbers(runs[0]) + (f"<p>This run {_SIMULATED}</p>" if runs[0].simulated else "")
    simulated = any(run.simulated for run in runs)
    chance = "Each strategy ran once, so small differences may be chance"
    seeds = chance + (
        "." if all(run.simulated for run in runs) else "; times also depend on the computer's other work."
    )
    return (
        f"{tiles(runs)}<h2>Summary</h2><p>{escape(' '.join(baseline_sentences(runs)))} {seeds}</p>"
        f"{f'<p>Runs marked “simulated” {_SIMULATED}</p>' if simulated else ''}{summary_table(runs)}"
    )


def _curves(runs: Sequence[RunRecord], figures: dict[str, Figure]) -> str:
    time = "virtual time" if all(run.simulated for run in runs) else "time"
    cards = [
        _curve_card(runs, figures, "accuracy", "seconds", f"Accuracy against {time}"),
        _curve_card(runs, figures, "accuracy", "samples", "Accuracy against samples"),
        _curve_card(runs, figures, "loss", "seconds", f"Loss against {time}"),
        _curve_card(runs, figures, "loss", "samples", "Loss against samples"),
    ]
    if not any(cards):
        return f"<h2>Learning</h2><p>{_left(runs, 'no metrics')}</p>"
    no_accuracy = "" if any(cards[:2]) else "This job measures no accuracy."
    if len(runs) == 1:
        return f'<h2>Learning</h2><p>{no_accuracy}</p>{_marked(runs[0])}<div class="grid">{"".join(cards)}</div>'
    return (
        f"<h2>Learning</h2><p>Against time: how fast a strategy gets there on this hardware. Against samples: how much "
        f"it learns from the same data. Click a strategy to hide or show it in all figures. {no_accuracy}</p>"
        f'<div>{_run_legend(runs)}<div class="grid">{"".join(cards)}</div></div>'
    )


def _marked(run: RunRecord) -> str:
    """The first marks of the charts in words, by their steps."""
    marks = sorted(marks_of(run.logged), key=lambda mark: (mark.step is None, mark.step or 0.0))
    items = "".join(f"<li>{_sign(mark)}{escape(_moment(mark) + mark.text)}</li>" for mark in marks[:_MOST_NAMED])
    more = len(marks) - _MOST_NAMED
    rest = f"<li>and {more} more</li>" if more > 0 else ""
    return f'<ul class="marks" aria-label="Marks in the charts">{items}{rest}</ul>' if marks else ""


def _sign(mark: ChartMark) -> str:
    sign = SIGNS[mark.kind]
    return f'<span aria-hidden="true" style="color:{css(sign.color)}">{sign.letter}</span> '


def _moment(mark: ChartMark) -> str:
    return f"step {mark.step:,.0f}: " if mark.step is not None else f"{mark.at_s:.1f} s: "


def _curve_card(runs: Sequence[RunRecord], figures: dict[str, Figure], quantity: str, over: str, heading: str) -> str:
    figure = plots.curves(runs, quantity, over)
    if figure is None:
        return ""
    note = plots.left_out(runs, quantity, over)
    caption = f"{note} A double click shows all of it." if note else ""
    return _card(figures, f"{quantity}-{over}", heading, caption, figure, lines=True)


def _clients(runs: Sequence[RunRecord], figures: dict[str, Figure]) -> str:
    """The spread of the clients' accuracies, and the rounds that each took part in."""
    told = {number: found for number, run in enumerate(runs) if (found := clients.rounds_in(run)) is not None}
    figure, names, cards = clients.accuracy_bands(runs), short_labels(runs), list[str]()
    if figure is not None:
        caption = "The line is the median client."
        if len(runs) == 1:
            caption += " Areas: the middle 80 % of clients, and all of them; the narrower, the fairer."
        cards.append(_card(figures, "clients", "Accuracy of clients", caption, figure, lines=True))
    for number, found in told.items():
        heading = "Who took part" if len(runs) == 1 else f"Who took part: {names[number]}"
        text = f"{clients.said_of(found)} A fuller color is a larger part of the rounds."
        picture = clients.turns_picture(found)
        cards.append(f'<section class="card"><h3>{escape(heading)}</h3><p>{escape(text)}</p>{picture}</section>')
    return f'<h2>Clients</h2><div class="grid">{"".join(cards)}</div>' if cards else ""


def _own(runs: Sequence[RunRecord], figures: dict[str, Figure]) -> str:
    """The user's own numbers, pictures and texts."""
    if not any(map(own_numbers.has_own, runs)):
        return ""
    named = own_numbers.names(runs)
    cards = [
        _card(figures, f"own-{number}", name, "", own_numbers.own_curves(runs, name), lines=True)
        for number, name in enumerate(named[: own_numbers.MOST_CHARTS])
    ]
    more = len(named) - len(cards)
    said = f"{more} more are in metrics.jsonl. " if more > 0 else ""
    charts = f'<div class="grid">{"".join(cards)}</div>' if cards else ""
    key = _run_key(runs, own_numbers.has_own) if len(runs) > 1 else ""
    shown = own_numbers.pictures(runs) + own_numbers.texts(runs)
    return f"<h2>Your own numbers</h2><p>{escape(said)}</p>{key}{charts}{shown}"


def _noise(runs: Sequence[RunRecord], figures: dict[str, Figure]) -> str:
    figure = noise.noise_curves(runs)
    if figure is None:
        return ""
    caption = (
        "Well below the noise scale, twice the samples in a step halve the steps; well above it, hardly any step is "
        "saved. Dotted: the samples of a step."
    )
    return f"<h2>Batch size</h2>{_card(figures, 'noise', 'Gradient noise scale', caption, figure, lines=True)}"


def _bars(runs: Sequence[RunRecord], figures: dict[str, Figure]) -> str:
    if len(runs) == 1:
        return ""  # its numbers stand in the summary, and one bar compares nothing
    against = f"How many times as many samples per second as the baseline; the dotted line is 1{TIMES}."
    waiting = "The share of its time that a rank communicates, waiting for the others included."
    cards = [
        _card(figures, "throughput", "Throughput", "Samples per second, all workers.", plots.throughput_bars(runs)),
        _card(figures, "speed-up", "Speed-up", against, plots.speed_up_bars(runs)),
        _card(figures, "communication", "Communication", waiting, plots.communication_bars(runs)),
        _card(figures, "bytes", "Sent per rank", "Bytes over the whole run.", plots.bytes_bars(runs)),
    ]
    return f'<h2>Speed and communication</h2><div class="grid">{"".join(cards)}</div>'


def _servers(runs: Sequence[RunRecord], figures: dict[str, Figure]) -> str:
    if not any(served.has_server(run) for run in runs):
        return ""
    figure = served.staleness_bars(runs)
    caption = "Counted in each shard: how many updates its weights had between a worker's reading and its gradient."
    key = _run_key(runs, served.has_server) if len(runs) > 1 else ""
    card = "" if figure is None else _card(figures, "staleness", "Staleness", caption, figure, key, lines=True)
    return (
        "<h2>Parameter server</h2><p>A worker is idle while it waits for the server's answers or for work.</p>"
        f"{served.staleness_table(runs)}<p></p>{card}<details><summary>Workers one by one</summary>"
        f"{served.workers_table(runs)}</details>{served.events_table(runs)}"
    )


def _stages(runs: Sequence[RunRecord], figures: dict[str, Figure]) -> str:
    cut = {number: run for number, run in enumerate(runs) if stages.has_stages(run)}
    if not cut:
        return ""
    drawn = {number: found for number, run in cut.items() if (found := stages.picture(run)) is not None}
    key = "".join(
        f'<li><span class="square" style="background:{css(color)}"></span>{escape(op)}</li>'
        for op, color in stages.PASSES.items()
    )
    cards = "".join(
        _card(
            figures,
            f"stages-{number}",
            short_labels(runs)[number],
            "A row is a stage of the model. A colored block is work; a gap is a bubble: the stage waits.",
            found.figure,
            f'<ul class="legend">{key}</ul>',
        )
        for number, found in drawn.items()
    )
    return f"<h2>Stages</h2>{cards}{stages.stages_table(runs, drawn)}"


def _parts(runs: Sequence[RunRecord], figures: dict[str, Figure]) -> str:
    split = {number: run for number, run in enumerate(runs) if parts.has_parts(run)}
    if not split:
        return ""
    cards = "".join(
        _card(
            figures,
            f"parts-{number}",
            short_labels(runs)[number],
            "Left: which share of each layer the workers of one model hold; a gray layer is whole on each of them. "
            "Right: the bytes that all of them send for it in a step.",
            parts.picture(run),
            _parts_key(run),
        )
        for number, run in split.items()
    )
    return f"<h2>Layers in parts</h2>{cards}{parts.parts_table(list(split.values()))}"


def _parts_key(run: RunRecord) -> str:
    items = "".join(
        f'<li><span class="square" style="background:{css(color)}"></span>{escape(what)}</li>'
        for what, color in parts.colors(run).items()
    )
    return f'<ul class="legend">{items}</ul>'


def _timelines(runs: Sequence[RunRecord], figures: dict[str, Figure]) -> str:
    drawn = {number: drawing for number, run in enumerate(runs) if (drawing := timeline(run)) is not None}
    if not drawn:
        return f"<h2>Timeline of a few steps</h2><p>{_left(runs, 'no trace')}</p>"
    names = short_labels(runs)
    first = next((n for n in drawn if not COMMUNICATION.isdisjoint(drawn[n].colors)), min(drawn))
    options = "".join(
        f'<option value="{number}"{" selected" if number == first else ""}>{escape(names[number])}</option>'
        for number in drawn
    )
    chooser = f'<label for="timeline-run">Run</label><select id="timeline-run" autocomplete="off">{options}</select>'
    if len(drawn) == 1:
        chooser = "" if len(runs) == 1 else f"<p>{escape(names[first])}</p>"
    panels = "".join(_timeline_panel(number, drawing, figures) for number, drawing in drawn.items())
    return (
        "<h2>Timeline of a few steps</h2><p>A row is a rank: computation above, communication below it. A bar of "
        "communication includes waiting for the others. Hover over a bar for its step, duration and bytes.</p>"
        f'<div class="card">{chooser}{panels}</div>'
    )


def _timeline_panel(number: int, drawing: Timeline, figures: dict[str, Figure]) -> str:
    key = f"timeline-{number}"
    figures[key] = drawing.figure
    items = "".join(
        f'<li><span class="square" style="background:{css(color)}"></span>{escape(WORDS.get(op, op))}'
        f'<span class="kind">{"communication" if op in COMMUNICATION else "computation"}</span></li>'
        for op, color in drawing.colors.items()
    )
    return (
        f'<div data-timeline="{number}" hidden><p>{escape(drawing.caption)}</p>'
        f'{place_of(key, drawing.figure, "later")}<ul class="legend">{items}</ul></div>'
    )


def _card(
    figures: dict[str, Figure],
    key: str,
    heading: str,
    caption: str,
    figure: Figure,
    key_of_colors: str = "",
    *,
    lines: bool = False,
) -> str:
    figures[key] = figure
    text = f"<p>{escape(caption)}</p>" if caption else ""
    place = place_of(key, figure, "", "data-lines" if lines else "")
    return f'<section class="card"><h3>{escape(heading)}</h3>{text}{place}{key_of_colors}</section>'


def _run_legend(runs: Sequence[RunRecord]) -> str:
    """The one legend of all curves, which stays in sight; short names, the calls in full when pointed at."""
    items = "".join(
        f'<li><button type="button" data-run="{number}" aria-pressed="true" title="{escape(call)}">'
        f"{swatch(look(number))}<span>{breakable(label)}</span></button></li>"
        for number, (label, call) in enumerate(zip(short_labels(runs), labels(runs), strict=True))
    )
    return f'<ul class="legend shared" aria-label="Strategies">{items}</ul>'


def _run_key(runs: Sequence[RunRecord], shown: Callable[[RunRecord], bool]) -> str:
    """The colors of runs in a figure of only some of them."""
    items = "".join(
        f'<li><span class="square" style="background:{css(look(number).color)}"></span>{escape(label)}</li>'
        for number, label in enumerate(short_labels(runs))
        if shown(runs[number])
    )
    return f'<ul class="legend">{items}</ul>'


def _left(runs: Sequence[RunRecord], what: str) -> str:
    return f"{'This run' if len(runs) == 1 else 'These runs'} left {what}."
