"""Large batches, well tuned: learning rates, optimizers and measures for many workers."""

from polytempo.large_batch.churn import churn
from polytempo.large_batch.groups import decayed, zero_gains_
from polytempo.large_batch.lamb import LAMB
from polytempo.large_batch.lars import LARS
from polytempo.large_batch.noise_scale import NoiseScale, Squares, speed_up, squares
from polytempo.large_batch.rates import adam, cosine, falling, linear, polynomial, schedule, square_root, warm_up
from polytempo.large_batch.sharpness import sharpness

__all__ = [
    "LAMB",
    "LARS",
    "NoiseScale",
    "Squares",
    "adam",
    "churn",
    "cosine",
    "decayed",
    "falling",
    "linear",
    "polynomial",
    "schedule",
    "sharpness",
    "speed_up",
    "square_root",
    "squares",
    "warm_up",
    "zero_gains_",
]
