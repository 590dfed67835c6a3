"""What scheduled programs learn from: synthetic data of any size, and readers."""

from polytempo.data.scheduled.documents import drawn_documents, scenes
from polytempo.data.scheduled.ratings import drawn_ratings, word_counts
from polytempo.data.scheduled.regression import classes, correlated, correlated_classes, table

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
