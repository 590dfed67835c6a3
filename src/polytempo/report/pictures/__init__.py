"""Figures and pictures of runs."""
