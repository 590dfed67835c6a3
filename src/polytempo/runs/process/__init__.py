"""The processes of a run on a host: its agent, the program of a process, and mailboxes that find each other."""
