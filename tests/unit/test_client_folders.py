"""Clients with test samples of their own: of folders, by `from_folder`, and held out by the option `client_test`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from torch import nn
from torch.utils.data import TensorDataset

import polytempo as pt

TREE = {
    "alice": {"cat": 3, "dog": 2},
    "bob": {"train/cat": 4, "train/emu": 1, "test/cat": 2},
    "carol": {"dog": 5},
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Pictures of one grey each: 50 for cats, 100 for dogs, 150 for emus."""
    for client, kinds in TREE.items():
        for kind, count in kinds.items():
            (tmp_path / client / kind).mkdir(parents=True)
            grey = {"cat": 50, "dog": 100, "emu": 150}[kind.rpartition("/")[2]]
            for number in range(count):
                Image.new("L", (5, 7), grey).save(tmp_path / client / kind / f"{number}.png")
    return tmp_path


def test_each_folder_is_a_client_and_classes_have_one_number(folder: Path) -> None:
    dealt = pt.federated.from_folder(folder, size=4)
    assert dealt.sizes == [5, 5, 5]
    assert dealt.counts().tolist() == [[3, 2, 0], [4, 0, 1], [0, 5, 0]]
    pixels, label = dealt[0]
    assert pixels.shape == (3, 4, 4)
    assert (pixels.unique().item(), label) == (pytest.approx(50 / 127.5 - 1), 0)
    assert dealt.test is not None
    assert [label for _, label in (dealt.test[number] for number in range(len(dealt.test)))] == [0, 0], "bob's"


def test_other_clients_hold_out_a_part(folder: Path) -> None:
    dealt, again = (pt.federated.from_folder(folder, size=4, test=0.4, seed=3) for _ in range(2))
    assert dealt.test is not None
    assert (dealt.sizes, len(dealt.test)) == ([3, 5, 3], 2 + 2 + 2)
    assert [part.tolist() for part in dealt.parts] == [part.tolist() for part in again.parts]


def test_a_run_scores_each_client(folder: Path) -> None:
    dealt = pt.federated.from_folder(folder, size=4, test=0.4)
    job = pt.Job(
        model=lambda: nn.Sequential(nn.Flatten(), nn.Linear(48, 3)),
        data=lambda path: pt.Data(dealt, dealt.test),
        loss=nn.functional.cross_entropy,
        optimizer=lambda parameters, lr: torch.optim.SGD(parameters, lr=lr),
        correct=lambda output, target: output.argmax(1) == target,
    )
    result = pt.simulate(job, pt.federated.fed_avg(cohort=2), workers=2, steps=2)
    assert result.metrics is not None
    assert 0 <= result.metrics["clients/min"] <= result.metrics["clients/median"] <= 1


def test_any_samples_can_be_read(folder: Path) -> None:
    def read(place: Path) -> TensorDataset:
        number = torch.tensor([float(len(place.name))] * 2)
        return TensorDataset(number, number)

    dealt = pt.federated.from_folder(folder, read)
    assert [dealt[number][0].item() for number in range(6)] == [5, 5, len("train"), len("train"), 5, 5]


def test_folders_without_samples_are_refused(folder: Path) -> None:
    (folder / "dave").mkdir()
    with pytest.raises(ValueError, match="client dave has no samples"):
        pt.federated.from_folder(folder)
    with pytest.raises(ValueError, match="has no folders"):
        pt.federated.from_folder(folder / "dave")
    with pytest.raises(ValueError, match="above 0 and below 1"):
        pt.federated.from_folder(folder, test=1.0)


def test_an_option_holds_out_samples_of_each_client() -> None:
    """The same samples and scores as of data with such clients; the job's own test set stays, under a name."""
    whole = pt.data.digits()
    made = pt.Job(
        model=lambda: nn.Linear(64, 10),
        data=lambda path: pt.Data(*whole),
        loss=nn.functional.cross_entropy,
        optimizer=lambda parameters, lr: torch.optim.SGD(parameters, lr=lr),
        correct=lambda output, target: output.argmax(1) == target,
    )
    dealt = pt.federated.clients(whole[0], pt.federated.dirichlet(9), seed=4, test=0.25)
    by_data = replace(made, data=lambda path: pt.Data(dealt, dealt.test, more={"job_test": whole[1]}))
    more: dict[str, Any] = {"workers": 2, "steps": 2, "seed": 4}
    found = pt.simulate(made, "fed_avg(cohort=3)", clients="dirichlet(9)", client_test=0.25, **more)
    expected = pt.simulate(by_data, "fed_avg(cohort=3)", **more)
    assert found.parameters_sha256 == expected.parameters_sha256
    assert found.metrics == expected.metrics
    assert found.metrics is not None
    assert {"clients/p10", "clients/took_part", "job_test/accuracy"} <= found.metrics.keys()
    own = replace(made, data=lambda path: pt.Data(pt.federated.clients(whole[0], pt.federated.dirichlet(9), seed=4)))
    held = pt.simulate(own, "fed_avg(cohort=3)", client_test=0.25, **more)
    assert held.parameters_sha256 == found.parameters_sha256
    with pytest.raises(ValueError, match="have test samples already"):
        pt.simulate(by_data, "fed_avg(cohort=3)", client_test=0.25, **more)
