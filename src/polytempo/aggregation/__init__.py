"""How the ranks' updates become one: means, gossip, adaptive sums, low ranks, robust merges, an outer optimizer."""

from polytempo.aggregation.adasum import adaptive_sum, adasum
from polytempo.aggregation.graphs import Graph, complete, exponential_graph, random_pairs, ring_graph
from polytempo.aggregation.low_rank import low_rank
from polytempo.aggregation.mean import mean
from polytempo.aggregation.mix import mix
from polytempo.aggregation.outer import from_anchor, nesterov
from polytempo.aggregation.robust import bulyan, krum, median, merged, multi_krum, trimmed_mean
from polytempo.aggregation.vote import vote
from polytempo.core.merge import Merge

__all__ = [
    "Graph",
    "Merge",
    "adaptive_sum",
    "adasum",
    "bulyan",
    "complete",
    "exponential_graph",
    "from_anchor",
    "krum",
    "low_rank",
    "mean",
    "median",
    "merged",
    "mix",
    "multi_krum",
    "nesterov",
    "random_pairs",
    "ring_graph",
    "trimmed_mean",
    "vote",
]
