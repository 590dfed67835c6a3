"""`ParameterCodecState`: a transform's state by parameter, for buckets that DDP cuts, and cuts again.

step 1   [ w3 b3 w2 ] [ b2 w1 b1 ]      DDP's first guess
step 2   [ b3 w3 ] [ b2 w2 b1 w1 ]      as gradients arrived: every bucket takes the parts of its parameters along
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from torch import Tensor

from polytempo.core import Bundle, Port, State, Transform
from polytempo.core.state import Saved, restored, saved, settled

_PATH = "gradients"


class _Left(NamedTuple):
    """The state of a bucket that is gone, and its heirs: parameters that have not asked for it yet."""

    state: Saved
    names: set[str]


class ParameterCodecState:
    """The states of a transform's buckets. A bucket is known by its parameters' names, in their order."""

    def __init__(self, transform: Transform) -> None:
        self.transform = transform
        self._states: dict[tuple[str, ...], State] = {}
        self._left: list[_Left] = []
        self._shapes: dict[str, list[int]] = {}
        self._only: Mapping[str, Any] | None = None
        """The shapes of the parameters that a loaded state is of."""

    async def apply(self, port: Port, bundle: Bundle) -> Bundle | None:
        """Run the transform over a bucket, whether it is known already, new, or cut out of others."""
        key = tuple(bundle.names)
        if key not in self._states:
            await self._leave(set(key))
            self._states[key] = self._begun(bundle)
        answer, self._states[key] = await self.transform.apply(port, bundle, self._states[key])
        return answer

    async def _leave(self, names: set[str]) -> None:
        """Buckets that one of `names` moves out of are gone."""
        for other in [key for key in self._states if names & set(key)]:
            self._left.append(_Left(saved(await settled(self._states.pop(other)), _PATH), set(other)))

    def _begun(self, bundle: Bundle) -> State:
        """The state of a new bucket, from the state of its parameters in others."""
        self._check(bundle.tensors)
        names = set(bundle.names)
        layout = Bundle(bundle.tensors)
        state = self.transform.init(layout)
        sources = [left for left in self._left if left.names & names]
        for left in sources:
            left.names.difference_update(names)
        self._left = [left for left in self._left if left.names]
        self._shapes |= {name: list(tensor.shape) for name, tensor in bundle.tensors.items()}
        return restored(state, _union([left.state for left in sources]), _PATH, layout) if sources else state

    def _check(self, tensors: Mapping[str, Tensor]) -> None:
        for name, tensor in tensors.items():
            shape = list(tensor.shape)
            if self._only is not None and self._only.get(name) != shape:
                raise ValueError(
                    f"the state that was loaded has {name!r} as {self._only.get(name)}, but it is {shape}; "
                    "was it saved for another model, or with model=… in one run and without in the other?"
                )

    async def settle(self) -> None:
        """Finish the exchanges under way, so that the state can be saved."""
        for key, state in self._states.items():
            self._states[key] = await settled(state)

    def save(self) -> dict[str, Any]:
        """Shapes, tensors and numbers by parameter, in memory of their own. Settle first."""
        tensors, scalars = _union(
            [left.state for left in self._left] + [saved(s, _PATH) for s in self._states.values()]
        )
        return {
            "shapes": {**(self._only or {}), **self._shapes},
            "tensors": {path: tensor.clone() for path, tensor in tensors.items()},
            "scalars": scalars,
        }

    def load(self, state: Mapping[str, Any]) -> None:
        """Go on from the value of `save`; each bucket takes its part when its next gradients come."""
        self._states = {}
        self._shapes = {}
        self._only = dict(state["shapes"])
        tensors = {path: tensor.clone() for path, tensor in state["tensors"].items()}
        self._left = [_Left(Saved(tensors, dict(state["scalars"])), set(self._only))] if self._only else []


def _union(states: list[Saved]) -> Saved:
    found = Saved({}, {})
    for tensors, scalars in states:
        found.tensors.update(tensors)
        found.scalars.update(scalars)
    return found
