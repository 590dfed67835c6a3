"""The mailboxes of a run's processes, which find each other on one host or on several."""
