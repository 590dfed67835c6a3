"""Where a run's files go: never over another run's."""

from __future__ import annotations

from pathlib import Path

_TRACES_OF_A_RUN = ("result.json", "compare.json", "metrics.jsonl", "checkpoint")
MAX_RUNS = 10_000


def holds_run(folder: Path) -> bool:
    """Whether a run, finished or not, has left something in `folder` that another one would overwrite."""
    return any((folder / name).exists() for name in _TRACES_OF_A_RUN)


def checked_folder(folder: Path, *, resume: bool) -> Path:
    """`folder`, unless it holds a run that is not resumed."""
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"--out {folder}: this is a file; name a folder")
    if holds_run(folder) and not resume:
        raise ValueError(f"--out {folder}: a run is in it; go on with --resume, or name another folder")
    return folder


def default_folder(name: str, *, resume: bool, parent: Path = Path("runs")) -> Path:
    """`runs/<name>`, or with `-2`, `-3`, … behind it the first that holds no run. With `resume`, the last that does."""
    candidates = [parent / (name if number == 1 else f"{name}-{number}") for number in range(1, MAX_RUNS + 1)]
    taken = 0
    while taken < MAX_RUNS and holds_run(candidates[taken]):
        taken += 1
    if resume and taken == 0:
        raise ValueError(
            f"--resume: {parent / name} holds no run; name its folder with --out, or begin without --resume"
        )
    if resume:
        return candidates[taken - 1]
    if taken == MAX_RUNS:
        raise ValueError(f"{parent} holds {MAX_RUNS:,} runs named {name}; name another folder with --out")
    return candidates[taken]
