"""A run's folder: it belongs to one run at a time, and a start that fails leaves no folder."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from polytempo.core.system import files
from polytempo.core.system.files import EVENTS, METRICS, STATUS, TAILS
from polytempo.core.system.folder_lock import held, is_lock
from polytempo.core.system.url_path import Place, UrlPath
from polytempo.training.checkpoint.checkpoint_folders import SERVED_MODEL
from polytempo.training.job.start import START

_OF_A_START = frozenset(
    {"logs", "record", "checkpoint", METRICS, f"{METRICS}.tmp", STATUS, EVENTS, START}
    | {"trackers", "tensorboard", "wandb", TAILS}
)
"""Names that a run may have made before its first row of metrics."""


@contextmanager
def began(out: Place | None) -> Iterator[None]:
    """Hold a run's folder (see `core.folder_lock`) while the run goes on. `FolderTaken` if another run holds it.

    An error before the first row of metrics and the first checkpoint removes the folder and its parents, if this run
    has made them. After the death of a process they stay, with its log. A folder that had contents before stays as it
    is.
    """
    if out is None:
        yield
        return
    missing = [] if isinstance(out, UrlPath) else [folder for folder in (out, *out.parents) if not folder.exists()]
    _make(out)
    with held(out) as lock:
        ours = all(is_lock(entry.name) for entry in out.iterdir())
        try:
            yield
        except BaseException as error:
            assert lock is not None
            lock.rest()
            dead = getattr(error, "death", None) is not None  # its line names a log, which stays
            with suppress(OSError):
                if ours and not dead and not _has_begun(out):
                    files.remove(out)
                    for parent in missing[1:]:
                        parent.rmdir()  # another run may have begun in it
            raise


def _make(out: Place) -> None:
    try:
        if isinstance(out, UrlPath):
            out.names()
        else:
            out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        said = "it cannot be listed" if isinstance(out, UrlPath) else "no folder can be made there"
        raise ValueError(f"out {out}: {said} ({error.strerror}); name another place") from error
    except UnicodeEncodeError as error:
        said = f"names of files are {error.encoding} here, which has not all of its characters"
        raise ValueError(f"out {str(out)!a}: {said}; set PYTHONUTF8=1, or name another place") from error
    if not isinstance(out, UrlPath) and not os.access(out, os.W_OK | os.X_OK):
        raise ValueError(f"out {out}: this process may not write there; name another place")


def _has_begun(out: Place) -> bool:
    """True if the folder holds more than a start leaves."""
    metrics, checkpoint = out / METRICS, out / "checkpoint"
    if any(entry.name not in _OF_A_START and not is_lock(entry.name) for entry in out.iterdir()):
        return True
    if metrics.exists() and (metrics.size() if isinstance(metrics, UrlPath) else metrics.stat().st_size):
        return True
    return checkpoint.is_dir() and any(entry.name != SERVED_MODEL for entry in checkpoint.iterdir())
