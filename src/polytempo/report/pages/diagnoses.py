"""The sentences about a run's slow ranks and its bound, for the page and the command line."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_MOST_SLOW = 5


def diagnoses(result: Mapping[str, Any]) -> list[str]:
    """A sentence for each slow rank of the run, at most 5, and one for its bound. Results from before have none."""
    slow = {str(each.get("who")): str(each.get("text", "")) for each in result.get("diagnoses") or ()}
    said = [f"{text[:1].upper()}{text[1:]}." for text in slow.values()]
    if len(said) > _MOST_SLOW:
        said = [*said[:_MOST_SLOW], f"{len(said) - _MOST_SLOW} more were found slow."]
    bound = (result.get("bound") or {}).get("text")
    return [*said, str(bound)] if bound else said
