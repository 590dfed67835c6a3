"""Commands that predict: explain, calibrate, validate, plan."""
