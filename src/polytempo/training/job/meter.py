"""`Meter`: the mean loss and the rate of training between two rows of metrics."""

from __future__ import annotations

from torch import Tensor


class Meter:
    """The mean loss and the rate since the last row."""

    def __init__(self, samples: int, seconds: float) -> None:
        self._last_loss: float | None = None
        self._sum: Tensor | None = None
        self._count = 0
        self._samples = samples
        self._seconds = seconds

    def add(self, loss: Tensor | None) -> None:
        """One more step's loss; None: it is not there."""
        if loss is None:
            return
        detached = loss.detach()
        self._sum = detached.clone() if self._sum is None else self._sum.add_(detached)
        self._count += 1

    @property
    def loss(self) -> float | None:
        """The mean loss since the last row, or of the last row; None before the first step."""
        return self._last_loss if self._sum is None else float(self._sum) / self._count

    def since_last(self, samples: int, seconds: float) -> tuple[float | None, float]:
        """Mean loss and samples a second up to here; the next row begins here."""
        loss = self.loss
        rate = (samples - self._samples) / max(seconds - self._seconds, 1e-9)
        self._sum, self._count, self._samples, self._seconds = None, 0, samples, seconds
        self._last_loss = loss
        return loss, rate
