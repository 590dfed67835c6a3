"""Processes of this host: started, watched, ended, cleaned up after."""
