"""A run's output while it goes on: lines or a bar, and the time left."""

from __future__ import annotations

import io
from typing import Any

import pytest

from polytempo.report.status.progress import Forecast, Progress, status_line, time_left


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_plain_lines_come_now_and_then_and_the_last_one_always() -> None:
    stream, now = io.StringIO(), [0.0]
    with Progress(stream, lambda: now[0]) as progress:
        progress.start(440, "ring")
        for step, at in ((1, 1.0), (2, 2.9), (3, 3.0), (4, 3.1), (5, 4.0)):
            now[0] = at
            progress.update(step, loss=0.5, accuracy=None, samples_per_s=None)
        progress.note("checkpoint saved")
        progress.update(6, loss=0.25, accuracy=0.97, samples_per_s=38_200.0)
    assert stream.getvalue().splitlines() == [
        "ring: started",
        "ring: step 3/440, loss 0.5, about 7 min 17 s left",
        "checkpoint saved",
        "ring: step 6/440, loss 0.25, accuracy 97.0 %, 38,200 samples/s",
    ]


def test_one_progress_shows_several_runs() -> None:
    stream = io.StringIO()
    progress = Progress(stream, lambda: 0.0)
    for name in ("a", "b"):
        progress.start(None, name)
        progress.update(1_000, None, None, None)
    progress.finish()
    progress.finish()
    assert stream.getvalue().splitlines() == ["a: started", "a: step 1,000", "b: started", "b: step 1,000"]


def test_a_terminal_gets_a_bar_and_standard_output_stays_clean(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERM", "xterm")
    stream = Terminal()
    with Progress(stream) as progress:
        progress.start(10, "top_k(ratio=[0.1])")
        progress.update(10, 0.5, 0.9, 100.0)
        print("a result")
        progress.note("saved [bold]")
    assert capsys.readouterr() == ("a result\n", "")
    for text in ("top_k(ratio=[0.1])", "step 10/10", "saved [bold]", "\x1b["):
        assert text in stream.getvalue()


def test_a_dumb_terminal_gets_plain_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "dumb")
    stream = Terminal()
    with Progress(stream) as progress:
        progress.start(1, "ring")
    assert stream.getvalue() == "ring: started\n"


def test_the_default_is_standard_error(capsys: pytest.CaptureFixture[str]) -> None:
    with Progress() as progress:
        progress.start(1, "ring")
    assert capsys.readouterr() == ("", "ring: started\n")


def test_a_moment_in_words() -> None:
    words = "step 120/440, loss 0.2134, accuracy 95.1 %, 38,200 samples/s"
    assert status_line(120, 440, 0.2134, 0.951, 38_200.4) == words
    assert time_left(75.2) == "about 75 s left"
    assert time_left(0.2, at_most=True) == "at most 1 s left"
    assert status_line(1200, None, None, None, None) == "step 1,200"


def lines_of_a_run(reports: list[tuple[float, int, float]], **options: Any) -> list[str]:
    """The output of a run that reports (second, step, epoch)."""
    stream, now = io.StringIO(), [0.0]
    with Progress(stream, lambda: now[0]) as progress:
        progress.start(None, "ring", **options)
        for now[0], step, epoch in reports:
            progress.update(step, None, None, None, epoch=epoch)
    return stream.getvalue().splitlines()[1:]


def test_epochs_say_when_a_run_ends_where_steps_do_not() -> None:
    reports = [(3.0, 10, 1.0), (6.0, 20, 2.0), (9.0, 30, 3.0)]
    assert lines_of_a_run(reports) == ["ring: step 10", "ring: step 20", "ring: step 30"]
    assert lines_of_a_run(reports, total_epochs=5.0) == [
        "ring: step 10",
        "ring: step 20, about 9 s left",
        "ring: step 30, about 6 s left",
    ]
    assert lines_of_a_run(reports, total_epochs=5.0, at_most=True)[-1] == "ring: step 30, at most 6 s left"
    assert lines_of_a_run([*reports, (12.0, 50, 5.0)], total_epochs=5.0)[-1] == "ring: step 50", "nothing is left"


def test_the_runs_of_a_comparison_are_counted_and_those_to_come_take_their_time() -> None:
    stream, now = io.StringIO(), [0.0]
    progress = Progress(stream, lambda: now[0], num_runs=3)
    for name in ("a", "b"):
        progress.start(100, name)
        begin = now[0]
        for seconds, step in ((2.0, 0), (7.0, 50), (12.0, 100)):
            now[0] = begin + seconds
            progress.update(step, None, None, None)
    assert stream.getvalue().splitlines() == [
        "[1/3] a: started",
        "[1/3] a: step 50/100, about 29 s left",
        "[1/3] a: step 100/100, about 24 s left",
        "[2/3] b: started",
        "[2/3] b: step 50/100, about 17 s left",
        "[2/3] b: step 100/100, about 12 s left",
    ]


@pytest.mark.parametrize(
    ("reports", "left_s"),
    [
        ([(0.0, 0.0), (10.0, 0.25)], 30.0),
        ([(10.0, 0.0), (20.0, 0.25)], 30.0),  # the steps before the first report are not counted
        ([(0.0, 0.5), (10.0, 0.75)], 10.0),  # a resumed run
        ([(0.0, 0.0), (10.0, 0.5), (20.0, 0.4)], 20.0),  # two workers report out of order
        ([(0.0, 0.0), (0.5, 0.5)], None),  # too early
        ([(0.0, 0.0)], None),
        ([(0.0, 0.5), (10.0, 0.5)], None),  # it stands still
        ([(0.0, 0.0), (10.0, 1.0)], None),
    ],
)
def test_the_time_that_is_left(reports: list[tuple[float, float]], left_s: float | None) -> None:
    forecast = Forecast()
    forecast.begin(0.0)
    assert [forecast.left_s(done, now_s) for now_s, done in reports][-1] == left_s
