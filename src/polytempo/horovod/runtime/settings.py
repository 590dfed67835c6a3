"""`HorovodSettings`: what the variables `HOROVOD_*` say, which scripts and launchers set already."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from polytempo.horovod.negotiation.stalls import StallLimits


class HorovodSettings(NamedTuple):
    """How operations are negotiated. All ranks have the same; rank 0's count."""

    fusion_bytes: int = 128 << 20
    """HOROVOD_FUSION_THRESHOLD: the most bytes of all-reduces that become one; 0: none do."""
    cycle_s: float = 0.001
    """HOROVOD_CYCLE_TIME, there in milliseconds: how long names wait for others, to be submitted together."""
    cache_capacity: int = 1024
    """HOROVOD_CACHE_CAPACITY: how many names ranks remember; 0: none."""
    warn_s: float = 60.0
    """HOROVOD_STALL_CHECK_TIME_SECONDS; 0 with HOROVOD_STALL_CHECK_DISABLE=1."""
    end_s: float = 300.0
    """HOROVOD_STALL_SHUTDOWN_TIME_SECONDS. Horovod waits for ever by default; here no wait is without an end."""

    @property
    def stalls(self) -> StallLimits:
        """The times after which a name that only some ranks submit is warned of, and ends everything."""
        return StallLimits(self.warn_s, self.end_s)

    @classmethod
    def from_environment(cls, environ: Mapping[str, str]) -> HorovodSettings:
        """ValueError, naming the variable, for what is no number or below 0."""
        default = cls()
        disabled = environ.get("HOROVOD_STALL_CHECK_DISABLE", "0") not in ("", "0")
        return cls(
            int(_number(environ, "HOROVOD_FUSION_THRESHOLD", default.fusion_bytes)),
            _number(environ, "HOROVOD_CYCLE_TIME", 1000 * default.cycle_s) / 1000,
            int(_number(environ, "HOROVOD_CACHE_CAPACITY", default.cache_capacity)),
            0.0 if disabled else _number(environ, "HOROVOD_STALL_CHECK_TIME_SECONDS", default.warn_s),
            _number(environ, "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS", 0.0) or default.end_s,
        )


def _number(environ: Mapping[str, str], name: str, default: float) -> float:
    text = environ.get(name) or str(default)
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise ValueError(f"{name}={text!r} must be a number that is not negative")
    return value
