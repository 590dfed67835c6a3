"""`Regions`: weights of their own for groups of workers, beside the shard's, which their movements change.

workers 0, 1 ──push──▶ φ of region 0 ──movement──▶ θ, the shard's own
             ◀─pull──                ◀──share a──
workers 2, 3 ──push──▶ φ of region 1 ──movement──▶
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from torch import Tensor

from polytempo.core.rule import Add, DropRegion, RegionAction
from polytempo.server.snapshots.state import WeightsState, state_of
from polytempo.server.tensors.holder import Admission
from polytempo.server.tensors.weights import Weights


class RegionWeights(NamedTuple):
    """A region's weights φ, the checks of its workers' pushes, and φ₀, the beginning of its movement."""

    weights: Weights
    admission: Admission
    begun: Tensor


class Regions:
    """Regions of `size` workers, each with weights that `hold()` makes from the shard's own as they are then. 0: none.

    Memory of each region: its weights, its optimizer's moments, φ₀, and a buffer for each older version that a worker
    holds.
    """

    def __init__(self, size: int, hold: Callable[[], tuple[Weights, Admission]]) -> None:
        self.size, self._hold = size, hold
        self._regions: dict[int, RegionWeights] = {}

    def of(self, worker: int) -> tuple[Weights, Admission]:
        """The weights of the region of a worker that has joined, and the checks of pushes."""
        weights, admission, _ = self._regions[worker // self.size]
        return weights, admission

    def weights_of(self, region: int) -> Weights:
        """The weights of `region`."""
        return self._regions[region].weights

    def __iter__(self) -> Iterator[RegionWeights]:
        """The regions in the order of their numbers."""
        return (region for _, region in sorted(self._regions.items()))

    def join(self, worker: int) -> None:
        """`worker` is known from now on; its region begins, if it is not there."""
        if self.size and worker // self.size not in self._regions:
            self._regions[worker // self.size] = self._begun()

    def perform(self, action: RegionAction, center: Weights) -> bool:
        """Perform `action` on its region and on `center`, the shard's own weights. True if these have changed."""
        if isinstance(action, DropRegion):
            del self._regions[action.region]
            return False
        weights, _, begun = self._regions[action.region]
        center.add(begun - weights.present, center.weigh(Add(action.region, rate=action.rate), ()))
        center.update(1.0)
        weights.blend(center.present, action.share)
        begun.copy_(weights.present)
        return True

    def keep_sums(self) -> None:
        """Lent gradients are read no more."""
        for weights, _, _ in self._regions.values():
            weights.keep_sum()

    # ------------------------------------------------------------------ the whole state

    def dump(self) -> dict[int, WeightsState]:
        """The state of each region; its tensors are not copied."""
        return {number: state_of(r.weights, {}, r.begun)[0] for number, r in sorted(self._regions.items())}

    def load(self, states: dict[int, WeightsState]) -> None:
        """Become the regions that `dump` was called on."""
        self._regions = {}
        for number, state in states.items():
            assert state.begun is not None, "every region has it"
            region = self._begun()
            state.put_(region.weights, [])
            region.begun.copy_(state.begun)
            self._regions[number] = region

    def spare(self) -> Iterable[Tensor]:
        """All memory of the regions' weights."""
        return [tensor for weights, _, _ in self._regions.values() for tensor in weights.spare()]

    def _begun(self) -> RegionWeights:
        weights, admission = self._hold()
        return RegionWeights(weights, admission, weights.present.clone())
