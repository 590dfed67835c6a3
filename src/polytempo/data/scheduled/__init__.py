"""Data for scheduled programs: synthetic data of any size, and readers."""

from polytempo.data.scheduled.samples import (
    classes,
    correlated,
    correlated_classes,
    drawn_documents,
    drawn_ratings,
    scenes,
    table,
    word_counts,
)

__all__ = [
    "classes",
    "correlated",
    "correlated_classes",
    "drawn_documents",
    "drawn_ratings",
    "scenes",
    "table",
    "word_counts",
]
