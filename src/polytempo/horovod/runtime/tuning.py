"""`Tuning`: the autotuner, fed with what rank 0 performs, and its log."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

from polytempo.horovod.negotiation.autotuner import Autotuner, TunedSettings
from polytempo.horovod.negotiation.matching import num_bytes
from polytempo.horovod.negotiation.message import Agreement

_LOG = logging.getLogger("polytempo.horovod")
_HEADER = "hierarchical_allreduce,hierarchical_allgather,cache_enabled,cycle_time_ms,tensor_fusion_threshold,score\n"


class Tuning:
    """`log`: where a line for each score goes, as Horovod writes it: the threshold in MiB, the score in bytes a
    microsecond, the best setting last. `facts`: what Horovod tunes besides and this library does not: the columns
    before. Errors: OSError where the file cannot be made."""

    def __init__(self, tuner: Autotuner, log: str, facts: Sequence[bool]) -> None:
        self._tuner, self._log = tuner, Path(log) if log else None
        self._facts = ",".join(str(int(fact)) for fact in facts)
        if self._log is not None:
            self._log.write_text(_HEADER, encoding="utf-8")

    def performed(self, agreements: Sequence[Agreement], now_s: float) -> TunedSettings | None:
        """What is to hold from now on, where that changes."""
        requests = [agreed.request for agreed in agreements if agreed.request.shapes]
        tuned = self._tuner.performed([each.name for each in requests], sum(map(num_bytes, requests)), now_s)
        rows, self._tuner.rows = self._tuner.rows, []
        for place, (settings, score) in enumerate(rows):
            best = self._tuner.done and place == len(rows) - 1
            self._line(settings, score, "best parameters" if best else "measured")
        return tuned

    def _line(self, settings: TunedSettings, score: float, what: str) -> None:
        line = f"{self._facts},{1000 * settings.cycle_s:g},{settings.fusion_bytes / (1 << 20):g},{score:g}"
        _LOG.info("autotuner: %s: %s", what, line)
        if self._log is not None:
            with self._log.open("a", encoding="utf-8") as file:
                file.write(f"{line}\n")
