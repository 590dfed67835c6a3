"""`PreemptionWatch`: ranks agree on their last step, as soon as one of them has been asked to leave.

rank 0   step 40 ── 41 ── … ── 60 ── save, leave       a look each quarter of a second: a gather of 40 bytes begins,
rank 1   step 40 ── 41 ──SIGTERM─ … ── 60 ── save, leave     which is read at the next look: no rank waits for it
"""

from __future__ import annotations

import time
from collections.abc import Callable
from math import ceil
from typing import Any

import torch
from torch import Tensor

from polytempo.core import Port
from polytempo.core.system.notice import Notice
from polytempo.spec.callbacks.callback import Control
from polytempo.worlds import ProcessWorld, beside

_EVERY_S = 0.25
_MOST_STEPS = 100_000


class PreemptionWatch:
    """One rank's part. All ranks make one, and call `agreed` after the same steps.

    A look costs one gather of 40 bytes a rank, which stands in no trace. Looks are a quarter of a second apart, by the
    slowest rank's steps, so a signal is answered within half a second. If a step takes longer than that, each is
    followed by a look and its answer.
    """

    def __init__(
        self,
        world: ProcessWorld,
        notice: Notice,
        least_every: int = 1,
        wish: Callable[[], Control] = Control,
    ) -> None:
        """`least_every`: steps between looks, at least; where ranks do not go in step, a look may hold one up.

        `wish()`: requests of callbacks since the last call; of all ranks but rank 0 none.
        """
        self._notice, self._port, self._least, self._wish = notice, world.port, least_every, wish
        self._asked = Control()
        self._world = beside(world) if world.size > 1 else None
        self._pending: Any = None
        self._due, self._every, self._step_s = 0, least_every, 0.0
        self._looked = (0, 0.0)

    def agreed(self, step: int) -> bool:
        """True if all ranks leave now, after `step` steps; the same answer on all ranks."""
        if self._world is None:
            self._asked = self._asked.joined(self._wish())
            return self._notice.given
        if step < self._due:
            return False
        if self._pending is not None and self._hear():
            return True
        self._pending = self._world.launch(_gathered(self._port, self._said(step)))
        if self._step_s >= _EVERY_S and self._least == 1 and self._hear():
            return True
        self._due = step + self._every
        return False

    def asked(self, step: int) -> Control:
        """The requests of callbacks that all ranks follow now, after `step` steps; ask it after `agreed`."""
        asked, self._asked = self._asked, Control()
        return asked

    def end(self) -> None:
        """Finish the gather under way, on all ranks."""
        if self._pending is not None:
            self._hear()

    def close(self) -> None:
        """Restore the signals' handlers."""
        self.end()
        self._notice.close()

    def _said(self, step: int) -> Tensor:
        """The message of this rank: 1 if it was asked to leave, the seconds of its steps, and callbacks' requests."""
        now_s, (before, before_s) = time.monotonic(), self._looked
        self._looked = step, now_s
        step_s = (now_s - before_s) / (step - before) if before_s and step > before else 0.0
        return torch.tensor([float(self._notice.given), step_s, *map(float, self._wish())], dtype=torch.float64)

    def _hear(self) -> bool:
        pending, self._pending = self._pending, None
        said: list[Tensor] = pending.wait()
        self._step_s = max(float(each[1]) for each in said)
        self._asked = self._asked.joined(Control(*(any(float(each[2 + i]) > 0 for each in said) for i in range(3))))
        steps = ceil(_EVERY_S / self._step_s) if self._step_s > 0 else 1
        self._every = min(_MOST_STEPS, max(self._least, steps))
        return any(float(each[0]) > 0 for each in said)


async def _gathered(port: Port, said: Tensor) -> list[Tensor]:
    answers: list[Tensor] = await port.all_gather(said)
    return answers
