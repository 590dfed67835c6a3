"""Axes of curves, and the colors of both modes: all marks are visible."""

from __future__ import annotations

import gzip
import hashlib
from importlib.resources import files
from pathlib import Path

import pytest

from polytempo.report.pages.document import PLOTLY
from polytempo.report.pictures.figure import axes_of
from polytempo.report.pictures.style import (
    BACKDROP,
    COLORS,
    COMMUNICATION_COLORS,
    COMPUTE_COLORS,
    DARK,
    INK,
    PAPER,
    QUIET,
    css,
    css_variables,
)

GOOD = [(float(x), 0.90 + 0.01 * x) for x in range(1, 9)]
BAD = [(float(x), 0.10 + 0.01 * x) for x in range(1, 9)]
LONG = [(30 * x, y) for x, y in GOOD]


def test_one_bad_strategy_does_not_press_six_curves_together() -> None:
    axes = axes_of([GOOD, GOOD, BAD, GOOD, GOOD, GOOD, GOOD], "accuracy")
    assert axes.y == pytest.approx((0.92 - 0.06 * 0.06, 0.98 + 0.06 * 0.06))
    assert axes.beyond == [2]


def test_of_two_curves_both_are_seen() -> None:
    axes = axes_of([GOOD, BAD], "accuracy")
    assert axes.y[0] <= 0.12
    assert axes.beyond == []


def test_a_curve_that_is_a_little_lower_is_seen() -> None:
    lower = [(x, y - 0.03) for x, y in GOOD]
    axes = axes_of([GOOD, GOOD, lower], "accuracy")
    assert axes.beyond == []
    assert axes.y[0] < lower[1][1]


def test_one_slow_strategy_does_not_press_the_others_to_the_left() -> None:
    axes = axes_of([GOOD, GOOD, LONG], "accuracy")
    assert axes.x == pytest.approx((0, 8 * 1.03))
    assert axes.beyond == [2]
    assert axes_of([GOOD, LONG], "accuracy").x == pytest.approx((0, 240 * 1.03))


def test_a_loss_that_grows_without_bound_leaves_the_axis_above() -> None:
    falling = [(float(x), 2.0 / x) for x in range(1, 41)]
    growing = [(float(x), 2.0 * 10.0**x) for x in range(1, 41)]
    axes = axes_of([falling, falling, growing], "loss")
    assert axes.log
    low, high = axes.y
    assert 10**low < 2.0 / 40
    assert 2 < 10**high < 3, "the first loss is on the axis"
    assert axes.beyond == [2]


def test_a_loss_may_be_negative_or_constant() -> None:
    assert not axes_of([[(1.0, -1.0), (2.0, -500.0)]], "loss").log
    constant = axes_of([[(1.0, 0.5), (2.0, 0.5)], []], "loss")
    assert constant.y[0] < 0.5 < constant.y[1]
    assert constant.beyond == []


def contrast(one: str, other: str) -> float:
    """WCAG's ratio of the luminances of two colors, from 1 to 21."""
    lighter, darker = sorted((luminance(one), luminance(other)), reverse=True)
    return (lighter + 0.05) / (darker + 0.05)


def luminance(color: str) -> float:
    parts = [int(color[start : start + 2], 16) / 255 for start in (1, 3, 5)]
    red, green, blue = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


@pytest.mark.parametrize("paper", [PAPER, BACKDROP])
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_text_and_lines_stand_out_from_the_page_in_both_modes(paper: str, dark: bool) -> None:
    def mode(color: str) -> str:
        return DARK[color] if dark else color

    assert contrast("#000000", "#FFFFFF") == pytest.approx(21)
    for color in (INK, QUIET):
        assert contrast(mode(color), mode(paper)) >= 4.5, f"text in {mode(color)}"
    for color in COLORS:
        assert contrast(mode(color), mode(paper)) >= 3, f"a line in {mode(color)}"


def test_every_color_has_its_partner_and_its_variable() -> None:
    assert {*COLORS, *COMPUTE_COLORS, *COMMUNICATION_COLORS.values()} <= set(DARK)
    assert len({DARK[color] for color in COLORS}) == len(COLORS)
    assert css("#0072B2") == "var(--c0072b2)"
    assert css_variables().count("--c0072b2:") == 3


def test_the_plotting_library_is_the_published_one() -> None:
    packed = files("polytempo.report").joinpath(PLOTLY).read_bytes()
    notice = (Path(__file__).parents[2] / "NOTICE").read_text(encoding="utf-8")
    assert hashlib.sha256(gzip.decompress(packed)).hexdigest() in notice
