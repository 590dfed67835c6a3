"""A folder by its URL is as free for a run as one on this machine has to be."""

from __future__ import annotations

from polytempo.cli.options.folder import TRACES_OF_A_RUN
from polytempo.core.system.url_path import UrlPath


def check_url(out: UrlPath, *, resume: bool) -> None:
    """ValueError where `out` cannot be listed, or holds a run that is not resumed."""
    try:
        held = set(out.names()).intersection(TRACES_OF_A_RUN)
    except OSError as error:
        raise ValueError(f"--out {out}: it cannot be listed ({error.strerror}); name another place") from error
    if held and not resume:
        raise ValueError(f"--out {out}: this place holds a run; continue it with --resume, or name another one")
