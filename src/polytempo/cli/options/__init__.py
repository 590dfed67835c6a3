"""What can be typed, and how it is read."""
