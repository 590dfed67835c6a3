"""Workers that meet in an object store: no address, no connection between them, only names and conditional puts."""
