"""`Arrivals`: an asynchronous server's buffers as a pure function of a seed.

time      ──────────────────────────────────────────▶
client 3  ████████░                  arrives in buffer 0 with a model of version 0
client 8  ██████████████████░        arrives in buffer 1 with a model of version 0: age 1
client 5           ████░             begins when client 3 arrives
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import NamedTuple, final

import numpy as np

from polytempo.federated.sampling import durations, generator


class ClientArrival(NamedTuple):
    """A client's movement at the server."""

    client: int
    age: int
    """Updates of the server between the client's model and this buffer."""
    at: float
    """Time, in units of a sample's training on the median client."""


@final
class Arrivals:
    """The buffers of a server that has `concurrency` clients in training at any time, and updates by `size` arrivals.

    A client begins when another arrives, with the newest model: drawn from those not in training and not in the buffer.
    Arrivals older than `oldest` updates are thrown away, and so are others with probability `lost`.
    Cost: memory and time for each buffer up to the asked one.
    """

    def __init__(
        self,
        sizes: Sequence[int],
        size: int,
        concurrency: int,
        oldest: int,
        sigma: float,
        seed: int,
        lost: float = 0.0,
    ) -> None:
        """ValueError for fewer clients than are in training and in a buffer together."""
        if len(sizes) < size + concurrency:
            raise ValueError(
                f"{concurrency} clients in training and {size} in a buffer are more than the {len(sizes)} that there "
                "are; give a smaller cohort or concurrency"
            )
        self._size, self._oldest, self._sigma, self._lost = size, oldest, sigma, lost
        self._random, self._times = generator(seed, "arrivals"), durations(sizes, sigma, seed)
        self._free = list(range(len(sizes)))
        self._training: list[tuple[float, int, int, int]] = []
        self._begun = 0
        self._buffers: list[list[ClientArrival]] = []
        for _ in range(concurrency):
            self._begin(0.0)

    def buffer(self, number: int) -> list[ClientArrival]:
        """The arrivals of an update, in their order."""
        while len(self._buffers) <= number:
            self._fill()
        return self._buffers[number]

    def _begin(self, now: float) -> None:
        client = self._free.pop(int(self._random.integers(len(self._free))))
        end = now + self._times[client] * float(np.exp(self._sigma * self._random.standard_normal()))
        heapq.heappush(self._training, (end, self._begun, client, len(self._buffers)))
        self._begun += 1

    def _fill(self) -> None:
        found: list[ClientArrival] = []
        while len(found) < self._size:
            now, _, client, version = heapq.heappop(self._training)
            age = len(self._buffers) - version
            if age > self._oldest or (self._lost and self._random.random() < self._lost):
                self._free.append(client)
            else:
                found.append(ClientArrival(client, age, now))
            if len(found) < self._size:
                self._begin(now)
        self._buffers.append(found)
        self._free += [each.client for each in found]
        self._begin(found[-1].at)
