"""`ClientStates`: tensors that clients keep between rounds, each at the worker that plays the client.

    round 3    worker 0 plays clients 17, 4        worker 1 plays 230
    round 4    worker 0 plays 230                  worker 1 plays 17       17's state moves to 1, and 230's to 0

A checkpoint has each worker's part. Another number of workers deals the parts by rank, as it does residuals. Between
rounds states are in the memory of the host, also where clients train on a device.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from polytempo.collectives import tree
from polytempo.core import Port
from polytempo.core.arithmetic.slice_tree import subtree
from polytempo.core.calls.refusals import refuse
from polytempo.core.state import Scalar
from polytempo.device import HOST
from polytempo.federated.client_store import ClientStore
from polytempo.federated.rounds import CONTROL
from polytempo.training.checkpoint.checkpoint_files import CheckpointPart
from polytempo.training.job.evaluate import OwnTensors

_PREFIX = "clients/"
_SERVER = f"{_PREFIX}server/"
_HOLDERS = f"{_PREFIX}holders"


class ClientStates:
    """The states of clients at this worker, the server's state, which all workers have, and the others' places."""

    def __init__(self, cohort: int, layout: Mapping[str, Tensor], server: Mapping[str, Tensor]) -> None:
        """`layout`: tensors like a client's, where clients train. `server`: the server's tensors at the beginning."""
        self._cohort, self._layout = cohort, {name: (each.shape, each.dtype) for name, each in layout.items()}
        self._devices = {name: each.device for name, each in layout.items()}
        self._holders: dict[int, int] = {}
        self.store, self.server = ClientStore(), dict(server)

    @property
    def personal(self) -> bool:
        """True if clients keep tensors of the model."""
        return any(not name.startswith(CONTROL) for name in self._layout)

    def holder(self, client: int, size: int) -> int:
        """The rank of `size` that has a client's tensors; for a client that has none any one."""
        return self._holders.get(client, client) % size

    def get(self, client: int) -> dict[str, Tensor]:
        """A client's tensors, where it trains; none before its first round."""
        return {name: each.to(self._devices[name]) for name, each in self.store.get(client).items()}

    def put(self, client: int, tensors: Mapping[str, Tensor]) -> None:
        """Keep a client's tensors, which may not change afterwards."""
        self.store.put(client, {name: each.to(HOST) for name, each in tensors.items()})

    async def fetch(self, port: Port, own: Mapping[int, int]) -> None:
        """Move the states of a round's clients to the workers that play them.

        `own`: this worker's places in the round, and their clients. Cost: 8 bytes a client of the round, and a state
        for each client that another worker has played last.
        """
        clients = torch.zeros(self._cohort, dtype=torch.float64)
        for place, client in own.items():
            clients[place] = client
        clients = await tree(port, clients)
        for rank in range(port.size):
            for place in subtree(self._cohort, port.size, rank):
                await self._move(port, int(clients[place]), rank)

    async def _move(self, port: Port, client: int, to: int) -> None:
        holder = self._holders.get(client, to)
        self._holders[client] = to
        if holder == to:
            return
        if holder == port.rank:
            state = self.store.get(client)
            self.store.drop(client)
            await port.send(torch.cat([_bytes_of(state[name]) for name in self._layout]), to)
        elif to == port.rank:
            sizes = [shape.numel() * dtype.itemsize for shape, dtype in self._layout.values()]
            wire = await port.recv(torch.empty(sum(sizes), dtype=torch.uint8), holder)
            pieces = zip(self._layout.items(), wire.split(sizes), strict=True)
            self.store.put(client, {n: piece.clone().view(dtype).view(shape) for (n, (shape, dtype)), piece in pieces})

    def saved(self, *, whole: bool) -> CheckpointPart:
        """This worker's part of a checkpoint. `whole`: with the server's state."""
        tensors = {f"{_PREFIX}{k}/{name}": each for k in self.store for name, each in self.store.get(k).items()}
        scalars: dict[str, Scalar] = {}
        if whole:
            tensors |= {f"{_SERVER}{name}": each for name, each in self.server.items()}
            scalars[_HOLDERS] = json.dumps(list(self._holders.items()))
        return CheckpointPart(tensors, scalars)

    def restore(self, whole: CheckpointPart, sources: Sequence[CheckpointPart], size: int) -> None:
        """Go on from a checkpoint, as one of `size` workers. `sources`: the parts that this worker takes over.

        A checkpoint without a record of clients is of a run that kept nothing of them. Where clients keep nothing
        either, the record begins with this run.
        """
        if _HOLDERS not in whole.scalars and not self._layout:
            return
        held = json.loads(str(whole.scalars[_HOLDERS]))
        self._holders = {client: rank % size for client, rank in held}
        for name, each in self.server.items():
            saved = whole.tensors[f"{_SERVER}{name}"]
            if saved.shape != each.shape:  # of numbers for each ticket: models are compared before
                refuse({"real clients", "other tickets"}, saved=len(saved), clients=len(each))
            each.copy_(saved)
        for part in sources:
            for client, tensors in clients_in(part).items():
                self.store.put(client, tensors)


class _OwnTensors:
    """Clients' parts of the model, at this process's ranks."""

    def __init__(self, states: Sequence[ClientStates]) -> None:
        self._states = states

    def holder(self, client: int, size: int) -> int:
        """The rank of `size` that scores a client."""
        return self._states[0].holder(client, size)

    def get(self, client: int) -> dict[str, Tensor]:
        """A client's part of the model; none for a client that never took part."""
        return next((found for each in self._states if (found := each.get(client))), {})


def own_tensors(states: Sequence[ClientStates | None]) -> OwnTensors | None:
    """The parts of the model that clients keep at the ranks of `states`; None where they keep none."""
    found = [each for each in states if each is not None and each.personal]
    return _OwnTensors(found) if found else None


def clients_in(part: CheckpointPart) -> dict[int, dict[str, Tensor]]:
    """The clients' states in a worker's part of a checkpoint."""
    found: dict[int, dict[str, Tensor]] = {}
    for path, tensor in part.tensors.items():
        if path.startswith(_PREFIX) and not path.startswith(_SERVER):
            client, name = path.removeprefix(_PREFIX).split("/", 1)
            found.setdefault(int(client), {})[name] = tensor
    return found


def _bytes_of(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)
