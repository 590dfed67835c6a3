"""The versions of torch and Python that `make test-torch` has passed with; `doctor` names any other."""

from __future__ import annotations

TORCH = ("2.9", "2.13", "2.14", "2.15")
PYTHON = ("3.11", "3.12", "3.13")


def untested(torch: str, python: str) -> list[str]:
    """Sentences about untested ones of these two versions (such as "2.13.0+cpu", "3.11.7")."""
    found = (("torch", torch, TORCH), ("Python", python, PYTHON))
    return [
        f"{name} {version} is not tested with Polytempo; tested are {', '.join(tested)}"
        for name, version, tested in found
        if ".".join(version.split(".")[:2]) not in tested
    ]
