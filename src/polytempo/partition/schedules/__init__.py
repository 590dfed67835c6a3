"""Orders of work for the stages of a pipeline: one pure function for each schedule of the literature."""

from polytempo.partition.schedules.action import Action, Schedule
from polytempo.partition.schedules.correction import Correction, Estimation, PipeMare, SpecTrain, pipemare, spectrain
from polytempo.partition.schedules.late_orders import (
    ddg,
    features_replay,
    pipedream,
    pipedream_2bw,
    pipelined_backprop,
    synthetic_gradients,
)
from polytempo.partition.schedules.waiting_orders import gpipe, interleaved, one_f_one_b, zero_bubble

__all__ = [
    "Action",
    "Correction",
    "Estimation",
    "PipeMare",
    "Schedule",
    "SpecTrain",
    "ddg",
    "features_replay",
    "gpipe",
    "interleaved",
    "one_f_one_b",
    "pipedream",
    "pipedream_2bw",
    "pipelined_backprop",
    "pipemare",
    "spectrain",
    "synthetic_gradients",
    "zero_bubble",
]
