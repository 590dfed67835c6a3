"""Routes of a sum. Each takes a flat buffer and returns the sum over all ranks.

| route | steps | bytes from the busiest rank | time |
|---|---|---|---|
| `ring` | 2(N-1) | 2(N-1)/N · K | 2(N-1)α + 2(N-1)/N · K/B |
| `tree` | 2⌈log₂N⌉ | ⌈log₂N⌉ · K | 2⌈log₂N⌉(α + K/B) |
| `halving_doubling` | 2log₂N | 2(N-1)/N · K | 2log₂N · α + 2(N-1)/N · K/B |
| `star` | 2 | (N-1) · K | 2α + 2(N-1) · K/B |
| `hierarchical` | the tree's within a host, `between`'s between hosts | | |
| `invariant` | 2(N-1) | 2(N-1)/N · K | 2(N-1)α + 2(N-1)/N · K/B |
| `native` | the world's own | | |
"""

from polytempo.collectives.halving import halving_doubling, halving_doubling_price
from polytempo.collectives.hierarchy import hierarchical, hierarchical_price
from polytempo.collectives.invariant import invariant
from polytempo.collectives.ring import ring, ring_price
from polytempo.collectives.tree import star, star_price, tree, tree_price
from polytempo.core.route import native

__all__ = [
    "halving_doubling",
    "halving_doubling_price",
    "hierarchical",
    "hierarchical_price",
    "invariant",
    "native",
    "ring",
    "ring_price",
    "star",
    "star_price",
    "tree",
    "tree_price",
]
