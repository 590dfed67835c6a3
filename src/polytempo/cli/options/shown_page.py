"""`live_page`: the page of a command with `--ui`, while the command runs."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from polytempo.cli.options.request import RunRequest
from polytempo.ui.companion import companion


@contextmanager
def live_page(request: RunRequest, *, several: bool = False) -> Iterator[None]:
    """Serve the page of the run's folder, if `--ui` asks for it, and say its link on standard error.

    A run in `runs/` is shown beside the other runs there. Of the workers of another launcher the first serves it.
    """
    out, command = request.options.out, request.command
    if not command.ui or command.dry_run or request.world.rank != 0 or out is None:
        yield
        return
    if several:
        root, name = str(out), None
    elif isinstance(out, Path) and out.parent.name == "runs":
        root, name = str(out.parent), out.name
    else:
        root, name = str(out), "."
    with companion(root, name) as link:
        print(f"live page: {link}", file=sys.stderr, flush=True)
        yield
