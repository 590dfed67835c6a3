"""One layer on several ranks: by outputs, by inputs, by rows of a table, by heads, by places."""

from polytempo.partition.tensor.layers.cross_entropy import split_cross_entropy
from polytempo.partition.tensor.layers.locally_connected import LocallyConnected2d
from polytempo.partition.tensor.model_group import ModelGroup
from polytempo.partition.tensor.rules import Rules, apply_rules
from polytempo.partition.tensor.split_model import SplitModel
from polytempo.partition.tensor.way import Way, column, places, row

__all__ = [
    "LocallyConnected2d",
    "ModelGroup",
    "Rules",
    "SplitModel",
    "Way",
    "apply_rules",
    "column",
    "places",
    "row",
    "split_cross_entropy",
]
