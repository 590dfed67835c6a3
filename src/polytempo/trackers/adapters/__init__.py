"""One file for each library: its calls behind the four of `Tracker`. Each is imported when a run asks for it."""
