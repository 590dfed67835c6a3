"""`ClientTests`: the test samples of all clients, and the spread of the clients' accuracies.

client      0     0     1     1     1     2        samples held out of each client's own, one client behind the other
right       1     0     1     1     1     0
accuracy       ½           1              0        min 0, median ½, max 1
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, final

import torch
from torch import Tensor
from torch.utils.data import Dataset


@final
class ClientTests(Dataset[Any]):
    """The test samples of clients as one data set, in the order of clients."""

    def __init__(self, dataset: Dataset[Any], parts: Sequence[Tensor]) -> None:
        """`parts`: the numbers of each client's test samples in `dataset`; some may be empty, but not all."""
        self._dataset, self._rows = dataset, torch.cat(list(parts))
        self.num_clients = len(parts)
        self._client_of = torch.repeat_interleave(torch.tensor([len(part) for part in parts]))
        """The client of each sample, shape (samples,)."""
        ends = torch.tensor([0, *(len(part) for part in parts)]).cumsum(0).tolist()
        self.ranges = list(pairwise(ends))
        """The first sample of each client, and the end of its samples."""
        if not len(self._rows):
            raise ValueError("no client has a test sample; hold out a larger part, or use fewer clients")

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, number: int) -> Any:
        return self._dataset[int(self._rows[number])]

    def counts(self, first: int, right: Tensor, samples: int) -> Tensor:
        """[right predictions, predictions] of each client in the `samples` from number `first` on, shape (2, clients),
        float64. `right`: (samples, …). ValueError for predictions that are of no sample."""
        if right.dim() == 0 or len(right) != samples:
            raise ValueError(
                f"a client's accuracy needs an answer of correct for each sample, and it has the shape "
                f"{tuple(right.shape)} for {samples} samples; let its first dimension be the samples"
            )
        each = right.detach().to("cpu", torch.float64).reshape(samples, -1)
        found = torch.zeros(2, self.num_clients, dtype=torch.float64)
        clients = self._client_of[first : first + samples]
        found[0].index_add_(0, clients, each.sum(1))
        found[1].index_add_(0, clients, torch.full((samples,), each.shape[1], dtype=torch.float64))
        return found


def spread(counts: Tensor) -> dict[str, float]:
    """The distribution of the accuracies of clients that have test samples, from `ClientTests.counts` of all of them.

    `clients/min`, `/p10`, `/median`, `/p90`, `/max`: quantiles over clients; `/mean`: the mean, where each client
    counts alike; `/std`: the standard deviation, smaller for a fairer model. Empty without predictions.
    """
    right, number = counts
    accuracies = right[number > 0] / number[number > 0]
    if not len(accuracies):
        return {}
    places = {"min": 0.0, "p10": 0.1, "median": 0.5, "p90": 0.9, "max": 1.0}
    found = {name: float(torch.quantile(accuracies, place)) for name, place in places.items()}
    found |= {"mean": float(accuracies.mean()), "std": float(accuracies.std(correction=0))}
    return {f"clients/{name}": value for name, value in found.items()}
