"""Models cut over workers, and the order of the workers' work."""

from polytempo.partition import scheduled, schedules
from polytempo.partition.branches import threads
from polytempo.partition.cut import Cut, Stage, Value
from polytempo.partition.cutting import cut
from polytempo.partition.schedules import Schedule
from polytempo.partition.striping import striped, unstriped

__all__ = ["Cut", "Schedule", "Stage", "Value", "cut", "scheduled", "schedules", "striped", "threads", "unstriped"]
