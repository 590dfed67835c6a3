"""Large batches, well tuned: learning rates, optimizers and measures for many workers."""

from polytempo.large_batch.layer_wise import LAMB, LARS
from polytempo.large_batch.noise_scale import (
    NoiseScale,
    Squares,
    dynamic_batch,
    of_workers,
    sketch,
    speed_up,
    squares,
)
from polytempo.large_batch.rates import adam, cosine, falling, linear, polynomial, schedule, square_root, warm_up
from polytempo.large_batch.recipe import Recipe, decayed, firecaffe, norms_of_few, same_decay, zero_gains_
from polytempo.large_batch.sharpness import (
    Eigenvalue,
    churn,
    filter_direction,
    losses_around,
    losses_between,
    neighbourhood_loss,
    sharpness,
    top_eigenvalue,
)
from polytempo.large_batch.weight_average import WeightAverage

__all__ = [
    "LAMB",
    "LARS",
    "Eigenvalue",
    "NoiseScale",
    "Recipe",
    "Squares",
    "WeightAverage",
    "adam",
    "churn",
    "cosine",
    "decayed",
    "dynamic_batch",
    "falling",
    "filter_direction",
    "firecaffe",
    "linear",
    "losses_around",
    "losses_between",
    "neighbourhood_loss",
    "norms_of_few",
    "of_workers",
    "polynomial",
    "same_decay",
    "schedule",
    "sharpness",
    "sketch",
    "speed_up",
    "square_root",
    "squares",
    "top_eigenvalue",
    "warm_up",
    "zero_gains_",
]
