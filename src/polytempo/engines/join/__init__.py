"""A process that a launcher started finds its world here."""
