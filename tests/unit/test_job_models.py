"""Models of job files from `transformers`, with a stand-in for the library."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

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
