"""Tables of results in a notebook, and the view of a run that goes on. No kernel is needed here."""

from __future__ import annotations

import re
import sys
from dataclasses import replace
from html.parser import HTMLParser
from types import SimpleNamespace

import pytest

import polytempo as pt
from polytempo.report.status import notebook_view
from polytempo.report.status.notebook_view import MOST_POINTS, NotebookView
from polytempo.report.status.progress import Progress, shown_progress
from polytempo.spec.result import Results

HOSTILE = '<script>alert("1")</script>'


class Tags(HTMLParser):
    """The tags of a text, in order, and the open tags at its end."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.seen: list[str] = []
        self.open: list[str] = []
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self.seen.append(tag)
        self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: object) -> None:
        self.seen.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def harmless(html: str) -> str:
    """The text, after a look for unclosed tags, scripts, style sheets and addresses."""
    tags = Tags(html)
    assert not tags.open
    assert not {"script", "style", "link", "img", "iframe"} & set(tags.seen)
    assert not re.search(r"https?:|javascript:|\son\w+=", html)
    return html


@pytest.fixture(scope="module")
def result() -> pt.Result:
    return pt.simulate("digits", "local_sgd(period=8)", 4, epochs=1)


def test_a_result_shows_its_figures(result: pt.Result) -> None:
    html = harmless(result._repr_html_())
    assert "4 virtual workers" in html
    assert f"{100 * (result.accuracy or 0):.1f} %" in html
    assert "12 steps, 1 epochs, 1,437 samples" in html


def test_texts_of_a_result_are_escaped(result: pt.Result) -> None:
    hostile = replace(result, job=HOSTILE, strategy=HOSTILE, report=HOSTILE, diverged=HOSTILE, left=HOSTILE)
    for html in (hostile._repr_html_(), Results([hostile, hostile])._repr_html_()):
        assert "&lt;script&gt;" in harmless(html)


def test_a_result_without_scores_shows_dashes(result: pt.Result) -> None:
    bare = replace(result, accuracy=None, loss=None, parameters_sha256=None, bound=None)
    assert ">-</td>" in harmless(bare._repr_html_())


def test_results_are_a_list_and_one_table(result: pt.Result) -> None:
    results = Results([result, replace(result, strategy="ssp")])
    assert results == [*results]
    assert harmless(results._repr_html_()).count("<tr") == 3
    assert "no results" in harmless(Results()._repr_html_())


class Kernel:
    """IPython as a kernel has it, and the HTML of each display, newest last."""

    def __init__(self) -> None:
        self.displays: list[list[str]] = []
        self.IPython = SimpleNamespace(get_ipython=lambda: SimpleNamespace(kernel=object()))
        self.display = SimpleNamespace(HTML=str, display=self._display)

    def _display(self, html: str, display_id: bool) -> SimpleNamespace:
        shown = [html]
        self.displays.append(shown)
        return SimpleNamespace(update=shown.append)


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Kernel:
    kernel = Kernel()
    monkeypatch.setitem(sys.modules, "IPython", kernel.IPython)
    monkeypatch.setitem(sys.modules, "IPython.display", kernel.display)
    return kernel


def test_a_kernel_shows_a_run_in_one_display(kernel: Kernel, capsys: pytest.CaptureFixture[str]) -> None:
    seconds = iter(range(100))
    with Progress(clock=lambda: float(next(seconds))) as progress:
        progress.start(4, HOSTILE)
        for step in range(1, 5):
            progress.update(step, 2.0 / step, None, 100.0)
        progress.note(HOSTILE)
    (shown,) = kernel.displays
    assert "started" in harmless(shown[0])
    assert "step 4/4" in harmless(shown[-1])
    assert 'aria-valuenow="100"' in shown[-1]
    assert shown[-1].count("&lt;script&gt;") == 2
    assert "<polyline" in shown[-1]
    assert capsys.readouterr() == ("", "")


def test_the_bar_of_a_run_that_has_ended_is_full(kernel: Kernel) -> None:
    progress = Progress(num_runs=2)
    for _ in range(2):
        progress.start(100, "run")
        progress.update(98, 1.0, None, None)
        progress.complete()
        progress.finish()
    assert ['aria-valuenow="100"' in shown[-1] for shown in kernel.displays] == [True, True]


def test_rows_of_several_workers_come_in_any_order(kernel: Kernel) -> None:
    view = NotebookView("run")
    for step in (3, 1, 2, 4):
        view.add(step, float(step), None, "")
    (points,) = re.findall(r'points="([^"]*)"', view.html())
    columns = [float(point.split(",")[0]) for point in points.split()]
    assert columns == [0.0, 160.0, 320.0, 480.0]


def test_a_long_run_keeps_few_points(kernel: Kernel) -> None:
    view = NotebookView("run")
    for step in range(100 * MOST_POINTS):
        view.add(step, 1.0 if step % 7 else float("nan"), None, "")
    assert MOST_POINTS / 4 < view.html().count(",4.0") <= MOST_POINTS


def test_elsewhere_nothing_is_shown_unless_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "IPython", raising=False)
    assert not notebook_view.in_kernel()
    assert shown_progress(None) is None
    terminal = SimpleNamespace(get_ipython=lambda: SimpleNamespace())
    monkeypatch.setitem(sys.modules, "IPython", terminal)  # IPython on a terminal has no kernel
    assert shown_progress(None) is None


@pytest.mark.process
def test_a_kernel_shows_runs_that_have_no_folder_and_changes_no_bit(kernel: Kernel) -> None:
    shown = pt.run("digits", "local_sgd(period=8)", 2, epochs=1)
    assert "<polyline" in harmless(kernel.displays[0][-1])
    kernel.IPython.get_ipython = lambda: None
    unseen = pt.run("digits", "local_sgd(period=8)", 2, epochs=1)
    assert (shown.parameters_sha256, shown.steps) == (unseen.parameters_sha256, unseen.steps)
    assert len(kernel.displays) == 1


def test_a_kernel_changes_no_virtual_time(kernel: Kernel, result: pt.Result) -> None:
    seen = pt.simulate("digits", "local_sgd(period=8)", 4, epochs=1)
    assert kernel.displays
    assert (seen.trace_hash, seen.seconds, seen.parameters_sha256) == (
        result.trace_hash,
        result.seconds,
        result.parameters_sha256,
    )
