"""What a run leaves for people: progress while it works, metrics, the report page and the picture.

Import the modules one by one: plotly and matplotlib are loaded only where a page or a picture is made.
"""
