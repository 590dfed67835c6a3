"""The models of other groups, as they were when groups exchanged them last."""

from __future__ import annotations

from typing import NamedTuple

from polytempo.core import Bundle, Cost, Exchange, Port, Promise, Sent, Transform
from polytempo.core.cost import num_bytes

GROUP = "group"
"""The mesh's axis over ranks of the same place, one in each group."""


class PeerModelsState(NamedTuple):
    """The number of exchanges between groups, and the other groups' parameters, in the order of groups."""

    exchanges: int
    models: tuple[Bundle, ...]


def peer_models(groups: int) -> Transform:
    """Remember the parameters of ranks of the same place in other groups; this rank's stay as they are.

    Cost: an all-gather of the parameters over the groups; memory for (groups - 1) copies.
    """

    def init(parameters: Bundle) -> PeerModelsState:
        return PeerModelsState(0, tuple(parameters.copy() for _ in range(groups - 1)))

    async def apply(port: Port, bundle: Bundle, state: PeerModelsState) -> tuple[Bundle | None, PeerModelsState]:
        across = port.along(GROUP)
        found = await across.all_gather(bundle.flat.clone())
        others = tuple(bundle.with_flat(flat.clone()) for rank, flat in enumerate(found) if rank != across.rank)
        return bundle, PeerModelsState(state.exchanges + 1, others)

    def cost(parameters: Bundle, num_ranks: int) -> Cost:
        """The cost of the ranks of one group."""
        each = (groups - 1) * num_bytes(parameters)
        sent = Sent(num_ranks, num_ranks * each, busiest_bytes=each, rounds=groups - 1)
        return Cost((Exchange("peer_models", sent),), memory_bytes=each)

    return Transform(init, apply, Promise.SEPARABLE | Promise.WEIGHS, cost)
