"""Models of 16-bit parameters with float32 masters: who has which bits, and when."""
