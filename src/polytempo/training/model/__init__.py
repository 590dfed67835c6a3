"""The trained model: its parameters, their holders, and their random numbers."""
