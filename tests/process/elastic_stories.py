"""Stories of elastic runs: generators that harm workers, and go on as often as the launcher looks for news."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from polytempo.runs.elastic.run_elastic import ElasticLauncher

Story = Callable[[ElasticLauncher], Iterator[None]]


def watching(story: Story, hurry: Path) -> Callable[[ElasticLauncher], None]:
    """A launcher's `watch` that goes on with `story`. At its end it makes the file `hurry`, which ends slow steps."""
    begun: list[Iterator[None]] = []

    def watch(launcher: ElasticLauncher) -> None:
        if not begun:
            begun.append(story(launcher))
        if next(begun[0], hurry) is hurry:
            hurry.touch()

    return watch


def trains_with(launcher: ElasticLauncher, size: int) -> Iterator[None]:
    """Until a step was made by so many workers together."""
    while launcher.view is None or len(launcher.view.members) != size or not launcher.is_training:
        yield


def harmed(launcher: ElasticLauncher, rank: int, number: int) -> Iterator[None]:
    """Send a signal to a member, and wait until the others train without it."""
    assert launcher.view is not None
    life = launcher.view.members[rank]
    process: Any = launcher.processes[life]
    os.kill(process.pid, number)
    while life in launcher.view.members or not launcher.is_training:
        yield
