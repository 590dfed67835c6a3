"""`ElasticState`: the state of a loop of one's own that survives lost workers and goes to newcomers."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from polytempo.core import Port
from polytempo.training.checkpoint.optimizer_state import load_exactly
from polytempo.training.elastic.elastic_state import broadcast_json, hand_over_model

_OWN = ("model", "optimizer", "commit", "restore", "keep", "hand_over", "arrive", "callbacks", "goes_on")


class ElasticState:
    """A model, its optimizer, and values by name, for `pt.elastic`.

        state = pt.training.ElasticState(model, optimizer, epoch=0, position=None)
        state.epoch += 1

    `commit` keeps a copy of it all in memory; after a change of workers all go on from their last common commit.
    Values must suit JSON. Memory: a copy of the model and of the optimizer's state. Cost of a commit: that
    copy, and an all-reduce of 32 bytes.
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer, **values: Any) -> None:
        if taken := set(_OWN) & set(values):
            raise ValueError(f"{', '.join(sorted(taken))}: the state has something of that name; use another name")
        self.model, self.optimizer = model, optimizer
        self._names = ("callbacks", *values)
        self.callbacks, self.goes_on = "", False
        """The states of the loop's callbacks at the last commit, and True where an earlier group has begun the loop."""
        for name, value in values.items():
            setattr(self, name, value)
        self.arrive: Callable[[], None] | None = None
        """Comes to the commit point, where there is a group of workers."""
        self.keep()

    def commit(self) -> None:
        """Keep the present state, together with all workers. They call it at the same places of their loops.

        Before a change of the group it raises an exception that ends the loop, and `pt.elastic` begins the loop again:
        let it pass.
        """
        if self.arrive is None:
            self.keep()
        else:
            self.arrive()

    def keep(self) -> None:
        """Keep the present state, on this worker alone."""
        with torch.no_grad():
            model = {name: tensor.detach().clone() for name, tensor in self.model.state_dict().items()}
        self._kept = (model, copy.deepcopy(self.optimizer.state_dict()), copy.deepcopy(self._values()))

    def restore(self) -> None:
        """Go back to the last commit."""
        model, optimizer, values = self._kept
        self.model.load_state_dict(model)
        load_exactly(self.optimizer, copy.deepcopy(optimizer))
        for name, value in copy.deepcopy(values).items():
            setattr(self, name, value)

    async def hand_over(self, port: Port, newcomers: frozenset[int]) -> None:
        """Give rank 0's state to `newcomers`. All ranks call it."""
        await hand_over_model(port, self.model, self.optimizer, newcomers)
        values = await broadcast_json(port, self._values())
        if port.rank in newcomers:
            for name, value in values.items():
                setattr(self, name, value)
            self.keep()

    def _values(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self._names}
