"""What this machine does: ours beside its peers and the limit, measured in turns in the same processes."""
