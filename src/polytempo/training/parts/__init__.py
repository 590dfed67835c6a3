"""Which part of a model is a rank's: stages, split layers, branches, hybrids."""
