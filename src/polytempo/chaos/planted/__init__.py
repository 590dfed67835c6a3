"""Bugs to plant, so that the checkers can prove that they see."""
