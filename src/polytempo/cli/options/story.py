"""The commands under headings, as `polytempo --help` shows them."""

from __future__ import annotations

from typing import Any

from typer.core import TyperGroup

STORY = {
    "Run": ("init", "train", "compare", "sweep", "schedule", "submit", "horovodrun"),
    "Federate": ("tickets", "serve", "client"),
    "Look": ("ui", "top", "runs", "report", "strategies", "explain", "look", "sharpness", "replay"),
    "Use a trained model": ("evaluate", "predict", "export", "compress"),
    "Predict a run": ("simulate", "plan", "cut", "profile", "calibrate", "validate"),
    "Tune and test": ("tune", "doctor", "bench", "chaos"),
}
"""The commands as `--help` shows them: train, look, simulate, plan."""


class Story(TyperGroup):
    """A group with its commands under the headings of `STORY`."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """A section for each heading, with a line for each command."""
        limit = formatter.width - 6 - max(map(len, self.commands))
        for heading, names in STORY.items():
            with formatter.section(heading):
                formatter.write_dl([(name, self.commands[name].get_short_help_str(limit)) for name in names])
