"""Callbacks: objects that a run calls while it goes on, and that may ask for its end, a checkpoint or an evaluation."""

from __future__ import annotations

from polytempo.spec.callbacks.callback import Callback, CallbackFacts, Control
from polytempo.spec.callbacks.early_stop import early_stop
from polytempo.spec.callbacks.export import export
from polytempo.spec.callbacks.keep import keep
from polytempo.spec.callbacks.median_stop import median_stop
from polytempo.spec.callbacks.time_budget import time_budget

__all__ = ["Callback", "CallbackFacts", "Control", "early_stop", "export", "keep", "median_stop", "time_budget"]
