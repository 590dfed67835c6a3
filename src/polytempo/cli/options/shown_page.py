"""`live_page`: the page of a command with `--ui`, while the command runs."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

from polytempo.ui.companion import companion

if TYPE_CHECKING:  # both load torch
    from polytempo.cli.options.request import RunRequest
    from polytempo.core.system.url_path import Place


def live_page(request: RunRequest, *, several: bool = False) -> AbstractContextManager[None]:
    """Serve the page of the run's folder, if `--ui` asks for it. Of the workers of another launcher the first does."""
    command = request.command
    shows = command.ui and not command.dry_run and request.world.rank == 0
    return page_of(request.options.out if shows else None, several=several)


def page_of(out: Place | None, *, several: bool = False) -> AbstractContextManager[None]:
    """Serve the page of a run's folder, or of a folder of `several`. None: no page.

    A run in `runs/` is shown beside the other runs there.
    """
    if out is None:
        return nullcontext()
    if several:
        return page_below(str(out))
    if isinstance(out, Path) and out.parent.name == "runs":
        return page_below(str(out.parent), out.name)
    return page_below(str(out), ".")


@contextmanager
def page_below(root: str, run: str | None = None) -> Iterator[None]:
    """Serve the page of the runs below `root`, which opens at `run`, and say its link on standard error."""
    with companion(root, run) as link:
        print(f"live page: {link}", file=sys.stderr, flush=True)
        yield
