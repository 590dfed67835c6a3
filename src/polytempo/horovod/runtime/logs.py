"""What HOROVOD_LOG_LEVEL and HOROVOD_LOG_HIDE_TIME do to the log `polytempo.horovod`."""

from __future__ import annotations

import logging
from collections.abc import Callable

from polytempo.horovod.runtime.settings import LEVELS, HorovodSettings

LOG = logging.getLogger("polytempo.horovod")


def begin_log(settings: HorovodSettings, rank: int) -> Callable[[], None]:
    """Write lines of the level, and above, to stderr; the answer ends that. Without a level nothing changes."""
    if not settings.log_level:
        return lambda: None
    logging.addLevelName(LEVELS["trace"], "TRACE")
    handler = logging.StreamHandler()
    time = "%(asctime)s: " if settings.log_time else ""
    handler.setFormatter(logging.Formatter(f"[{time}%(levelname)s] [{rank}] %(message)s"))
    before, propagated = LOG.level, LOG.propagate
    LOG.setLevel(LEVELS[settings.log_level])
    LOG.addHandler(handler)
    LOG.propagate = False

    def end() -> None:
        LOG.removeHandler(handler)
        LOG.setLevel(before)
        LOG.propagate = propagated

    return end
