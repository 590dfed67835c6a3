"""The declared versions are the tested ones, and `doctor` names any other."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest
import torch

from polytempo.cli.look import doctor
from polytempo.cli.look.doctor import TESTED_PYTHON, TESTED_TORCH, untested

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("torch_version", "python", "says"),
    [
        ("2.13.0+cpu", "3.11.7", []),
        ("2.15.0", "3.11.0rc1", []),
        ("2.6.0", "3.11.7", ["torch 2.6.0"]),
        ("2.1.5", "3.11.7", ["torch 2.1.5"]),
        ("2.16.0a0+git12", "3.14.1", ["torch 2.16.0a0+git12", "Python 3.14.1"]),
    ],
)
def test_an_untested_version_is_named(torch_version: str, python: str, says: list[str]) -> None:
    found = untested(torch_version, python)
    assert len(found) == len(says)
    assert all(text.startswith(f"{start} is not tested") for text, start in zip(found, says, strict=True))


def test_doctor_names_it_and_stays_healthy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", "2.99.0")
    monkeypatch.setattr(doctor, "_two_workers_talk", lambda: (1.0, 1.0))
    health = doctor.examined()
    assert health.healthy
    assert (
        "note",
        f"torch 2.99.0 is not tested with Polytempo; tested are {', '.join(TESTED_TORCH)}",
    ) in doctor._rows(health)


def test_pyproject_and_contributing_declare_what_is_tested() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    major, minor = map(int, TESTED_TORCH[-1].split("."))
    assert f"torch>={TESTED_TORCH[0]},<{major}.{minor + 1}" in project["dependencies"]
    assert project["requires-python"] == f">={TESTED_PYTHON[0]}"
    declared = [line.rsplit(" ", 1)[1] for line in project["classifiers"] if "Python :: 3." in line]
    assert tuple(declared) == TESTED_PYTHON
    rows = [
        line.split("|")[1:3]
        for line in (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8").splitlines()
        if line.startswith("| 2.") and "passed" in line
    ]
    assert {".".join(row[0].strip().split(".")[:2]) for row in rows} == set(TESTED_TORCH)
    assert {".".join(row[1].strip().split(".")[:2]) for row in rows} == set(TESTED_PYTHON)
