"""Scheduled model parallelism: a program decides in each round which parameters are updated together."""

from polytempo.partition.scheduled.coordinate_descent import lasso, logistic
from polytempo.partition.scheduled.factorization import factorization
from polytempo.partition.scheduled.lda import lda
from polytempo.partition.scheduled.program import ScheduledJob, ScheduledProgram, SweepReport, performed

__all__ = [
    "ScheduledJob",
    "ScheduledProgram",
    "SweepReport",
    "factorization",
    "lasso",
    "lda",
    "logistic",
    "performed",
]
