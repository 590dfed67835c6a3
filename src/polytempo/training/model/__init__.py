"""What is trained: parameters, their names, their owners."""
