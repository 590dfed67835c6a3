"""Sweeps: which settings give a job its best score? Each trial is an ordinary run."""
