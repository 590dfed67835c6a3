"""Rounds of clients that are machines of their own: their tickets, their server, and a client."""
