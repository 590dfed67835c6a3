"""Sphinx's configuration of the documentation: `make docs` builds it into build/docs."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "extensions"))

from polytempo import __version__

project = "Polytempo"
author = "The Polytempo developers"
project_copyright = author
version = release = __version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "api_pages",
    "command_line",
    "repository_pages",
    "inline_pictures",
    "refusal_page",
    "options_page",
]
exclude_patterns = ["extensions", "pictures"]
source_suffix = {".md": "markdown"}
nitpicky = False  # signatures name types of torch, which is not documented here
suppress_warnings = ["ref.python"]  # a type that two public modules export has two targets

myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 4
highlight_language = "text"

default_role = "code"
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_preserve_defaults = True
python_maximum_signature_line_length = 88

html_theme = "furo"
html_title = "Polytempo"
html_static_path = ["static"]
html_css_files = ["polytempo.css"]
html_copy_source = False
html_show_sourcelink = False
html_show_sphinx = False
html_theme_options = {
    "light_css_variables": {"color-brand-primary": "#1f5fa8", "color-brand-content": "#1f5fa8"},
    "dark_css_variables": {"color-brand-primary": "#7fb2ec", "color-brand-content": "#7fb2ec"},
}
