"""Commands that show: strategies, versions, the state of this machine, planted failures."""
