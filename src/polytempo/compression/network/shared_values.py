"""A few values that stand for many: k-means of numbers.

Source: S. Lloyd, "Least squares quantization in PCM", 1982; equally spread first centroids: S. Han, H. Mao, W. Dally,
"Deep compression: compressing deep neural networks with pruning, trained quantization and Huffman coding", 2016,
section 3.2.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

_MOST_ROUNDS = 300


class SharedValues(NamedTuple):
    """Values (n,) as members of clusters."""

    centroids: Tensor
    """(C,), ascending, of the values' dtype; each has members."""
    members: Tensor
    """(n,), int64: the cluster of each value."""


def shared_values(values: Tensor, most: int) -> SharedValues:
    """Clusters of `values` (n,), at most `most`, so that Σ (w - c)² is small: Lloyd's rounds in float64.

    The first centroids are evenly spread from the smallest value to the largest, so that the few large weights, which
    count most, have centroids near them. Each round gives a value to the nearest centroid and moves each centroid to
    its members' mean, until no member changes, or for 300 rounds. Clusters without members are left out at the end.
    No round makes the sum larger. Cost: n log C for each round.
    """
    wide = values.double()
    if not len(wide):
        return SharedValues(values.clone(), torch.zeros(0, dtype=torch.int64))
    centroids = torch.linspace(float(wide.min()), float(wide.max()), most, dtype=torch.float64)
    members = _nearest(wide, centroids)
    for _ in range(_MOST_ROUNDS):
        # an empty cluster stays; its neighbours' means are on its two sides, so the order stays, too
        centroids = torch.where(torch.bincount(members, minlength=most) > 0, means(wide, members, most), centroids)
        moved = _nearest(wide, centroids)
        if torch.equal(moved, members):
            break
        members = moved
    used, members = members.unique(return_inverse=True)
    return SharedValues(means(wide, members, len(used)).to(values.dtype), members)


def means(values: Tensor, members: Tensor, num_clusters: int) -> Tensor:
    """The mean (C,), float64, of each cluster's values (n,); NaN where it has none. Equal values have that mean."""
    sums = torch.bincount(members, weights=values.double(), minlength=num_clusters)
    return sums / torch.bincount(members, minlength=num_clusters)


def _nearest(values: Tensor, centroids: Tensor) -> Tensor:
    return torch.bucketize(values, (centroids[1:] + centroids[:-1]) / 2)
