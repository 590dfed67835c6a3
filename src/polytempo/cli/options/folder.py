"""Folders of runs: a run never writes over another one's files."""

from __future__ import annotations

from pathlib import Path

TRACES_OF_A_RUN = ("result.json", "compare.json", "metrics.jsonl", "checkpoint", "sweep.trials.json")
"""Files of a run that another run would overwrite."""
_MOST_NAMED = 3
MAX_RUNS = 10_000


def holds_run(folder: Path) -> bool:
    """True if a run, or the first of a comparison, has left something in `folder` that another would overwrite."""
    return any((each / name).exists() for each in (folder, *folder.glob("01-*")) for name in TRACES_OF_A_RUN)


def checked_folder(folder: Path, *, resume: bool, force: bool = False) -> Path:
    """`folder`, unless it holds a run that is not resumed, or files of other kinds that `force` does not allow."""
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"--out {folder}: this is a file; name a folder")
    if holds_run(folder):
        if not resume:
            raise ValueError(
                f"--out {folder}: this folder holds a run; continue it with --resume, or name another folder"
            )
    elif folder.exists() and (others := _others(folder)) and not force:
        named = ", ".join(others[:_MOST_NAMED]) + (", …" if len(others) > _MOST_NAMED else "")
        raise ValueError(
            f"--out {folder}: this folder holds other files ({named}); name another folder, or use this one "
            "with --force"
        )
    return folder


def _others(folder: Path) -> list[str]:
    """All names but a lock's: a run that was killed at its start may have left one (see `core.folder_lock`)."""
    return sorted(entry.name for entry in folder.iterdir() if not entry.name.startswith(".lock-"))


def _is_taken(folder: Path) -> bool:
    """True if a new run would meet anything in it."""
    return folder.exists() and (not folder.is_dir() or any(folder.iterdir()))


def default_folder(name: str, *, resume: bool, parent: Path = Path("runs")) -> Path:
    """`runs/<name>`, or with `-2`, `-3`, … behind it the first that holds nothing. With `resume`, the last run's."""
    candidates = [parent / (name if number == 1 else f"{name}-{number}") for number in range(1, MAX_RUNS + 1)]
    taken = 0
    while taken < MAX_RUNS and _is_taken(candidates[taken]):
        taken += 1
    held = [folder for folder in candidates[:taken] if holds_run(folder)]
    if resume and not held:
        raise ValueError(
            f"--resume: {parent / name} holds no run; name its folder with --out, or start without --resume"
        )
    if resume:
        return held[-1]
    if taken == MAX_RUNS:
        raise ValueError(f"{parent} holds {MAX_RUNS:,} folders named {name}; name another folder with --out")
    return candidates[taken]
