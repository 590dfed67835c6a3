"""The user's own numbers, texts and pictures: what is written, bounded and refused, without a run around it."""

from __future__ import annotations

import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import polytempo as pt
from polytempo.report.status.records import MOST_TEXT
from polytempo.training.observe.png import png
from polytempo.training.observe.user_log import UserLog, set_user_log

Rows = list[dict[str, Any]]


@pytest.fixture
def rows(tmp_path: Path) -> Iterator[Rows]:
    """The rows of `pt.log`, of a run that has done 7 steps."""
    found: Rows = []
    set_user_log(UserLog(found.append, tmp_path, lambda: 7))
    yield found
    set_user_log(None)


@pytest.mark.parametrize(
    ("value", "written"),
    [
        (3, 3.0),
        (0.25, 0.25),
        (True, 1.0),
        (torch.tensor(0.5), 0.5),
        (torch.tensor([[2]], dtype=torch.int8), 2.0),
        (torch.tensor(0.5, requires_grad=True), 0.5),
        (np.float32(1.5), 1.5),
        (np.array([4]), 4.0),
    ],
    ids=str,
)
def test_numbers_are_written_as_floats(value: Any, written: float, rows: Rows) -> None:
    pt.log({"val/loss": value}, step=3)
    pt.log(own=value)
    assert rows == [
        {"kind": "log", "step": 3, "values": {"val/loss": written}},
        {"kind": "log", "step": 7, "values": {"own": written}},
    ]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), torch.tensor(float("nan")), 10**400])
def test_a_number_that_is_not_finite_is_left_out_with_one_note(
    value: Any, rows: Rows, capsys: pytest.CaptureFixture[str]
) -> None:
    pt.log(perplexity=value, loss=1.0)
    pt.log(perplexity=value)
    assert rows == [{"kind": "log", "step": 7, "values": {"loss": 1.0}}]
    assert capsys.readouterr().err.count("note: perplexity is") == 1


@pytest.mark.parametrize(
    ("value", "match"),
    [
        ("high", "a text to log_text"),
        (None, "a NoneType is not a number"),
        ([1.0], "a list is not a number"),
        (1j, "a complex is not a number"),
        (torch.ones(3), r"3 elements, and one number is logged; write own\.mean\(\)"),
        (np.ones(0), "0 elements"),
    ],
    ids=str,
)
def test_values_of_other_types_are_refused(value: Any, match: str, rows: Rows) -> None:
    with pytest.raises(TypeError, match=match):
        pt.log(own=value)
    assert rows == []


@pytest.mark.parametrize("name", ["", "<script>alert(1)</script>", "a\x1b[31m", "a\nb", "x" * 201, "a&b", "'"])
def test_names_with_markup_are_refused(name: str, rows: Rows) -> None:
    for call in (
        lambda: pt.log({name: 1.0}),
        lambda: pt.training.log_text(name, "text"),
        lambda: pt.training.log_image(name, torch.zeros(2, 2)),
    ):
        with pytest.raises(ValueError, match="a name has 1 to 200 letters"):
            call()
    assert rows == []


@pytest.mark.parametrize("step", [-1, 1.5, True, 2**53])
def test_a_step_is_a_count(step: Any, rows: Rows) -> None:
    with pytest.raises(ValueError, match="a step is an int from 0"):
        pt.log(own=1.0, step=step)
    assert rows == []


def test_a_huge_text_is_cut(rows: Rows) -> None:
    pt.training.log_text("sample", "é\ud800" + "x" * MOST_TEXT)
    [row] = rows
    assert (row["kind"], row["text"][:3]) == ("text", "é?x")
    assert row["text"].endswith(" … (2 more characters)")
    with pytest.raises(TypeError, match=r"a text is a str.* write str"):
        pt.training.log_text("sample", 3)  # type: ignore[arg-type]


def test_the_name_of_rounds_is_the_library_s(rows: Rows) -> None:
    with pytest.raises(ValueError, match=r"clients/round is the text that the library writes.*take another name"):
        pt.training.log_text("clients/round", "round 0 of 10000000 clients: ")
    assert rows == []


PICTURES: dict[str, tuple[Any, list[Any]]] = {
    "gray": (torch.tensor([[0, 255, 7]], dtype=torch.uint8), [[0, 255, 7]]),
    "floats": (np.array([[0.0, 1.0], [0.5, 2.0], [np.nan, -1.0]]), [[0, 255], [128, 255], [0, 0]]),
    "colours": (torch.tensor([[[1, 2, 3], [4, 5, 6]]], dtype=torch.uint8), [[[1, 2, 3], [4, 5, 6]]]),
}


@pytest.mark.parametrize("kind", PICTURES)
def test_a_picture_is_a_png_file_that_pillow_reads(kind: str, rows: Rows, tmp_path: Path) -> None:
    picture, pixels = PICTURES[kind]
    pt.training.log_image(f"{kind}/0", picture)
    [row] = rows
    assert (row["kind"], row["name"], row["step"]) == ("image", f"{kind}/0", 7)
    assert np.asarray(Image.open(tmp_path / row["path"])).tolist() == pixels


def test_a_large_picture_comes_back() -> None:
    picture = torch.randint(256, (61, 67, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    assert np.array_equal(np.asarray(Image.open(io.BytesIO(png(picture)))), picture.numpy())


@pytest.mark.parametrize(
    ("picture", "error", "match"),
    [
        (torch.zeros(3), ValueError, r"shape \(3,\), not \(height, width\)"),
        (torch.zeros(3, 5, 7), ValueError, r"write image\.permute\(1, 2, 0\)"),
        (torch.zeros(0, 5), ValueError, "shape"),
        (torch.zeros(1, 1).expand(5000, 5000), ValueError, "16,777,216 pixels"),
        (torch.zeros(2, 2, dtype=torch.int64), TypeError, "give uint8"),
        ("cat.png", TypeError, "a str is not a picture"),
    ],
    ids=["line", "channels first", "empty", "huge", "ints", "path"],
)
def test_other_pictures_are_refused(picture: Any, error: type[Exception], match: str, rows: Rows) -> None:
    with pytest.raises(error, match=match):
        pt.training.log_image("picture", picture)
    assert rows == []


def test_names_of_pictures_do_not_leave_their_folder_and_differ(rows: Rows, tmp_path: Path) -> None:
    for name in ("../a", "__/a", "a/../../a"):
        pt.training.log_image(name, torch.zeros(1, 1))
    assert len({row["path"] for row in rows}) == 3
    assert {path.parent for path in tmp_path.rglob("*.png")} == {tmp_path / "images"}


def test_outside_of_a_run_values_are_checked_and_dropped() -> None:
    """Evaluations, rehearsals and other commands call a job's functions, too."""
    pt.log(own=1.0)
    pt.training.log_image("picture", torch.zeros(2, 2))
    with pytest.raises(TypeError, match="a str is not a number"):
        pt.log(own="1.0")
