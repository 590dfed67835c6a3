"""How the processes of a run find each other's mailboxes."""
