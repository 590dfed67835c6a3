"""Strategies as options of Lightning, accelerate and `transformers.Trainer`."""
