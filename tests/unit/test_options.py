"""The options of a run, as an object and as keywords."""

from __future__ import annotations

from inspect import signature
from pathlib import Path
from typing import get_type_hints

import pytest

import polytempo as pt
from polytempo.core.url_path import UrlPath
from polytempo.partition.branches import Threads
from polytempo.spec.batch_growth import BatchGrowth
from polytempo.spec.options import OptionKeywords, with_keywords
from polytempo.spec.precision import Precision


def test_the_keywords_are_those_of_the_object() -> None:
    """By name, in order and by type; some may be given as text, and threads as `pt.threads` answers."""
    fields = get_type_hints(pt.RunOptions)
    keywords = get_type_hints(OptionKeywords)
    assert list(keywords) == list(fields)
    precision = {"precision": Precision | str | None}
    folders = {"data": Path | str | None, "out": Path | UrlPath | str | None}
    texts = folders | precision | {"batch_growth": BatchGrowth | str}
    assert keywords == fields | texts | {"threads": int | Threads | None}


@pytest.mark.parametrize("function", [pt.run, pt.compare, pt.simulate, pt.Trainer.__init__])
def test_editors_and_mypy_know_the_keywords(function: object) -> None:
    assert callable(function)
    assert signature(function).parameters["more"].annotation == "Unpack[OptionKeywords]"


def test_keywords_take_the_place_of_the_options() -> None:
    options = with_keywords(pt.RunOptions(epochs=3, lr=0.5), {"lr": 0.1, "out": "runs/here"})
    assert options == pt.RunOptions(epochs=3, lr=0.1, out=Path("runs/here"))
    assert with_keywords(None, {}) == pt.RunOptions()


def test_a_wrong_keyword_is_refused_with_those_that_there_are() -> None:
    with pytest.raises(ValueError, match=r"there is no option 'epohcs' \(did you mean epochs\?\); there are: epochs, "):
        with_keywords(None, {"epohcs": 3})  # type: ignore[typeddict-unknown-key]


def test_what_a_run_raises_can_be_caught_by_name() -> None:
    """And what only the inside needs is not offered."""
    for name in ("Drifted", "JobFailed", "NotFinite", "PeerLost", "RunTimedOut", "ShardLost", "TimedOut", "WorkerDied"):
        assert issubclass(getattr(pt, name), pt.PolytempoError)
        assert name in dir(pt)
    assert "native" not in pt.__all__
    assert not {"slices", "permutation", "random_rows"} & set(pt.data.__all__)
