"""The traffic of each layer by data and by model parallelism, and the smaller of the two."""

from polytempo.partition.plan.choice import LayerPlan, PlannedLayer, Reduction, ScalingLaw, chosen
from polytempo.partition.plan.split_choice import SplitLayerPlan, SplitPlan, given_plan, split_plan
from polytempo.partition.plan.volume import LayerVolume, volumes

__all__ = [
    "LayerPlan",
    "LayerVolume",
    "PlannedLayer",
    "Reduction",
    "ScalingLaw",
    "SplitLayerPlan",
    "SplitPlan",
    "chosen",
    "given_plan",
    "split_plan",
    "volumes",
]
