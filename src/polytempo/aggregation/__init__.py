"""How the ranks' updates become one: means, gossip, adaptive sums, robust merges, an outer optimizer."""

from polytempo.aggregation.adasum import adaptive_sum, adasum
from polytempo.aggregation.graphs import Graph, complete, exponential, random_pairs, ring_graph
from polytempo.aggregation.mean import mean
from polytempo.aggregation.mix import mix
from polytempo.aggregation.outer import from_anchor, nesterov
from polytempo.aggregation.robust import Merge, krum, median, merged, trimmed_mean

__all__ = [
    "Graph",
    "Merge",
    "adaptive_sum",
    "adasum",
    "complete",
    "exponential",
    "from_anchor",
    "krum",
    "mean",
    "median",
    "merged",
    "mix",
    "nesterov",
    "random_pairs",
    "ring_graph",
    "trimmed_mean",
]
