"""The command line: `polytempo train`, `compare`, `simulate`, `doctor`, `strategies`."""
