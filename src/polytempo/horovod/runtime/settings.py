"""`HorovodSettings`: the values of the variables `HOROVOD_*`, which scripts and launchers set already, and its logs."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import NamedTuple

from polytempo.horovod.negotiation.autotuner import AutotuneOptions, TunedSettings
from polytempo.horovod.negotiation.coordinator import StallLimits

LEVELS = {"trace": 5, "debug": 10, "info": 20, "warning": 30, "error": 40, "fatal": 50}
"""HOROVOD_LOG_LEVEL, as numbers of Python's logging."""
DYNAMIC = "DYNAMIC"
"""The HOROVOD_TIMELINE that waits for `start_timeline`."""


class HorovodSettings(NamedTuple):
    """The settings of a negotiation. All ranks have the same; rank 0's count."""

    fusion_bytes: int = 128 << 20
    """HOROVOD_FUSION_THRESHOLD: the most bytes of all-reduces that become one; 0: none do."""
    fuse_groups: bool = True
    """True to fuse grouped all-reduces with others; not with HOROVOD_DISABLE_GROUP_FUSION=1."""
    cycle_s: float = 0.001
    """HOROVOD_CYCLE_TIME, there in milliseconds: how long names wait for others, to be submitted together."""
    cache_capacity: int = 1024
    """HOROVOD_CACHE_CAPACITY: how many names ranks remember; 0: none."""
    warn_s: float = 60.0
    """HOROVOD_STALL_CHECK_TIME_SECONDS; 0 with HOROVOD_STALL_CHECK_DISABLE=1."""
    end_s: float = 300.0
    """HOROVOD_STALL_SHUTDOWN_TIME_SECONDS. Horovod waits for ever by default; here no wait is without an end."""
    timeline: str = ""
    """HOROVOD_TIMELINE: the file that rank 0 writes from the beginning."""
    mark_cycles: bool = False
    """HOROVOD_TIMELINE_MARK_CYCLES."""
    log_level: str = ""
    """HOROVOD_LOG_LEVEL, one of `LEVELS`; "": as Python's logging is set up."""
    log_time: bool = True
    """True to begin lines of the log with the time; not with HOROVOD_LOG_HIDE_TIME=1."""
    autotune: AutotuneOptions | None = None
    """HOROVOD_AUTOTUNE=1, and its options. A threshold and a cycle time that are set are not tuned."""
    autotune_log: str = ""
    """HOROVOD_AUTOTUNE_LOG: the file that rank 0 writes."""

    @property
    def stalls(self) -> StallLimits:
        """The limits of a partly submitted name, until a warning and until the end."""
        return StallLimits(self.warn_s, self.end_s)

    @property
    def tuned(self) -> TunedSettings:
        """The autotuner's first settings."""
        return TunedSettings(self.fusion_bytes, self.cycle_s)

    @classmethod
    def from_environment(cls, environ: Mapping[str, str]) -> HorovodSettings:
        """ValueError, naming the variable, for text that is not a number or is below 0, and for an unknown level."""
        default = cls()
        level = environ.get("HOROVOD_LOG_LEVEL", "").lower()
        if level and level not in LEVELS:
            raise ValueError(f"HOROVOD_LOG_LEVEL={level!r} must be one of {', '.join(LEVELS)}")
        timeline = environ.get("HOROVOD_TIMELINE", "")
        disabled = _is_set(environ, "HOROVOD_STALL_CHECK_DISABLE")
        return cls(
            fusion_bytes=int(_number(environ, "HOROVOD_FUSION_THRESHOLD", default.fusion_bytes)),
            fuse_groups=not _is_set(environ, "HOROVOD_DISABLE_GROUP_FUSION"),
            cycle_s=_number(environ, "HOROVOD_CYCLE_TIME", 1000 * default.cycle_s) / 1000,
            cache_capacity=int(_number(environ, "HOROVOD_CACHE_CAPACITY", default.cache_capacity)),
            warn_s=0.0 if disabled else _number(environ, "HOROVOD_STALL_CHECK_TIME_SECONDS", default.warn_s),
            end_s=_number(environ, "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS", 0.0) or default.end_s,
            timeline="" if timeline == DYNAMIC else timeline,
            mark_cycles=_is_set(environ, "HOROVOD_TIMELINE_MARK_CYCLES"),
            log_level=level,
            log_time=not _is_set(environ, "HOROVOD_LOG_HIDE_TIME"),
            autotune=_autotune(environ) if _is_set(environ, "HOROVOD_AUTOTUNE") else None,
            autotune_log=environ.get("HOROVOD_AUTOTUNE_LOG", ""),
        )


def _autotune(environ: Mapping[str, str]) -> AutotuneOptions:
    default = AutotuneOptions()
    return AutotuneOptions(
        warmup_samples=int(_number(environ, "HOROVOD_AUTOTUNE_WARMUP_SAMPLES", default.warmup_samples)),
        steps_per_sample=max(1, int(_number(environ, "HOROVOD_AUTOTUNE_STEPS_PER_SAMPLE", default.steps_per_sample))),
        max_samples=max(1, int(_number(environ, "HOROVOD_AUTOTUNE_BAYES_OPT_MAX_SAMPLES", default.max_samples))),
        noise=_number(environ, "HOROVOD_AUTOTUNE_GAUSSIAN_PROCESS_NOISE", default.noise),
        tunes_fusion="HOROVOD_FUSION_THRESHOLD" not in environ,
        tunes_cycle="HOROVOD_CYCLE_TIME" not in environ,
    )


def _is_set(environ: Mapping[str, str], name: str) -> bool:
    return environ.get(name, "0") not in ("", "0")


def _number(environ: Mapping[str, str], name: str, default: float) -> float:
    text = environ.get(name) or str(default)
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise ValueError(f"{name}={text!r} must be a number that is not negative")
    return value


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
