"""A rank that leaves politely hands its residuals on, and their sum stays the same."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from helpers import CLUSTER
from polytempo.core import Bundle, Port
from polytempo.core.state import Residual, restored, saved
from polytempo.training.elastic.elastic_state import handed_over, residuals_by_path
from polytempo.worlds import VirtualWorld


def state_of(rank: int) -> Any:
    """The state of codecs with feedback: a residual for each tensor, and numbers. Rank 3 has only just joined."""
    if rank == 3:
        return (7, {"w": Residual(), "b": Residual()})
    return (7, {"w": Residual(torch.full((2, 3), 1.0 + rank)), "b": Residual(torch.tensor([10.0 * rank]))})


@pytest.mark.parametrize("leaving", [{0}, {2}, {0, 1}, {3}, {1, 3}, {0, 1, 2}, set[int](), {0, 1, 2, 3}])
def test_the_first_that_stays_takes_over_what_the_others_held_back(leaving: set[int]) -> None:
    layout = Bundle({"w": torch.zeros(2, 3), "b": torch.zeros(1)})

    async def program(port: Port) -> dict[str, Tensor | None]:
        own = state_of(port.rank)
        taken = await handed_over(port, residuals_by_path([("gradients", own)]), leaves=port.rank in leaving)
        mine = saved(own, "gradients")
        after = restored(own, mine, "gradients", layout, [mine] if taken is None else [mine, taken])
        return residuals_by_path([("gradients", after)])

    after = VirtualWorld(CLUSTER, 4).run(program).results
    staying = [rank for rank in range(4) if rank not in leaving]
    for path, key in (("gradients/1/w/0", "w"), ("gradients/1/b/0", "b")):
        before = [state_of(rank)[1][key].residual for rank in range(3)]
        kept = [after[rank][path] for rank in staying]
        found = sum((tensor for tensor in kept if tensor is not None), torch.zeros(()))
        if staying:
            assert torch.equal(found.expand_as(before[0]), before[0] + before[1] + before[2])
