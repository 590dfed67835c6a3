"""Runs one after the other: the run of a strategy's `before`, and the run that starts from its model (`spec.then`).

OUT/01-downpour-…/     the first run's folder, whole
OUT/                   the second run's; start.safetensors has the first run's model
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

from polytempo.core.system.url_path import Place
from polytempo.report.runs import has_result, load_result
from polytempo.runs.frame.folder_names import slug
from polytempo.spec.result import Result
from polytempo.spec.run_spec import RunSpec


@contextmanager
def chained(spec: RunSpec, perform: Callable[[RunSpec], Result]) -> Iterator[RunSpec]:
    """The run after the first one, which `perform` does unless it has ended; or the run itself, if it is alone.

    Without a folder the first run's files are in a temporary one, until the context ends.
    """
    first, out = spec.first, spec.options.out
    if first is None:
        yield spec
        return
    with ExitStack() as stack:
        home: Place = out or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="polytempo-")))
        folder, resume = home / f"01-{slug(str(first.strategy))}", spec.options.resume
        second = replace(spec, strategy=replace(spec.strategy, before=None))
        if resume and has_saved(home):
            yield replace(second, options=replace(spec.options, start_from=None))  # its start is in its folder
            return
        if not (resume and _has_ended(folder, first)):
            options = replace(first.options, out=folder, resume=resume and has_saved(folder))
            perform(replace(first, options=options))
        yield replace(second, options=replace(spec.options, start_from=str(folder), resume=False))


def has_saved(folder: Place) -> bool:
    """True if a run has left a checkpoint in `folder`."""
    checkpoint = folder / "checkpoint"
    return checkpoint.is_dir() and any(checkpoint.iterdir())


def _has_ended(folder: Place, first: RunSpec) -> bool:
    """True if the first run came to its last step."""
    if not has_result(folder):
        return False
    result = load_result(folder)
    return result["steps"] >= (first.options.steps or 0) and not result.get("left") and has_saved(folder)
