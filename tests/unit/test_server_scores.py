"""What is scored of a parameter server: the shards' parts of one snapshot, in whatever order they come."""

from __future__ import annotations

import torch
from torch import Tensor

from polytempo.server.evaluator import Evaluator
from polytempo.server.layout import Span
from polytempo.server.message import Shown

CHAINS = ((2,), (3,))
COORDINATOR, EVALUATOR = 4, 5


def shown(shard: int, number: int) -> Shown:
    """Shard s has element s of the parameters, and running statistics of its own: shards mix in pushes in any order."""
    value = torch.tensor([float(shard)])
    return Shown(shard, number, 0.0, (Span(shard, shard + 1),), value, value.double() + 10)


def test_the_running_statistics_are_the_first_shards_whichever_comes_first() -> None:
    """A replay could not tell otherwise; and what workers pull is the first one's, too."""
    scored: list[tuple[int, list[float], Tensor | None]] = []

    def score(number: int, seconds: float, flat: Tensor, running: Tensor | None) -> bytes:
        scored.append((number, flat.tolist(), running))
        return b"{}"

    for order in ((0, 1), (1, 0)):
        evaluator = Evaluator(EVALUATOR, COORDINATOR, CHAINS, 2, torch.float32, score)
        for shard in order:
            evaluator.receive(0.0, CHAINS[shard][0], shown(shard, 8))
        assert scored.pop() == (8, [0.0, 1.0], torch.tensor([10.0], dtype=torch.float64)), f"order {order}"
