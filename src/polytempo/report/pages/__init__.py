"""The report page, section by section."""
