"""A worker that never ends, for launches."""

from __future__ import annotations

import threading

from polytempo.engines.processes.worker import RankInfo, Result


def rest(rank_info: RankInfo) -> Result:
    """Wait for a signal that never comes."""
    threading.Event().wait()
    return None
