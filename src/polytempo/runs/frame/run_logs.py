"""Where the logs of a run's processes are: in its folder, or, where a URL names that, copied there at the end."""

from __future__ import annotations

import secrets
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from polytempo.core.system.url_path import Place, UrlPath
from polytempo.engines.processes import janitor


@contextmanager
def logs_of(out: Place | None) -> Iterator[Path | None]:
    """A local folder for logs while the run lasts; None where the run has no folder."""
    if not isinstance(out, UrlPath):
        yield None if out is None else out / "logs"
        return
    home = Path(tempfile.gettempdir()).absolute() / f"polytempo-{secrets.token_hex(4)}"
    with janitor.swept(home):
        logs = home / "logs"
        try:
            yield logs
        finally:
            for log in sorted(logs.iterdir()) if logs.is_dir() else []:
                try:
                    (out / "logs" / log.name).upload(log)
                except OSError as error:  # a run does not fail for want of its log
                    print(f"note: {log.name} is not in {out}: {error}", file=sys.stderr)
