"""The report as a reader sees it: opened in headless Chromium, on a desk and on a phone."""

from __future__ import annotations

import math
import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Page

from polytempo.report.pages.page import write_report
from polytempo.report.runs import RunRecord
from polytempo.worlds.trace import Event

pytestmark = pytest.mark.browser


# strategy, workers, world, samples/s, share of time in communication, bytes per rank and step, steps between exchanges
COMPARED = [
    ("sync_sgd(route=native)", 1, "process", 21_000.0, 0.0, 0, 1),
    ("sync_sgd(route=ring)", 2, "process", 29_500.0, 0.31, 151_592, 1),
    ("local_sgd(period=8)", 2, "process", 38_200.0, 0.06, 151_592, 8),
    ("post_local_sgd(switch=100, period=16)", 2, "process", 36_900.0, 0.09, 151_592, 4),
    ("diloco(period=50, outer_lr=0.7, outer_momentum=0.9)", 2, "process", 39_800.0, 0.01, 400, 50),
    ("gossip(graph=ring)", 8, "virtual", 81_000.0, 0.22, 75_796, 1),
]
NUM_SAMPLES = 28_160


def record(number: int) -> RunRecord:
    """A run as `polytempo compare` leaves it, with the shape of real curves."""
    strategy, workers, world, speed, share, sent, period = COMPARED[number]
    chance = random.Random(number)
    samples_a_step = 32 * workers
    num_steps, step_s = NUM_SAMPLES // samples_a_step, samples_a_step / speed
    metrics: list[dict[str, Any]] = []
    for step in range(1, num_steps + 1):
        place = {
            "step": step,
            "epoch": 10 * step / num_steps,
            "samples": step * samples_a_step,
            "seconds": step * step_s,
        }
        loss = 2.3 * math.exp(-step * samples_a_step / (1900 + 300 * number)) + 0.05 * chance.lognormvariate(0, 0.5)
        metrics.append({"kind": "train", **place, "loss": loss, "samples_per_s": speed})
        if step % (num_steps // 10) == 0:
            accuracy = (
                0.975 - 0.5 * math.exp(-step * samples_a_step / (2300 + 350 * number)) + chance.uniform(-0.003, 0.003)
            )
            metrics.append({"kind": "test", **place, "loss": loss, "accuracy": accuracy})
    result = {
        "strategy": strategy,
        "world": world,
        "workers": workers,
        "steps": num_steps,
        "samples": NUM_SAMPLES,
        "seconds": num_steps * step_s,
        "samples_per_s": speed,
        "loss": metrics[-1]["loss"],
        "accuracy": metrics[-1]["accuracy"],
        "bytes_sent_per_rank": sent * num_steps // period,
        "parameters_sha256": "5f" * 32,
        "trace_hash": "c0" * 32,
        "job": "digits",
        "epochs": 10,
        "seed": 0,
        "batch_size": 32,
        "communication_share": share,
        "threads": 1,
    }
    return RunRecord(result, metrics, events(number, num_steps, step_s))


def events(number: int, num_steps: int, step_s: float) -> list[Event]:
    """Every rank computes; every `period` steps all meet at one operation, which ends for all at the same time."""
    strategy, workers, _, _, share, sent, period = COMPARED[number]
    chance = random.Random(100 + number)
    clocks, found = [0.0] * workers, []
    for step in range(1, num_steps + 1):
        for rank in range(workers):
            begin, clocks[rank] = clocks[rank], clocks[rank] + step_s * (1 - share) * chance.uniform(0.9, 1.1)
            found.append(Event(rank, step, "compute", 0, begin, clocks[rank]))
        if workers > 1 and step % period == 0:
            end = max(clocks) + step_s * share * period
            for rank in range(workers):
                peer = (rank + 1) % workers
                if strategy == "sync_sgd(route=ring)":
                    found.append(Event(rank, step, "send", sent, clocks[rank], end - step_s * 0.02, peer))
                    found.append(Event(rank, step, "recv", 0, clocks[rank] + step_s * 0.01, end, peer))
                else:
                    found.append(Event(rank, step, "all_reduce", sent, clocks[rank], end))
                clocks[rank] = end
    return found


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("compare") / "report.html"
    write_report(path, [record(number) for number in range(len(COMPARED))], title="digits: six strategies compared")
    return path


class Opened:
    """A page that has drawn everything, with its complaints and requests."""

    def __init__(self, browser: Browser, path: Path, width: int, height: int) -> None:
        self.complaints: list[str] = []
        self.requests: list[str] = []
        context = browser.new_context(viewport={"width": width, "height": height}, service_workers="block")
        self.page: Page = context.new_page()
        self.page.on("console", lambda message: self.complaints.append(message.text))
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.goto(path.as_uri())
        self.page.wait_for_selector("html[data-drawn]", state="attached")
        self.page.wait_for_function("document.querySelectorAll('.plot:not(.later) .main-svg').length >= 8")


@pytest.fixture(scope="module", params=[(1280, 900), (390, 844)], ids=["desk", "phone"])
def opened(request: pytest.FixtureRequest, browser: Browser, report: Path) -> Iterator[Opened]:
    view = Opened(browser, report, *request.param)
    yield view
    view.page.context.close()


TITLES = [
    "Accuracy against time",
    "Accuracy against samples",
    "Loss against time",
    "Loss against samples",
    "Throughput",
    "Speed-up",
    "Communication",
    "Sent per rank",
]
AXIS_TITLES = [
    "Training loss (logarithmic)",
    "Test accuracy (%)",
    "Time (s; virtual where simulated)",
    "Samples (all workers)",
    "Throughput (samples/s)",
    "Speed-up (\u00d7 baseline)",
    "Communication (% of the time)",
    "Sent per rank (bytes, logarithmic)",
    "Time since the first bar (ms)",
    "Rank",
]
NAMES = [
    "sync_sgd(route=native)",
    "sync_sgd(route=ring)",
    "local_sgd",
    "post_local_sgd",
    "diloco",
    "gossip (simulated)",
]

# Every text of a card with its box. Hover buttons are not texts; undrawn elements have no box.
TEXTS = """
() => [...document.querySelectorAll(".card")].map((card) => {
  const found = card.querySelectorAll("h3, p, label, select, .legend li, svg.main-svg text");
  return [...found].map((element) => {
    const box = element.getBoundingClientRect();
    const text = element.tagName === "SELECT" ? "(the chosen run)" : element.textContent;
    return { text, left: box.left, right: box.right, top: box.top, bottom: box.bottom };
  }).filter((one) => one.text.trim() && one.right > one.left);
})
"""


def cards(opened: Opened) -> list[list[dict[str, Any]]]:
    found: list[list[dict[str, Any]]] = opened.page.evaluate(TEXTS)
    return found


def overlap(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """True if two boxes share more than a pixel of rounding."""
    width = min(one["right"], other["right"]) - max(one["left"], other["left"])
    height = min(one["bottom"], other["bottom"]) - max(one["top"], other["top"])
    return bool(width > 1 and height > 1)


def choose(opened: Opened, number: int) -> None:
    opened.page.select_option("#timeline-run", str(number))
    opened.page.wait_for_selector(f"#timeline-{number} .main-svg", state="visible")


def test_nothing_is_fetched_and_nothing_complained(opened: Opened) -> None:
    choose(opened, 5)
    assert opened.complaints == []
    assert [url.partition(":")[0] for url in opened.requests] == ["file"]


def test_titles_units_and_legends_are_visible(opened: Opened) -> None:
    choose(opened, 1)
    for title in TITLES:
        assert opened.page.get_by_role("heading", name=title, exact=True).is_visible(), title
    drawn = {one["text"] for card in cards(opened) for one in card}
    assert set(AXIS_TITLES) <= drawn
    assert opened.page.locator("ul.legend button").all_inner_texts() == NAMES, "one legend for all figures"
    assert {"gradient and stepcomputation", "sendcommunication", "wait for a messagecommunication"} <= drawn


def test_the_table_has_a_row_for_every_run(opened: Opened) -> None:
    rows = opened.page.locator("#summary tbody th .run")
    assert rows.all_inner_texts() == NAMES
    assert opened.page.locator("#summary tbody tr").first.locator("td").count() == 10


def test_no_texts_overlap_and_none_is_cut_off(opened: Opened) -> None:
    width = opened.page.viewport_size["width"] if opened.page.viewport_size else 0
    for number in range(len(COMPARED)):
        choose(opened, number)
        for texts in cards(opened):
            clashes = [
                (one["text"], other["text"])
                for place, one in enumerate(texts)
                for other in texts[place + 1 :]
                if overlap(one, other)
            ]
            assert clashes == []
            assert [one["text"] for one in texts if one["left"] < 0 or one["right"] > width] == []


def test_every_text_of_a_figure_lies_within_it(opened: Opened) -> None:
    outside = opened.page.evaluate(
        """() => [...document.querySelectorAll(".plot")].flatMap((plot) => {
          const frame = plot.getBoundingClientRect();
          return [...plot.querySelectorAll("svg.main-svg text")].filter((text) => {
            const box = text.getBoundingClientRect();
            return box.left < frame.left - 1 || box.right > frame.right + 1 || box.bottom > frame.bottom + 1;
          }).map((text) => plot.id + ": " + text.textContent);
        })"""
    )
    assert outside == []


def test_the_staleness_of_a_parameter_server_fits_a_phone(browser: Browser, tmp_path: Path) -> None:
    run = record(1)
    server = {
        "shards": 1,
        "replicas": 0,
        "updates": 9,
        "dropped": 0,
        "refused": 0,
        "staleness": {"mean": 1.0, "p50": 1, "p99": 2, "histogram": [[0, 3], [1, 4], [2, 2]]},
        "workers": [],
    }
    write_report(tmp_path / "report.html", [run._replace(result=run.result | {"server": server})], title="served")
    context = browser.new_context(viewport={"width": 390, "height": 844}, service_workers="block")
    page = context.new_page()
    page.goto((tmp_path / "report.html").as_uri())
    page.wait_for_selector("html[data-drawn]", state="attached")
    assert page.locator("#staleness .xtick text").all_text_contents() == ["0", "1", "2"]
    plot, title = page.locator("#staleness").bounding_box(), page.locator("#staleness .xtitle").bounding_box()
    assert plot is not None
    assert title is not None
    assert plot["x"] <= title["x"] <= title["x"] + title["width"] <= plot["x"] + plot["width"]
    context.close()


def test_the_page_is_no_wider_than_the_window(opened: Opened) -> None:
    sizes = opened.page.evaluate("[document.documentElement.scrollWidth, window.innerWidth]")
    assert sizes[0] <= sizes[1]


def test_a_click_in_the_legend_hides_a_run_everywhere(opened: Opened) -> None:
    lines = "[...document.querySelectorAll('.plot[data-lines]')].map((plot) => plot.data.map((one) => one.visible))"
    button = opened.page.locator(".legend.shared button").nth(2)
    button.click()
    assert button.get_attribute("aria-pressed") == "false"
    assert opened.page.evaluate(lines) == [[True, True, False, True, True, True]] * 4
    button.click()
    assert opened.page.evaluate(lines) == [[True] * 6] * 4


def test_figures_are_what_plotly_expects(opened: Opened) -> None:
    complaints = opened.page.evaluate(
        "Object.entries(figures).flatMap(([key, one]) => (Plotly.validate(one.data, one.layout) || []).filter("
        "(found) => !['unused', 'invisible'].includes(found.code)).map((found) => key + ': ' + found.msg))"
    )
    assert complaints == []


def test_the_legend_stays_in_sight_while_curves_are_read(opened: Opened) -> None:
    opened.page.locator("#loss-samples").scroll_into_view_if_needed()
    box = opened.page.locator(".legend.shared").bounding_box()
    assert box is not None
    assert 0 <= box["y"] < 100
    assert box["height"] < 100, "no taller than a line or two, on a phone too"


def test_a_wide_table_shows_that_it_scrolls(opened: Opened) -> None:
    frame, hint = opened.page.locator(".scroll:has(#summary)"), opened.page.locator(".scroll:has(#summary) + .hint")
    wide = frame.evaluate("(frame) => frame.scrollWidth > frame.clientWidth")
    assert hint.is_visible() == wide
    shaded = "(frame) => getComputedStyle(frame).boxShadow !== 'none'"
    assert frame.evaluate(shaded) == wide
    frame.evaluate("(frame) => { frame.scrollLeft = frame.scrollWidth; }")
    opened.page.wait_for_selector(".scroll:not(.more-right) #summary", state="attached")
    assert not frame.evaluate(shaded), "at its end nothing is left to show"
    name = opened.page.locator("#summary tbody th").first.bounding_box()
    assert name is not None
    assert name["x"] >= 0, "the names stay"
    frame.evaluate("(frame) => { frame.scrollLeft = 0; }")


BACKGROUND = "getComputedStyle(document.body).backgroundColor"
TICK = "getComputedStyle(document.querySelector('#loss-seconds .xtick text')).fill"
LINE = "getComputedStyle(document.querySelector('#loss-seconds .scatterlayer .js-line')).stroke"
LIGHT, NIGHT = ["#F5F7F9", "#1F2933", "#0072B2"], ["#12161B", "#E6EAEF", "#58A6E8"]


def colors(page: Page) -> list[str]:
    """The colors of the page, of a figure's text and of its first line."""
    found = [page.evaluate(expression) for expression in (BACKGROUND, TICK, LINE)]
    return ["#{:02X}{:02X}{:02X}".format(*map(int, re.findall(r"\d+", color)[:3])) for color in found]


def test_the_page_follows_the_system_and_a_choice_goes_before_it(browser: Browser, report: Path) -> None:
    context = browser.new_context(color_scheme="dark", service_workers="block")
    page = context.new_page()
    page.goto(report.as_uri())
    page.wait_for_selector("html[data-drawn]", state="attached")
    assert colors(page) == NIGHT
    page.emulate_media(color_scheme="light")
    page.wait_for_selector("html[data-mode=light]", state="attached")
    assert colors(page) == LIGHT
    page.get_by_role("button", name="Dark mode").click()
    assert colors(page) == NIGHT
    page.reload()
    page.wait_for_selector("html[data-drawn]", state="attached")
    assert colors(page) == NIGHT, "the choice is remembered"
    page.get_by_role("button", name="Light mode").click()
    assert colors(page) == LIGHT
    context.close()


def test_the_mode_keeps_what_was_hidden_and_zoomed(opened: Opened) -> None:
    state = (
        "((plot) => [plot.data[0].visible, plot._fullLayout.xaxis.range])(document.getElementById('accuracy-samples'))"
    )
    opened.page.locator("#accuracy-samples").scroll_into_view_if_needed()
    box = opened.page.locator("#accuracy-samples .nsewdrag").bounding_box()
    assert box is not None
    middle = box["y"] + box["height"] / 2
    opened.page.mouse.move(box["x"] + 0.2 * box["width"], middle)
    opened.page.mouse.down()
    opened.page.mouse.move(box["x"] + 0.6 * box["width"], middle, steps=5)
    opened.page.mouse.up()
    button = opened.page.locator(".legend.shared button").first
    button.click()
    _, zoomed = opened.page.evaluate(state)
    assert zoomed[0] > 1000, "a drag has zoomed"
    opened.page.locator("#mode").click()
    assert opened.page.evaluate(state) == [False, zoomed]
    button.click()
    opened.page.locator("#mode").click()
    assert opened.page.evaluate(state) == [True, zoomed]
    opened.page.evaluate("Plotly.relayout('accuracy-samples', {'xaxis.range': [0, 30000]})")


def test_paper_is_white(browser: Browser, report: Path) -> None:
    context = browser.new_context(color_scheme="dark", service_workers="block")
    page = context.new_page()
    page.goto(report.as_uri())
    page.wait_for_selector("html[data-drawn]", state="attached")
    page.evaluate("window.dispatchEvent(new Event('beforeprint'))")
    assert colors(page) == LIGHT
    page.evaluate("window.dispatchEvent(new Event('afterprint'))")
    assert colors(page) == NIGHT
    context.close()


def test_a_browser_that_cannot_unpack_says_so_and_shows_the_tables(browser: Browser, report: Path) -> None:
    context = browser.new_context(service_workers="block")
    context.add_init_script("delete window.DecompressionStream")
    page = context.new_page()
    page.goto(report.as_uri())
    page.wait_for_selector("#loss-seconds p")
    assert "This browser cannot draw the figures (DecompressionStream is not defined)" in page.inner_text("body")
    assert page.locator("#summary tbody tr").count() == len(COMPARED)
    context.close()


def test_a_single_run_opens_with_its_timeline(browser: Browser, tmp_path: Path) -> None:
    write_report(tmp_path / "report.html", [record(1)], title="digits: sync_sgd(route=ring)")
    context = browser.new_context(viewport={"width": 390, "height": 844}, service_workers="block")
    page = context.new_page()
    page.goto((tmp_path / "report.html").as_uri())
    page.wait_for_selector("html[data-drawn]", state="attached")
    assert page.locator("#timeline-0 .main-svg").first.is_visible()
    assert page.locator("select, .legend button").count() == 0
    assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
    context.close()
