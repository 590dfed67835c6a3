"""What is around every run: its folder, logs, live status and page."""
