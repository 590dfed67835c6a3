"""Layers with weights divided over ranks that see other samples, next to layers that every rank has whole."""

from polytempo.partition.hybrid.hybrid_model import DataGroup, HybridModel, divide
from polytempo.partition.hybrid.traffic import Exchange

__all__ = ["DataGroup", "Exchange", "HybridModel", "divide"]
