"""Pushes of one host's workers, summed before they travel."""
