"""Callbacks as text, and the refusals of runs that cannot have them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import polytempo as pt
from polytempo.spec.callbacks.callback import CallbackFacts, Control
from polytempo.spec.callbacks.reading import callbacks_of
from polytempo.spec.text.call import split

TEXTS = {
    "early_stop": "early_stop(metric='loss', patience=3, min_change=0.0, better=auto)",
    "early_stop('f1', 5, 0.01, more)": "early_stop(metric='f1', patience=5, min_change=0.01, better=more)",
    "time_budget(3600)": "time_budget(3600.0)",
    "export(every=2)": "export(best=1, every=2, metric='loss', better=auto, to='exports/step-{step}.safetensors')",
    "keep(best=2, last=1)": "keep(best=2, last=1, metric='loss', better=auto)",
}


@pytest.mark.parametrize("text", TEXTS)
def test_a_callback_is_made_by_its_own_text(text: str) -> None:
    assert str(callbacks_of(text)) == TEXTS[text]
    assert str(callbacks_of(TEXTS[text])) == TEXTS[text]
    options = pt.RunOptions(callbacks=[text], out=Path("x"))
    assert pt.RunOptions(**options.as_plain()).as_plain() == options.as_plain()  # type: ignore[arg-type]


def test_several_callbacks_are_one_text() -> None:
    assert split("early_stop(metric='a,b'), keep(best=2, last=1) , x:Y") == [
        "early_stop(metric='a,b')",
        "keep(best=2, last=1)",
        "x:Y",
    ]


def test_callbacks_of_ones_own_are_found_by_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = """
from polytempo.callbacks import Callback

class Mine(Callback):
    def __init__(self, limit: int = 3) -> None:
        self.limit = limit
"""
    (tmp_path / "own_callbacks.py").write_text(code, encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    [mine] = callbacks_of("own_callbacks:Mine(limit=7)")
    assert vars(mine) == {"limit": 7, "text": "own_callbacks:Mine(limit=7)"}


MISTAKES: dict[str, tuple[Any, str]] = {
    "an unknown name": ("early_stopp", "did you mean early_stop"),
    "a wrong argument": ("early_stop(patient=3)", "patient"),
    "no patience": ("early_stop(patience=0)", "at least 1"),
    "no direction": ("early_stop(better=less_is_more)", "less, more or auto"),
    "no time": ("time_budget(0)", "above 0"),
    "nothing to keep": ("keep(best=0)", "one is above 0"),
    "nothing to export": ("export(best=0)", "one is above 0"),
    "one name for all files": ("export(to='best.safetensors')", "must have {step} in it"),
    "fewer than nothing to export": ("export(best=-1, every=2)", "one is above 0"),
    "no direction of an export": ("export(better=lower)", "less, more or auto"),
    "no direction of each n-th export": ("export(best=0, every=2, better=lower)", "less, more or auto"),
    "a width that is no field": ("export(to='{step:>{width}}.safetensors')", "KeyError"),
    "a field without a name": ("export(to='{}-{step}.safetensors')", "IndexError"),
    "a field of another type": ("export(to='{step}-{accuracy:d}.safetensors')", "ValueError"),
    "two exports to one place": ("export(metric=accuracy), keep(), export(every=2)", "PT2310"),
    "no module": ("nowhere_at_all:Mine", "no module nowhere_at_all"),
    "nothing in a module": ("json:Mine", "has no Mine"),
    "no callback": ("json:dumps(3)", "not a pt.callbacks.Callback"),
    "a function": ([print], "is not a callback"),
    "a number": (3, "list of callbacks"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_in_callbacks_name_the_remedy(mistake: str) -> None:
    given, named = MISTAKES[mistake]
    with pytest.raises(ValueError, match=r"callbacks=") as caught:
        pt.RunOptions(callbacks=given)
    assert named in str(caught.value)


REFUSED: dict[str, tuple[str, dict[str, Any]]] = {
    "PT2301": ("sync_sgd", {}),
    "PT2302": ("downpour", {"out": Path("x")}),
    "PT2303": ("sync_sgd", {"out": "s3://bucket/run"}),
}


@pytest.mark.parametrize("callback", ["keep(best=1)", "export(best=1)"])
@pytest.mark.parametrize("code", REFUSED)
def test_runs_without_checkpoints_in_a_folder_cannot_keep_or_export_them(code: str, callback: str) -> None:
    strategy, options = REFUSED[code]
    with pytest.raises(pt.errors.Incompatible) as caught:
        pt.simulate("digits", strategy, 2, callbacks=callback, **options)
    assert caught.value.code == code


VALUES = [0.9, 0.8, 0.85, 0.79, float("nan"), 0.7905, 0.70, 0.7, 0.7]
"""Losses of evaluations; with min_change=0.05 the best ones are 0.9, 0.8 and 0.7."""


def test_early_stopping_is_a_literal_table() -> None:
    stop = pt.callbacks.early_stop(patience=4, min_change=0.05)
    stop.on_start(CallbackFacts())
    asked, restored = [], pt.callbacks.early_stop(patience=4, min_change=0.05)
    for step, value in enumerate(VALUES):
        restored.load_state_dict(stop.state_dict())
        facts = CallbackFacts(step=step, values={"loss": value})
        asked.append(stop.on_evaluation(facts).stop)
        assert restored.on_evaluation(facts) == Control(stop=asked[-1])
    assert asked == [False, False, False, False, False, True, False, False, False]
    assert (stop.best, stop.best_step, stop.waited) == (0.7, 6, 2)
    with pytest.raises(ValueError, match="it has loss"):
        pt.callbacks.early_stop("f1").on_evaluation(CallbackFacts(values={"loss": 1.0}))
