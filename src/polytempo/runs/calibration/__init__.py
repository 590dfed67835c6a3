"""Measurements of a cluster's processors, memory and links in training: `polytempo calibrate`."""
