"""Completion of names in a shell: jobs, strategies, clusters, … Torch is not loaded."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from polytempo import engines, jobs
from polytempo.spec.text.declaration import declared
from polytempo.spec.text.names import BUSY

CUT_GOALS = ("operations", "time", "memory", "traffic")
REDUCTIONS = ("ring", "halving_doubling", "tree", "server")
PLAN_GOALS = ("bytes", "seconds")


def job_names(incomplete: str) -> list[str]:
    """The jobs that ship, and the Python files and folders of the current directory."""
    return [*_beginning(incomplete, jobs.names()), *_paths(incomplete)]


def strategy_names(incomplete: str) -> list[str]:
    """The strategies; in a list with commas, completions of its last place."""
    before, comma, last = incomplete.rpartition(",")
    return [before + comma + name for name in _beginning(last, [*declared().strategies, "then"])]


def cluster_names(incomplete: str) -> list[str]:
    """The clusters that can be simulated."""
    return _beginning(incomplete, declared().clusters)


def program_names(incomplete: str) -> list[str]:
    """The programs of scheduled model parallelism."""
    return _beginning(incomplete, declared().scheduled)


def engine_names(incomplete: str) -> list[str]:
    """Engines, which start workers."""
    return _beginning(incomplete, engines.__all__)


def distribution_names(incomplete: str) -> list[str]:
    """The distributions of computing times."""
    return _beginning(incomplete, [*declared().stragglers, BUSY])


def cut_goals(incomplete: str) -> list[str]:
    """Goals of a cut."""
    return _beginning(incomplete, CUT_GOALS)


def reduction_names(incomplete: str) -> list[str]:
    """The ways to sum gradients that a plan of layers knows."""
    return _beginning(incomplete, REDUCTIONS)


def plan_goals(incomplete: str) -> list[str]:
    """Goals of a plan of layers."""
    return _beginning(incomplete, PLAN_GOALS)


def _beginning(start: str, names: Iterable[str]) -> list[str]:
    return sorted(name for name in names if name.startswith(start))


def _paths(incomplete: str) -> list[str]:
    """Python files and folders that begin like `incomplete`, as they would be typed."""
    parent = Path(incomplete.rpartition("/")[0] or ("/" if incomplete.startswith("/") else "."))
    if not parent.is_dir():
        return []
    before = incomplete[: incomplete.rfind("/") + 1]
    found = sorted(each for each in parent.iterdir() if not each.name.startswith("."))
    typed = [before + each.name + "/" * each.is_dir() for each in found if each.is_dir() or each.suffix == ".py"]
    return _beginning(incomplete, typed)
