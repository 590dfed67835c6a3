"""`result.model()` and `result.history`: the trained model as a plain module, and the rows of a run as a table."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import polytempo as pt
from polytempo.spec.run_options import parse_until

STEPS = 8


@pytest.mark.parametrize("strategy", ["local_sgd(period=5)", "gpipe(stages=2)", "downpour(shards=2)"])
def test_a_result_gives_its_model_and_its_rows(strategy: str, tmp_path: Path) -> None:
    found = pt.simulate("digits", strategy, workers=2, steps=STEPS, checkpoint_every=STEPS, eval_every=4, out=tmp_path)
    model = found.model()
    assert isinstance(model, nn.Sequential)
    assert not model.training
    assert {parameter.device.type for parameter in model.parameters()} == {"cpu"}
    with torch.no_grad():
        x, y = pt.data.digits().test.tensors
        assert float((model(x).argmax(1) == y).float().mean()) == pytest.approx(found.accuracy)
    rows = found.history
    assert rows == pt.training.history(tmp_path)
    tests = rows.of("test")
    assert tests.column("step")[-1] == found.steps
    assert tests.column("accuracy")[-1] == found.accuracy
    assert found.history.names[:2] == ["kind", "step"]
    with pytest.raises(ValueError, match="no row has 'f1'; there are: kind, step"):
        rows.column("f1")
    shown = rows._repr_html_()
    assert "<script" not in shown
    assert shown.count("<tr") == 1 + len(rows)
    same = pt.training.trained_model(pt.jobs.find("digits"), tmp_path).model.state_dict()
    assert all(torch.equal(value, same[name]) for name, value in model.state_dict().items())


def test_a_result_without_a_folder_says_what_to_give() -> None:
    found = pt.simulate("digits", "sync_sgd", workers=2, steps=2)
    for ask in (found.model, lambda: found.history):
        with pytest.raises(ValueError, match=r"has left no folder .* give out="):
            ask()


def test_a_simulation_without_a_checkpoint_has_rows_alone(tmp_path: Path) -> None:
    found = pt.simulate("digits", "sync_sgd", workers=2, steps=2, out=tmp_path)
    assert len(found.history) > 0
    with pytest.raises(ValueError, match="there is no checkpoint"):
        found.model()


def test_a_folder_without_rows_is_one_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="name the folder of a run"):
        pt.training.history(tmp_path)


@pytest.mark.parametrize(
    ("text", "expected"),
    [("accuracy>=0.9", {"accuracy": 0.9}), ("loss <= 0.1, f1 >= 0.5", {"loss": 0.1, "f1": 0.5})],
)
def test_goals_are_written_with_signs_too(text: str, expected: dict[str, float]) -> None:
    assert parse_until(text) == expected


@pytest.mark.parametrize("text", ["accuracy<=0.9", "loss>=0.1", ">=0.9", "accuracy>0.9"])
def test_a_sign_must_suit_the_goal(text: str) -> None:
    with pytest.raises(ValueError, match=r"is written|must be written"):
        parse_until(text)
