"""`ServedPaces`: windows of a parameter server's workers, from the rows of metrics that they send anyway."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from polytempo.diagnosis.pace import PaceWindow
from polytempo.diagnosis.sentence import UNREAD, slow_row
from polytempo.diagnosis.slow_rank import SlowRankJudge

_PATIENCE = 4
"""Rows a worker in a window, on average, until workers without one are taken for gone."""


class ServedPaces:
    """Takes each worker's rows; once all of `workers` have sent a new one, they are a window.

    A row has the worker's samples per second since its row before, and the part of its life that it has waited, so two
    rows give the busy seconds of a batch between them. `least_lost_s`: see `SlowRankJudge`.
    """

    def __init__(self, workers: int, batch_size: int, least_lost_s: float) -> None:
        self._workers, self._batch_size = workers, batch_size
        self._judge = SlowRankJudge(least_lost_s)
        self._last: dict[int, Mapping[str, Any]] = {}
        self._busy_s: dict[int, float] = {}
        self._first_step, self._rows = 0, 0

    def take(self, row: Mapping[str, Any]) -> list[dict[str, Any]]:
        """The diagnoses that this row of training brings, as rows of metrics."""
        worker = row.get("worker")
        if worker is None or row.get("idle_share") is None or not row.get("samples_per_s"):
            return []
        before, self._last[worker] = self._last.get(worker), row
        if before is None:
            return []
        busy_s = self._busy_in_batch(before, row)
        if busy_s is not None:
            self._busy_s[worker] = busy_s
        self._rows += 1
        if len(self._busy_s) < min(self._workers, 2) or (
            len(self._busy_s) < self._workers and self._rows < _PATIENCE * self._workers
        ):
            return []
        step = max(int(each["step"]) for each in self._last.values())
        window = PaceWindow(self._first_step, step, self._busy_s, dict.fromkeys(self._busy_s, 0.0))
        self._busy_s, self._first_step, self._rows = {}, step, 0
        found = self._judge.take(window)
        return [slow_row(each, f"worker {each.rank}", "", UNREAD, float(row["seconds"]), "worker") for each in found]

    def _busy_in_batch(self, before: Mapping[str, Any], row: Mapping[str, Any]) -> float | None:
        lived_s = row["seconds"] - before["seconds"]
        if lived_s <= 0:  # the worker was started again
            return None
        idle_s = row["idle_share"] * row["seconds"] - before["idle_share"] * before["seconds"]
        busy_s = lived_s - min(lived_s, max(0.0, idle_s))
        batches = row["samples_per_s"] * lived_s / self._batch_size
        return float(busy_s / batches)
