"""One process: it submits, awaits and performs operations; its settings, logs and timeline."""
