"""A run's folder: there from the first step on. A start that fails leaves none."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from polytempo.core.url_path import Place, UrlPath

_OF_A_START = frozenset({"logs", "record", "checkpoint", "metrics.jsonl", "metrics.jsonl.tmp", "live.json"})
"""What a run may have made before its first row of metrics."""


@contextmanager
def began(out: Place | None) -> Iterator[None]:
    """Around a run: where it ends by an error before its first row of metrics and its first checkpoint, the folder that
    it made is removed, and so are the parents that it made. A folder that held something before stays as it is.
    """
    if out is None:
        yield
        return
    if isinstance(out, UrlPath):
        with _began_at(out):
            yield
        return
    missing = [folder for folder in (out, *out.parents) if not folder.exists()]
    ours = bool(missing) or (out.is_dir() and not any(out.iterdir()))
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"out {out}: no folder can be made there ({error.strerror}); name another one") from error
    try:
        yield
    except BaseException:
        if ours and not _has_begun(out):
            shutil.rmtree(out, ignore_errors=True)
            for parent in missing[1:]:
                with suppress(OSError):  # another run may have begun in it
                    parent.rmdir()
        raise


@contextmanager
def _began_at(out: UrlPath) -> Iterator[None]:
    try:
        ours = not out.names()
    except OSError as error:
        raise ValueError(f"out {out}: it cannot be listed ({error.strerror}); name another place") from error
    try:
        yield
    except BaseException:
        with suppress(OSError):
            if ours and all(name in _OF_A_START for name in out.names()) and not (out / "checkpoint").names():
                metrics = out / "metrics.jsonl"
                if not metrics.exists() or not metrics.size():
                    out.remove()
        raise


def _has_begun(out: Path) -> bool:
    """Whether the folder holds more than a start leaves."""
    if not out.is_dir():
        return False
    metrics, checkpoint = out / "metrics.jsonl", out / "checkpoint"
    if any(entry.name not in _OF_A_START for entry in out.iterdir()):
        return True
    return (metrics.exists() and metrics.stat().st_size > 0) or (checkpoint.is_dir() and any(checkpoint.iterdir()))
