"""Merges of the ranks' updates: means, gossip, adaptive sums, low ranks, robust merges, an outer optimizer."""

from polytempo.aggregation.adasum import adaptive_sum, adasum
from polytempo.aggregation.centered_clip import centered_clip
from polytempo.aggregation.directions import frozen_adam, orthogonal_momentum, signs
from polytempo.aggregation.graphs import Graph, complete, exponential_graph, random_pairs, random_targets, ring_graph
from polytempo.aggregation.low_rank import low_rank
from polytempo.aggregation.low_rank_directions import low_rank_directions
from polytempo.aggregation.mean import mean, moving_average, senders_mean
from polytempo.aggregation.mix import mix, mix_anchors, push_sum
from polytempo.aggregation.outer import from_anchor, heavy_ball, nesterov, quasi_global
from polytempo.aggregation.outer_optimizers import adam, delayed_nesterov, schedule_free
from polytempo.aggregation.peer_models import peer_models
from polytempo.aggregation.rare_variance import rare_variance
from polytempo.aggregation.robust import bulyan, krum, median, merged, multi_krum, nearest_to_median, trimmed_mean, vote
from polytempo.core.arithmetic.merge import Merge

__all__ = [
    "Graph",
    "Merge",
    "adam",
    "adaptive_sum",
    "adasum",
    "bulyan",
    "centered_clip",
    "complete",
    "delayed_nesterov",
    "exponential_graph",
    "from_anchor",
    "frozen_adam",
    "heavy_ball",
    "krum",
    "low_rank",
    "low_rank_directions",
    "mean",
    "median",
    "merged",
    "mix",
    "mix_anchors",
    "moving_average",
    "multi_krum",
    "nearest_to_median",
    "nesterov",
    "orthogonal_momentum",
    "peer_models",
    "push_sum",
    "quasi_global",
    "random_pairs",
    "random_targets",
    "rare_variance",
    "ring_graph",
    "schedule_free",
    "senders_mean",
    "signs",
    "trimmed_mean",
    "vote",
]
