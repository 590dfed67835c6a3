"""`SavedTrials`: the trials of a sweep or a tuning so far, in one file: the live page lists it, and a resume reads it.

runs/sweep/sweep.trials.json     the space, and each trial: its settings, state and value
runs/sweep/trial-000/            the run of a trial
"""

from __future__ import annotations

from math import isfinite
from pathlib import Path
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from polytempo.core.system import files

SUFFIX = ".trials.json"
MOST_TRIALS, _MOST_BYTES = 10_000, 16 << 20
_Number = Annotated[float, Meta(ge=-1e300, le=1e300)]
_Text = Annotated[str, Meta(max_length=2_000)]
Setting = int | float | bool | str
"""A setting of a trial."""


class SavedTrial(msgspec.Struct, frozen=True, kw_only=True):
    """One trial."""

    number: Annotated[int, Meta(ge=0)]
    settings: dict[_Text, Setting]
    state: Literal["running", "finished", "pruned", "failed"]
    value: _Number | None = None
    """The last score. None: there is none yet, or it was not finite."""
    steps: int | None = None
    why: _Text = ""
    """The error of a trial that has failed."""
    run: _Text = ""
    """Its folder, relative to the file; "" for a trial without one."""


class SavedTrials(msgspec.Struct, frozen=True, kw_only=True):
    """The trials of one sweep or tuning, by their numbers."""

    format: Literal["polytempo-trials"] = "polytempo-trials"
    version: Literal[1] = 1
    title: _Text
    metric: _Text
    better: Literal["less", "more"]
    space: dict[_Text, _Text] = {}
    """Each setting and its values, as they were given."""
    facts: dict[_Text, _Text] = {}
    """Further facts that a sweep that goes on must share: sampler, seed, job, …."""
    num_trials: int
    """Trials in all, also the coming ones."""
    trials: Annotated[list[SavedTrial], Meta(max_length=MOST_TRIALS)] = []
    command: _Text = ""
    """The command that trains with the best settings."""

    @property
    def best(self) -> SavedTrial | None:
        """The finished trial with the best value, the first of equals; None before there is one."""
        done = [each for each in self.trials if each.state == "finished" and each.value is not None]
        sign = 1.0 if self.better == "less" else -1.0
        return min(done, key=lambda each: (sign * (each.value or 0.0), each.number), default=None)


class TrialsFile:
    """Trials that a program writes to a file as they come; without a path it only keeps them."""

    def __init__(self, path: Path | None, saved: SavedTrials) -> None:
        self._path, self.saved = path, saved

    def keep(self, trial: SavedTrial, command: str | None = None) -> None:
        """Write a trial, in place of the one with its number. `command`: trains with the best settings."""
        others = [each for each in self.saved.trials if each.number != trial.number]
        trials = sorted([*others, trial], key=lambda each: each.number)[:MOST_TRIALS]
        most = max(self.saved.num_trials, len(trials))
        self.saved = msgspec.structs.replace(self.saved, trials=trials, num_trials=most)
        if command is not None:
            self.saved = msgspec.structs.replace(self.saved, command=command)
        self.write()

    def ended(self, settings: dict[str, Setting], value: float | None, why: str = "") -> None:
        """Write a trial that has ended, in place of an earlier one with these settings. `why`: it has failed."""
        same = [each.number for each in self.saved.trials if each.settings == settings]
        number = same[0] if same else len(self.saved.trials)
        finite = value if value is not None and isfinite(value) else None
        state: Literal["finished", "failed"] = "failed" if why or finite is None else "finished"
        why = why or "its loss was not finite" * (finite is None)
        self.keep(SavedTrial(number=number, settings=settings, state=state, value=finite, why=why[:2_000]))

    def write(self) -> None:
        """Write the file, complete or not at all. Errors: OSError."""
        if self._path is not None:
            write_trials(self._path, self.saved)


def write_trials(path: Path, trials: SavedTrials) -> None:
    """Write the file, complete or not at all. Errors: OSError."""
    files.replace(path, msgspec.json.encode(trials))


def read_trials(path: Path) -> SavedTrials:
    """The file of `write_trials`. Errors: OSError; ValueError for another file."""
    try:
        return msgspec.json.decode(files.read(path, _MOST_BYTES), type=SavedTrials)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} holds no trials of a sweep or a tuning: {error}") from error
