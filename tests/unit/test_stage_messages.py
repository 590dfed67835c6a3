"""`StageMessages`: a received tensor begins at an address that torch would give it."""

from __future__ import annotations

from collections.abc import Coroutine
from typing import Any

import pytest
import torch
from torch import Tensor

from polytempo.core.op import Recv
from polytempo.server.timing import Timing
from polytempo.server.worker.stage_messages import StageMessages, StageTensor


class OneMessage:
    """A port with `value`, a message of node 1."""

    world_rank = 0

    def __init__(self, value: Tensor) -> None:
        self.value = value

    async def now(self) -> float:
        return 0.0

    async def take(self, wait_s: float) -> tuple[int, StageTensor]:
        return 1, StageTensor(1, 0, 0, 0, self.value)


def value_of(program: Coroutine[Any, Any, Tensor]) -> Tensor:
    """The value of a coroutine that awaits nothing."""
    with pytest.raises(StopIteration) as end:
        program.send(None)
    found: Tensor = end.value.value
    return found


@pytest.mark.parametrize("begin", [0, 1, 9, 16])
def test_a_received_tensor_is_where_products_round_alike(begin: int) -> None:
    """Products of activations in a message of ZeroMQ differed by a bit from run to run."""
    values = torch.arange(48.0)[begin : begin + 32]
    messages: Any = StageMessages
    stages: StageMessages = messages(OneMessage(values), (0, 1), 1, Timing())
    found = value_of(stages.perform(Recv(torch.empty(32), 1)))
    assert found.data_ptr() % 64 == 0
    assert torch.equal(found, values)
