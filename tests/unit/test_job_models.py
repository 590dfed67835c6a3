"""Models of job files from `transformers`, with a stand-in for the library."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import polytempo as pt
from command_output import asking
from polytempo.jobs.models import from_transformers

ASKED = {"num_labels": 5, "ignore_mismatched_sizes": True}


class Classifier(nn.Module):
    """Answers as a classifier of `transformers` does."""

    def __init__(self, name: str, outputs: int) -> None:
        super().__init__()
        self.name, self.head = name, nn.Linear(3, outputs)

    def forward(self, *, pixel_values: Tensor) -> Any:
        return SimpleNamespace(logits=self.head(pixel_values.mean((2, 3))))

    def save_pretrained(self, folder: Path) -> None:
        (folder / "name").write_text(self.name)


def test_a_classifier_gives_its_logits_and_saves_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def from_pretrained(name: str, **given: Any) -> Classifier:
        assert given == ASKED
        return Classifier(name, given["num_labels"])

    stand_in: Any = ModuleType("transformers")
    stand_in.AutoModelForImageClassification = SimpleNamespace(from_pretrained=from_pretrained)
    monkeypatch.setitem(sys.modules, "transformers", stand_in)
    model: Any = from_transformers("org/name-1.0", outputs=5)
    pixels = torch.rand(4, 3, 6, 6)
    assert torch.equal(model(pixels), model.model.head(pixels.mean((2, 3))))
    model.save_pretrained(tmp_path)
    assert (tmp_path / "name").read_text() == "org/name-1.0"


def test_a_library_that_is_not_there_is_named_with_its_remedy(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folder of a run may be exported on another machine."""
    pt.simulate("digits", "sync_sgd", 1, steps=1, checkpoint_every=1, out=tmp_path / "run")
    monkeypatch.setitem(sys.modules, "transformers", None)
    file = tmp_path / "digits.toml"
    file.write_text(
        'model = { call = "from_transformers", name = "microsoft/resnet-18", outputs = 10 }\n'
        'data = "digits"\nloss = "cross_entropy"\noptimizer = "SGD"\n'
    )
    for words in (["train", str(file)], ["export", str(tmp_path / "run"), "--job", str(file), "--to", "hf"]):
        _, error = asking(*words)(capsys, code=2)
        assert "microsoft/resnet-18: there is no module transformers; run: pip install transformers" in error
