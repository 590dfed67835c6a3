"""Learning rates: schedules by name, and a rate that follows scores."""
