"""Commands of rounds with clients on machines of their own."""
