"""Measuring what a cluster's processors, memory and links do in training: `polytempo calibrate`."""
