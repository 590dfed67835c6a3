"""`NormGrowth`: a batch that grows where the norm test fails, in the same step of every rank and of every run.

take a step ── was it looked at? ──▶ rows of all ranks ──▶ averages ──▶ does the test fail? ──▶ a larger batch
"""

from __future__ import annotations

import json

from torch import Tensor

from polytempo.core import Port
from polytempo.data.shard import DataShard
from polytempo.large_batch.noise_scale import dynamic_batch
from polytempo.spec.batch_growth import NormTest
from polytempo.spec.run_spec import RunSpec
from polytempo.training.step.noise_watch import NoiseWatch
from polytempo.training.step.replica import Replica

_FEWEST_LOOKS = 10
"""What has grown never shrinks, so a batch waits until its noise is known."""
_MOST_TIMES = 2
"""What a batch is multiplied by at a time, at most: the averages are of gradients before it has grown."""


class HeldRow:
    """The row of the step that was just made, until the program exchanges it: a `NoisePost` for runs that need it."""

    def __init__(self) -> None:
        self.row: Tensor | None = None

    def post(self, watch: NoiseWatch, row: Tensor) -> None:
        """See `NoisePost`."""
        self.row = row

    def finish(self, watch: NoiseWatch) -> None:
        """See `NoisePost`: nothing is under way."""


class NormGrowth:
    """One rank's batch, as `spec.batch_growth.norm_test` says. All ranks make one, at the beginning of a run.

    `watch` looks at the gradients, and hands its rows to this from now on. `shard`: its batch is the first one. The
    state is equal on all ranks after each step.
    """

    def __init__(self, test: NormTest, watch: NoiseWatch, shard: DataShard) -> None:
        self._theta, self._watch, self._held = test.theta, watch, HeldRow()
        watch.rows_to(self._held)
        self._first = self.global_batch_size = shard.global_batch_size

    async def grows(self, data: Port, shard: DataShard) -> bool:
        """After a step: whether the shard has a larger batch from now on. All ranks of `data` call it."""
        row, self._held.row = self._held.row, None
        if row is None:
            return False
        self._watch.take(await data.all_gather(row))
        noise = self._watch.noise
        if noise.steps < _FEWEST_LOOKS or shard.num_samples is None:
            return False
        wanted = dynamic_batch(self.global_batch_size, noise.simple, self._theta)
        most = min(_MOST_TIMES * self.global_batch_size, shard.num_samples)
        return self._set(min(-(-wanted // self._first) * self._first, most // self._first * self._first), shard)

    def _set(self, batch: int, shard: DataShard) -> bool:
        if batch <= self.global_batch_size:
            return False
        self.global_batch_size = batch
        shard.grow(batch, batch // self._first)
        return True

    def saved(self) -> str:
        """All that a resumed run needs, as text."""
        return json.dumps({"batch": self.global_batch_size, "watch": self._watch.state()})

    def restore(self, text: str, step: int, shard: DataShard) -> None:
        """Go on with what `saved` returned after so many steps, perhaps with other workers, so another first batch."""
        state = json.loads(text)
        self._watch.restore(state["watch"], step)
        self._set(-(-state["batch"] // self._first) * self._first, shard)


def norm_growth(spec: RunSpec, replica: Replica, shard: DataShard) -> NormGrowth | None:
    """A rank's part of the test by which the run's batches grow; None where the options have none."""
    test = spec.options.batch_growth
    if not isinstance(test, NormTest):
        return None
    assert replica.noise is not None, "the options ask for looks"
    return NormGrowth(test, replica.noise, shard)
