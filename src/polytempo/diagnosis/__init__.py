"""Diagnoses of a run: the rank that holds the others up, and the part of a step that takes the time.

Decisions are functions of numbers; `host_sample` reads `/proc`, and nothing else here does.
"""
