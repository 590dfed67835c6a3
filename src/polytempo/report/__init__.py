"""Reports of runs for people: progress, metrics, the report page and the picture.

Import the modules one by one: matplotlib is loaded only where a picture is made.
"""
