"""`ServedReplica`: one worker's copy of a model with parameters at a server, and a step's exchanges.

    gradients ──▶ strategy.gradients ──▶ .grad ──▶ optimizer.step, if there is an answer
                                                        │
    parameters ◀── strategy.parameters ◀────────────────┘        pushes and pulls happen in the two transforms

It performs nothing itself: its methods are coroutines for `server.worker.server_calls`.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from polytempo.core import Bundle, Port, State, Strategy, is_idle
from polytempo.core.state import settled
from polytempo.server.layout import Parameter
from polytempo.server.worker.client import Client
from polytempo.server.worker.transforms import fetched
from polytempo.training.model.running_statistics import Running
from polytempo.training.model.table_rows import ModelTables
from polytempo.training.model.trainable_parameters import trainable
from polytempo.training.precision.masters import Masters
from polytempo.training.served.shard_rule import parameters_of


class ServersModel(NamedTuple):
    """The server's model: parameters by name, and the running statistics of norms (None: there are none)."""

    values: Mapping[str, Tensor]
    running: Tensor | None


class Trained(NamedTuple):
    """A worker's trained parameters; workers that share a model without values share this, too."""

    parameters: dict[str, nn.Parameter]
    """Parameters but for tables."""
    tables: dict[str, nn.Parameter]
    """Parameters that travel by rows."""
    values: dict[str, Tensor]
    running: Running
    numel: int


def trained_of(
    model: nn.Module, optimizer: Optimizer, strategy: Strategy, parameters: Sequence[Parameter] | None = None
) -> Trained:
    """Errors: ValueError for parameters that cannot be pushed. `parameters`: as shards know them, if known."""
    found = parameters_of(model, optimizer, strategy) if parameters is None else parameters
    by_name = trainable(model, optimizer)
    dense = {p.name: by_name[p.name] for p in found if not p.row_width}
    tables = {p.name: by_name[p.name] for p in found if p.row_width}
    numel = sum(parameter.numel() for parameter in dense.values())
    return Trained(dense, tables, _detached(dense), Running(model), numel)


def _detached(parameters: Mapping[str, nn.Parameter]) -> dict[str, Tensor]:
    return {name: parameter.detach() for name, parameter in parameters.items()}


class ServedReplica:
    """The replica of `client`'s worker. Errors: ValueError for parameters that cannot be pushed.

    `masters`: the float32 parameters of a 16-bit model: pulls go there, and are rounded. Gradients that are not empty
    are exchanged inside of their `whole_step`, as float32. `trained`: the model's trained parameters, if known.
    """

    def __init__(
        self,
        port: Port,
        model: nn.Module,
        optimizer: Optimizer,
        strategy: Strategy,
        client: Client,
        masters: Masters | None = None,
        trained: Trained | None = None,
    ) -> None:
        self._port, self._strategy, self._client, self._masters = port, strategy, client, masters
        with self._in_float32():
            found = trained or trained_of(model, optimizer, strategy)
        self.has_tables = bool(found.tables)
        self._tables = ModelTables(found.tables)
        self._parameters = found.parameters
        self.values = found.values
        """The parameters but for tables, without autograd."""
        self.has_values = not any(value.is_meta for value in self.values.values())
        """False for tensors without values: gradients are as parameters are, and nothing is written to either."""
        self.numel = found.numel
        self._running = found.running
        client.running = self._running.vector
        self._gradients: State = None
        self._states: State = None
        self._layout = client.layout

    @property
    def is_outdated(self) -> bool:
        """True if shards have come or gone since the last fetch: gradients count from their versions."""
        return self._layout != self._client.layout

    @property
    def is_apart(self) -> bool:
        """True if the worker's parameters are its own (elastic averaging), not a copy of the server's: then news of the
        shards must leave them alone. A copy may as well become a newer one."""
        return is_idle(self._strategy.gradients, self._port.size + 1)

    def look_up(self) -> None:
        """Look up the parameters again, after a change of their memory."""
        with self._in_float32():
            self.values = _detached(self._parameters)

    def _in_float32(self) -> AbstractContextManager[None]:
        return nullcontext() if self._masters is None else self._masters.in_float32()

    def begin(self) -> None:
        """Let the strategy remember nothing yet."""
        layout = Bundle(self.values)
        self._gradients = self._strategy.gradients.init(layout)
        self._states = self._strategy.parameters.init(layout)

    async def fetch(self, clock: int, *, last: bool = False) -> None:
        """Take over the server's weights, after `clock` steps. `last`: the run's resulting ones, for work is over."""
        self._layout = self._client.layout
        self._client.resulting = self._client.last = last
        self._place(Bundle(self.values).with_flat(await self._port.pull(clock)))
        service = self._strategy.server
        has_regions = service is not None and service.rule.region_size > 0
        if last and has_regions and not any(self._client.versions) and not self._client.worker:
            print(
                f"note: the resulting parameters of {self._strategy} are the first ones, because no region has made "
                "enough pushes to give its movement; train for longer, or give a smaller every",
                file=sys.stderr,
            )

    async def renew(self, clock: int) -> None:
        """Fetch the weights, but keep the worker's own parameters."""
        if not self.is_apart:
            await self.fetch(clock)
            return
        own, running = {name: value.clone() for name, value in self.values.items()}, self._running.vector()
        await self.fetch(clock)
        self._place(Bundle(own))
        self._running.place(running)

    async def refresh(self, clock: int, *, last: bool = False) -> None:
        """Take over the server's weights between two steps; pulls that are under way count no more. `last`: as of
        `fetch`."""
        await self.settle()
        await self.fetch(clock, last=last)
        self._states = fetched(self._states)

    async def servers(self, clock: int) -> ServersModel:
        """The server's weights, in memory of their own; the worker's own stay as they are, and so does their age."""
        await self.settle()
        versions, self._client.resulting = list(self._client.versions), True
        flat = await self._port.pull(clock)
        self._client.versions[:] = versions
        views = Bundle(self.values).with_flat(flat.clone()).views
        return ServersModel(views, self._client.pulled_running())

    @contextmanager
    def lent(self, other: ServersModel) -> Iterator[None]:
        """Inside, the model has the other's values."""
        with self._in_float32():
            own = [(parameter, parameter.data) for parameter in self._parameters.values()]
            running = self._running.vector()
            for name, parameter in self._parameters.items():
                parameter.data = other.values[name]
            self._running.place(other.running)
            try:
                yield
            finally:
                for parameter, data in own:
                    parameter.data = data
                self._running.place(running)

    async def exchange_gradients(self, *, empty: bool) -> bool:
        """Exchange before the optimizer's step; returns True if it is to make one. An `empty` exchange has zeros for
        gradients."""
        bundle = Bundle(self._computed(empty=empty) if self.has_values else self.values)
        unused = [name for name, p in self._parameters.items() if empty or p.grad is None] if self.has_values else []
        if not self.is_apart:
            self._client.note_unused(unused)
        rows = [] if empty else self._tables.gradients()
        for one in rows:
            self._client.accrue(one)
        answer, self._gradients = await self._strategy.gradients.apply(self._port, bundle, self._gradients)
        if empty:
            return False
        self._point_at(answer, bundle, unused)
        if answer is None:
            self._tables.forget()
            return False
        self._tables.remember(rows)
        return True

    def _computed(self, *, empty: bool) -> dict[str, Tensor]:
        found = self._parameters.items()
        with self._in_float32():
            return {name: torch.zeros_like(p) if empty or p.grad is None else p.grad for name, p in found}

    async def exchange_parameters(self) -> None:
        """Exchange after the optimizer's step."""
        values = Bundle(self.values)
        changed, self._states = await self._strategy.parameters.apply(self._port, values, self._states)
        if changed is not None and changed is not values:
            self._place(changed)

    async def settle(self) -> None:
        """Wait for pushes and pulls that are under way."""
        self._gradients = await settled(self._gradients)
        self._states = await settled(self._states)

    def _point_at(self, answer: Bundle | None, given: Bundle, unused: Collection[str]) -> None:
        """Let the optimizer see the answer, if there is one; it leaves `unused` parameters alone."""
        if (answer is given and not given.packed) or not self.has_values:
            return
        for name, parameter in self._parameters.items():
            parameter.grad = None if answer is None or name in unused else answer.views[name]

    def _place(self, bundle: Bundle) -> None:
        if not self.has_values:
            return
        with torch.no_grad(), self._in_float32():
            if self.values:
                torch._foreach_copy_(list(self.values.values()), list(bundle.views.values()))
            self._tables.place(self._client.pulled_rows())
        self._running.place(self._client.pulled_running())
