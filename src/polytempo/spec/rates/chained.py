"""`Chained`: torch's ChainedScheduler with `last_epoch`, the number of its steps, as every other schedule has it."""

from __future__ import annotations

from torch.optim.lr_scheduler import ChainedScheduler


class Chained(ChainedScheduler):
    """A chain that knows its place, so that it can follow rounds, epochs and a run that goes on."""

    last_epoch: int

    @classmethod
    def of(cls, made: ChainedScheduler) -> Chained:
        """`made`, which must not be used afterwards, at its beginning."""
        found = cls.__new__(cls)
        found.__dict__.update({"last_epoch": 0} | made.__dict__)
        return found

    def step(self) -> None:  # type: ignore[override]  # without torch's deprecated argument, as its base
        """Step each of the chain, and count."""
        super().step()
        self.last_epoch += 1
