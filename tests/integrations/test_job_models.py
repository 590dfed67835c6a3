"""Classifiers of `transformers` in job files: `init`, a run, and a folder that the library reads again."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from transformers import AutoModelForImageClassification, ResNetConfig, ResNetForImageClassification, ViTConfig
from transformers import ViTForImageClassification as Vit

import polytempo as pt
from polytempo import jobs
from polytempo.jobs.models import from_transformers

COLOURS = {"blue": (0, 0, 255), "green": (0, 255, 0), "red": (255, 0, 0)}
TINY: dict[str, Any] = {
    "resnet": lambda: ResNetForImageClassification(
        ResNetConfig(embedding_size=4, hidden_sizes=[4, 8], depths=[1, 1], layer_type="basic", num_labels=7)
    ),
    "vit": lambda: Vit(
        ViTConfig(hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8, image_size=16,
                  patch_size=8, num_labels=7)
    ),
}  # fmt: skip


@pytest.fixture(params=TINY)
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A tiny classifier of seven classes with drawn weights, saved by the library."""
    torch.manual_seed(1)
    TINY[request.param]().save_pretrained(tmp_path / "tiny")
    return tmp_path / "tiny"


def test_the_head_alone_is_made_again(folder: Path) -> None:
    made, saved = from_transformers(str(folder), outputs=3), AutoModelForImageClassification.from_pretrained(folder)
    assert made(torch.rand(2, 3, 16, 16)).shape == (2, 3)
    kept = {name: tensor for name, tensor in saved.state_dict().items() if not name.startswith("classifier")}
    assert len(kept) > 4
    for name, tensor in kept.items():
        assert torch.equal(made.state_dict()[f"model.{name}"], tensor), name


def test_from_a_folder_of_pictures_to_a_folder_of_the_library(folder: Path, tmp_path: Path) -> None:
    for name, colour in COLOURS.items():
        (tmp_path / "pictures" / name).mkdir(parents=True)
        for number in range(6):
            shade = tuple(max(0, part - 20 * number) for part in colour)
            Image.new("RGB", (16, 16), shade).save(tmp_path / "pictures" / name / f"{number}.png")
    asked = ["init", "pictures", "--model", "transformers:tiny", "--size", "16", "--lr", "0.01", "--epochs", "2"]
    subprocess.run([sys.executable, "-m", "polytempo", *asked], cwd=tmp_path, check=True, timeout=120)
    job = jobs.find(str(tmp_path / "job.toml"))
    pt.simulate(job, "local_sgd(period=2)", 2, batch_size=4, checkpoint_every=2, threads=1, out=tmp_path / "run")
    trained = pt.training.trained_model(job, tmp_path / "run")
    again = AutoModelForImageClassification.from_pretrained(trained.export("hf")).eval()
    pixels = torch.rand(2, 3, 16, 16)
    with torch.no_grad():
        torch.testing.assert_close(again(pixels).logits, trained.model(pixels))
        assert not torch.equal(again(pixels).logits, from_transformers(str(folder), 3).eval()(pixels))
