"""Independent branches of a model on several threads."""

from polytempo.partition.branches.parts import BranchedModel, BranchTask, Region
from polytempo.partition.branches.threads import ThreadedModel, Threads, threads

__all__ = ["BranchTask", "BranchedModel", "Region", "ThreadedModel", "Threads", "threads"]
