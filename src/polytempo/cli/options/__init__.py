"""Options of the command line, their readers, and the output of commands."""
