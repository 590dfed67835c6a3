"""The surroundings of every run: its checked arguments (`engine="ssh:n1,n2"`), folder, logs, live status and page."""
