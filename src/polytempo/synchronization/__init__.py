"""Times of exchanges: every H steps or by a rule, until or after a step, late, behind steps between, by fragments."""

from polytempo.synchronization.delayed import delayed, overlapped
from polytempo.synchronization.every import after, every, rarer, until
from polytempo.synchronization.fragments import behind, blended, fragments
from polytempo.synchronization.period_rules import PeriodRule, by_loss, by_rate, by_time, by_variance, growing

__all__ = [
    "PeriodRule",
    "after",
    "behind",
    "blended",
    "by_loss",
    "by_rate",
    "by_time",
    "by_variance",
    "delayed",
    "every",
    "fragments",
    "growing",
    "overlapped",
    "rarer",
    "until",
]
