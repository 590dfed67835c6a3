"""A recorded run with a parameter server once more, to the same bits."""
