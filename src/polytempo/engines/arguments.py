"""What `run` and `simulate` are given, refused at once where it is of the wrong kind."""

from __future__ import annotations

from polytempo.core import Strategy


def check_strategy(strategy: object) -> None:
    """ValueError where `strategy` is none: its text, say, or the function that makes one."""
    if not isinstance(strategy, Strategy):
        raise ValueError(
            f"a strategy is an object such as pt.strategies.downpour(), got {strategy!r}; "
            "pt.parse_strategy makes one of a text such as 'downpour(push_every=5)'"
        )
