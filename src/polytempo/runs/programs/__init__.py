"""Runs with a program of their own: L-BFGS, scheduled parameters, Hogwild! on linear models."""
