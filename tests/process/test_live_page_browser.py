"""The live page in headless Chromium: twenty stories as a person would do them, on a desk and on a phone.

POLYTEMPO_SCREENSHOTS=folder keeps a picture of the page at the end of each.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, Page, expect

from live_pages import DEADLINE_S, Served, serving, trace, write_run, write_tail
from polytempo.core.system.files import TAILS

pytestmark = pytest.mark.browser

expect.set_options(timeout=1000 * DEADLINE_S)
TOO_WIDE = """["Workers and servers", "Events"].filter((name) => {
  const table = document.querySelector(`[aria-label="${name}"]`);
  return !table || table.scrollWidth > table.clientWidth;
})"""
LABEL_HEIGHT = "document.querySelector('.timeline .label').getBoundingClientRect().height"
HOSTILE = "<img src=x onerror=\"document.title='hostile'\"><script>document.title='hostile'</script>"
"""A text that would change the title if it were read as markup."""


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """A folder of four runs: a running one, a failed one, a real one and its simulation."""
    root = tmp_path / "runs"
    write_run(root / "digits-async", strategy="async_sgd()", state="running", served=True, number=2, lr="0.5")
    write_run(root / "digits-failed", strategy="gossip()", state="failed", why="out of memory on n2", lr="0.01")
    write_run(root / "digits-sync", log="epoch 1\nloss is 2.3\nepoch 2\nloss is 0.4\n")
    write_run(root / "digits-simulated", world="virtual", workers=2, seed=3, number=1)
    return root


@pytest.fixture
def served(runs: Path) -> Iterator[Served]:
    with serving(runs) as page:
        yield page


class Opened:
    """A page, and its complaints and requests."""

    def __init__(self, browser: Browser, served: Served, width: int = 1280, scheme: str = "light") -> None:
        self.served = served
        self.complaints: list[str] = []
        self.requests: list[str] = []
        context = browser.new_context(
            viewport={"width": width, "height": 900}, color_scheme="dark" if scheme == "dark" else "light"
        )
        context.set_default_timeout(1000 * DEADLINE_S)
        self.page: Page = context.new_page()
        self.page.on("console", lambda message: self.complaints.append(message.text))
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.goto(served.link)
        self.drawn()

    def drawn(self) -> Page:
        """The page when it has drawn the first part of its view."""
        self.page.wait_for_selector("html[data-drawn]", state="attached")
        return self.page

    def at(self, address: str) -> Page:
        """The page at another address."""
        self.page.evaluate(
            "address => { delete document.documentElement.dataset.drawn; location.hash = address }", address
        )
        return self.drawn()

    def at_run(self, name: str) -> Page:
        """The page of a run, with its curves."""
        page = self.at(f"#/run/{name}")
        page.wait_for_selector(".chart canvas")
        return page


def kept(page: Page, name: str) -> None:
    """Keep a picture of the page, from its head to its foot, where one is wanted."""
    if folder := os.environ.get("POLYTEMPO_SCREENSHOTS"):
        page.screenshot(path=f"{folder}/live-{name}.png", full_page=True)


@pytest.fixture
def opened(browser: Browser, served: Served, request: pytest.FixtureRequest) -> Iterator[Opened]:
    view = Opened(browser, served)
    yield view
    kept(view.page, request.node.name.removeprefix("test_"))
    view.page.context.close()
    assert view.complaints == []
    assert all(url.startswith(served.base) for url in view.requests)


def names(page: Page) -> list[str]:
    """The runs in the list, in order."""
    return [str(text) for text in page.locator(".runs tbody th a").all_inner_texts()]


# ---------------------------------------------------------------- the list


def test_story_1_the_token_leaves_the_address_and_a_reload_needs_none(opened: Opened) -> None:
    assert "token" not in opened.page.url
    opened.page.reload()
    opened.drawn()
    expect(opened.page.locator("#link")).to_have_text("live")


def test_story_2_the_running_run_is_first_with_its_remaining_time(opened: Opened) -> None:
    assert names(opened.page)[0] == "digits-async"
    expect(opened.page.locator(".runs tbody tr").first).to_contain_text(re.compile(r"50 %, .* left"))


def test_story_3_find_a_run_by_words_and_numbers(opened: Opened) -> None:
    search = opened.page.get_by_label("Filter runs")
    for text, found in [
        ("gossip", ["digits-failed"]),
        ("state:finished seed>2", ["digits-simulated"]),
        ("nothing", []),
        ("", 4),
    ]:
        search.fill(text)
        assert (len(names(opened.page)) if isinstance(found, int) else names(opened.page)) == found


def test_story_4_sort_by_a_field_and_back(opened: Opened) -> None:
    loss = opened.page.get_by_role("button", name="Loss")
    loss.click()
    first = names(opened.page)
    expect(opened.page.locator('th[aria-sort="ascending"]')).to_have_text("Loss")
    loss.click()
    assert names(opened.page) == first[::-1]


def test_story_5_see_only_failed_runs_and_why(opened: Opened) -> None:
    opened.page.get_by_role("button", name="failed").click()
    assert names(opened.page) == ["digits-failed"]
    expect(opened.page.locator(".runs tbody")).to_contain_text("out of memory on n2")


def test_a_run_is_found_by_its_tags_and_its_settings(opened: Opened, runs: Path) -> None:
    page = opened.page
    page.get_by_label("Select digits-sync").check()
    page.get_by_label("Select digits-simulated").check()
    page.get_by_role("button", name="Tag").click()
    page.get_by_label("Tags, separated by commas").fill("paper, v2")
    page.get_by_role("button", name="Save").click()
    expect(page.locator(".runs .tag")).to_have_text(["paper", "v2"] * 2)
    page.get_by_label("Filter runs").fill("tag:paper")
    assert sorted(names(page)) == ["digits-simulated", "digits-sync"]
    page.get_by_label("Select digits-simulated").uncheck()
    page.get_by_role("button", name="Tag").click()
    field = page.get_by_label("Tags, separated by commas")
    expect(field).to_have_value("paper, v2")
    field.fill("v2")
    field.press("Enter")
    expect(field).to_be_hidden()
    expect(page.locator(".runs tbody tr")).to_have_count(1)
    assert json.loads((runs / "digits-sync" / "tags.json").read_text()) == ["v2"]
    page.get_by_label("Filter runs").fill("lr<0.2")
    expect(page.locator(".runs tbody tr")).to_have_count(1)
    assert names(page) == ["digits-failed"]
    page.get_by_label("Filter runs").fill("")
    page.get_by_label("Sort by").select_option("lr")
    assert names(page)[:2] == ["digits-failed", "digits-async"]


def test_story_6_a_new_run_appears_without_a_reload(opened: Opened, runs: Path) -> None:
    write_run(runs / "digits-new", state="running")
    expect(opened.page.get_by_role("link", name="digits-new")).to_be_visible()


def test_story_7_delete_a_run_after_a_question(opened: Opened, runs: Path) -> None:
    page = opened.page
    page.get_by_label("Select digits-failed").check()
    page.get_by_role("toolbar").get_by_role("button", name="Delete").click()
    expect(page.locator("dialog")).to_contain_text("cannot be undone")
    page.get_by_role("button", name="Cancel").click()
    assert (runs / "digits-failed").exists()
    page.get_by_role("toolbar").get_by_role("button", name="Delete").click()
    page.locator("dialog").get_by_role("button", name="Delete").click()
    expect(page.get_by_role("link", name="digits-failed")).to_have_count(0)
    assert not (runs / "digits-failed").exists()


def test_story_8_a_running_run_stays(opened: Opened, runs: Path) -> None:
    page = opened.page
    page.get_by_label("Select digits-async").check()
    page.get_by_role("toolbar").get_by_role("button", name="Archive").click()
    page.locator("dialog").get_by_role("button", name="Archive").click()
    expect(page.locator("#toast")).to_contain_text("stop that run first")
    assert (runs / "digits-async").exists()


# ---------------------------------------------------------------- one run


def test_story_9_open_a_run_and_go_back(opened: Opened) -> None:
    page = opened.page
    page.get_by_role("link", name="digits-sync").click()
    expect(page.get_by_role("heading", level=1)).to_have_text("digits-sync")
    expect(page.locator(".tiles")).to_contain_text("97.0 %")
    page.go_back()
    expect(page.get_by_role("heading", level=1)).to_have_text("Runs")


def test_story_10_draw_curves_against_steps_epochs_and_bytes(opened: Opened) -> None:
    page = opened.at_run("digits-sync")
    for axis in ("steps", "epochs", "bytes sent per rank"):
        page.get_by_role("button", name=axis).click()
        expect(page.get_by_role("button", name=axis)).to_have_attribute("aria-pressed", "true")
    assert page.locator(".chart h3").all_inner_texts() == ["Loss", "Accuracy", "Samples per second", "perplexity"]


def test_story_11_read_a_value_by_pointer_and_by_keys(opened: Opened) -> None:
    page = opened.at_run("digits-sync")
    loss = page.locator(".chart canvas.plot").first
    loss.hover(position={"x": 300, "y": 100})
    expect(page.locator(".tip").first).to_contain_text("training")
    loss.focus()
    page.keyboard.press("Home")
    first = page.locator(".tip").first.inner_text()
    page.keyboard.press("ArrowRight")
    assert page.locator(".tip").first.inner_text() != first


def test_story_12_zoom_into_a_part_and_out_again(opened: Opened) -> None:
    page = opened.at_run("digits-sync")
    box = page.locator(".chart canvas.plot").first.bounding_box()
    assert box is not None
    page.mouse.move(box["x"] + 200, box["y"] + 100)
    page.mouse.down()
    page.mouse.move(box["x"] + 320, box["y"] + 100)
    page.mouse.up()
    whole = page.get_by_role("button", name="all", exact=True)
    expect(whole.first).to_be_visible()
    whole.first.click()
    expect(whole.first).to_be_hidden()


def test_story_13_curves_grow_while_the_run_goes_on(opened: Opened, runs: Path) -> None:
    page = opened.at_run("digits-async")
    expect(page.get_by_text("66 rows")).to_be_visible()
    with (runs / "digits-async" / "metrics.jsonl").open("a") as stream:
        stream.write(json.dumps({"kind": "train", "step": 61, "loss": 0.01, "seconds": 0.61}) + "\n")
    expect(page.get_by_text("67 rows")).to_be_visible()


def test_story_14_see_which_worker_waits_and_what_happened(opened: Opened) -> None:
    page = opened.at_run("digits-async")
    expect(page.get_by_label("Workers and servers")).to_contain_text("25.0 %")
    events = page.get_by_label("Events")
    for text in ("was killed by SIGKILL; started again", "checkpoint at step 20", "worker-1 is 31 % slower", "group 2"):
        expect(events).to_contain_text(text)
    expect(page.get_by_role("region", name="Timeline")).to_be_visible()


def test_the_last_rows_stand_for_a_timeline_until_there_is_one(opened: Opened, runs: Path) -> None:
    shutil.rmtree(runs / "digits-async" / TAILS)
    page = opened.at_run("digits-async")
    expect(page.get_by_role("region", name="Last rows of each worker")).to_be_visible()
    for rank in range(2):
        write_tail(runs / "digits-async", rank, [event for event in trace(2) if event.rank == rank])
    timeline = page.get_by_role("region", name="Timeline")
    expect(timeline).to_be_visible()
    expect(page.locator(".topology path")).to_have_count(2)
    timeline.focus()
    later = [each._replace(step=each.step + 8, start_s=each.start_s + 1, end_s=each.end_s + 1) for each in trace(2)]
    for rank in range(2):
        write_tail(runs / "digits-async", rank, [event for event in later if event.rank == rank])
    expect(page.get_by_text("Steps 12 to 15")).to_be_visible()
    expect(timeline).to_be_focused()


def test_story_15_search_a_log(opened: Opened) -> None:
    page = opened.at_run("digits-sync")
    page.get_by_label("Search this log").fill("LOSS")
    expect(page.get_by_text("2 lines found")).to_be_visible()
    assert page.locator(".log mark").all_inner_texts() == ["loss", "loss"]


def test_story_16_see_the_timeline_the_topology_and_the_prediction(opened: Opened) -> None:
    page = opened.at_run("digits-sync")
    expect(page.locator(".timeline rect").first).to_be_visible()
    expect(page.locator(".topology path")).to_have_count(2)
    predicted = page.get_by_label("Predicted beside measured")
    expect(predicted).to_contain_text("median step")
    expect(predicted).to_contain_text("+20.0 %")


def test_story_17_copy_the_command_and_open_the_report(opened: Opened) -> None:
    page = opened.at_run("digits-sync")
    expect(page.get_by_label("Command")).to_contain_text("polytempo train digits --strategy")
    with page.context.expect_page() as opening:
        page.get_by_role("link", name="Report").click()
    report = opening.value
    report.wait_for_selector("html[data-drawn]", state="attached")
    assert "sync_sgd" in report.title()
    assert report.evaluate("origin") == "null"


# ---------------------------------------------------------------- several runs, other readers


def test_story_18_compare_runs_and_their_settings(opened: Opened) -> None:
    page = opened.page
    for name in ("digits-sync", "digits-simulated"):
        page.get_by_label(f"Select {name}").check()
    page.get_by_role("button", name="Compare").click()
    expect(page.get_by_label("Settings that differ").locator("mark").first).to_be_visible()
    assert page.get_by_label("Settings that differ").locator("tbody th").all_inner_texts() == ["world", "seed"]
    button = page.get_by_label("Runs", exact=True).get_by_role("button").first
    button.click()
    expect(button).to_have_attribute("aria-pressed", "false")


def test_story_19_a_phone_in_the_dark_and_a_wide_screen_show_all_without_scrolling_aside(
    browser: Browser, served: Served
) -> None:
    for width, scheme in ((400, "dark"), (2000, "light")):
        view = Opened(browser, served, width, scheme)
        for address in ("#/", "#/run/digits-async", "#/run/digits-sync", "#/compare?run=digits-sync&run=digits-async"):
            page = view.at(address)
            assert page.evaluate("document.documentElement.dataset.mode") == scheme
            assert page.evaluate("document.documentElement.scrollWidth - innerWidth") <= 0, address
            kept(page, f"story_19-{width}-{scheme}-{re.sub(r'[^a-z]+', '-', address)}")
            if address == "#/run/digits-async":
                page.wait_for_selector(".timeline .label")
                assert page.evaluate(TOO_WIDE) == []
                assert page.evaluate(LABEL_HEIGHT) <= 24
        view.page.context.close()
        assert view.complaints == []


def test_story_20_everything_works_by_keyboard(opened: Opened) -> None:
    page = opened.page
    page.keyboard.press("/")
    page.keyboard.type("sync")
    page.get_by_role("link", name="digits-sync").focus()
    page.keyboard.press("Enter")
    expect(page.get_by_role("heading", level=1)).to_have_text("digits-sync")
    page.keyboard.press("g")
    expect(page.get_by_role("heading", level=1)).to_have_text("Runs")
    page.keyboard.press("?")
    expect(page.locator("dialog")).to_be_visible()
    page.keyboard.press("Escape")
    expect(page.locator("dialog")).to_be_hidden()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_nothing_serious(browser: Browser, served: Served, scheme: str) -> None:
    view = Opened(browser, served, 1280, scheme)
    for address in ("#/", "#/run/digits-async", "#/run/digits-sync", "#/compare?run=digits-sync&run=digits-async"):
        page = view.at(address)
        page.wait_for_selector("table")
        found = Axe().run(page).response["violations"]
        serious = [(each["id"], [node["html"] for node in each["nodes"]][:3]) for each in found]
        assert serious == [], address
    view.page.context.close()


def test_hostile_runs_run_no_script(browser: Browser, tmp_path: Path) -> None:
    """Names, logs, workers, reasons, strategies, the user's numbers: all of them are text."""
    root = tmp_path / "runs"
    named = root / HOSTILE.replace("</script>", "")
    folder = write_run(named, job=HOSTILE, strategy=HOSTILE, log=HOSTILE, why=HOSTILE, who=HOSTILE, state="failed")
    write_run(root / "other", job=HOSTILE, strategy=HOSTILE, who=HOSTILE, log=HOSTILE)
    with (folder / "events.jsonl").open("a") as stream:
        stream.write(json.dumps({"kind": "log", "step": 1, "values": {HOSTILE: 1.0}}) + "\n")
        stream.write(json.dumps({"kind": "text", "step": 1, "name": HOSTILE, "text": HOSTILE}) + "\n")
    with serving(root) as served:
        view = Opened(browser, served)
        page = view.page
        page.locator(".runs input[type=checkbox]").nth(1).check()
        page.locator(".runs input[type=checkbox]").nth(2).check()
        page.get_by_role("button", name="Compare").click()
        expect(page.locator("mark").first).to_be_visible()
        view.at("#/")
        for number in range(2):
            page.locator(".runs tbody th a").nth(number).click()
            page.wait_for_selector(".log div")
            page.wait_for_selector(".chart canvas")
            assert page.locator("main img, main script").count() == 0
            assert "hostile" not in re.sub(r"<.*", "", page.title())
            page.go_back()
            view.drawn()
        page.context.close()
        assert view.complaints == []
