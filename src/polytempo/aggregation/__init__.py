"""Merges of the ranks' updates: means, gossip, adaptive sums, low ranks, robust merges, an outer optimizer."""

from polytempo.aggregation.adasum import adaptive_sum, adasum
from polytempo.aggregation.graphs import Graph, complete, exponential_graph, random_pairs, random_targets, ring_graph
from polytempo.aggregation.low_rank import low_rank
from polytempo.aggregation.mean import mean, moving_average
from polytempo.aggregation.mix import mix, push_sum
from polytempo.aggregation.outer import from_anchor, heavy_ball, nesterov
from polytempo.aggregation.peer_models import peer_models
from polytempo.aggregation.robust import bulyan, krum, median, merged, multi_krum, trimmed_mean, vote
from polytempo.core.arithmetic.merge import Merge

__all__ = [
    "Graph",
    "Merge",
    "adaptive_sum",
    "adasum",
    "bulyan",
    "complete",
    "exponential_graph",
    "from_anchor",
    "heavy_ball",
    "krum",
    "low_rank",
    "mean",
    "median",
    "merged",
    "mix",
    "moving_average",
    "multi_krum",
    "nesterov",
    "peer_models",
    "push_sum",
    "random_pairs",
    "random_targets",
    "ring_graph",
    "trimmed_mean",
    "vote",
]
