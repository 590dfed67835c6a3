"""Rules as text, as a strategy's name and the command line have them: `*.up: column, *.out: row(heads=8)`."""

from __future__ import annotations

import re
from collections.abc import Mapping

from polytempo.partition.tensor.rules import Rules
from polytempo.partition.tensor.way import Way, column, row, way_of

EXAMPLE = 'rules are a dictionary such as {"*.up": "column", "*.down": "row"}'
_RULE = re.compile(r"\s*([^\s,:]+)\s*:\s*(\w+)\s*(?:\(([^()]*)\))?\s*(?:,|$)")
_OPTION = re.compile(r"(heads|packed|gather)\s*=\s*(\d{1,6}|[Tt]rue|[Ff]alse)")


def rules_of(given: Rules | str) -> dict[str, Way]:
    """Rules that are given as text, or as they are. Errors: ValueError for what is none, and for no rule at all."""
    if isinstance(given, str):
        found = _parsed(given)
    elif isinstance(given, Mapping):
        found = {pattern: way_of(way) for pattern, way in given.items()}
    else:
        raise ValueError(f"{EXAMPLE}, not {given!r}")
    if not found:
        raise ValueError('no rule says which layers are split; give some, such as {"*.up": "column", "*.down": "row"}')
    return found


def rule_text(rules: Mapping[str, Way]) -> str:
    """The text that `rules_of` reads again. ValueError for a pattern that a text cannot hold."""
    odd = next((pattern for pattern in rules if not re.fullmatch(r"[^\s,:]+", pattern)), None)
    if odd is not None:
        raise ValueError(f"pattern {odd!r} of a rule has a space, a comma or a colon, which no layer's name has")
    return ", ".join(f"{pattern}: {way}" for pattern, way in rules.items())


def _parsed(text: str) -> dict[str, Way]:
    found: dict[str, Way] = {}
    at = 0
    while at < len(text.rstrip()):
        match = _RULE.match(text, at)
        if match is None:
            raise ValueError(
                f"{text[at:].strip()!r} is no rule; rules are written '*.up: column, *.out: row(heads=8)': a layer's "
                "name or a pattern, a colon, a way"
            )
        if match[1] in found:
            raise ValueError(f"the rules have {match[1]!r} twice; drop one")
        found[match[1]] = _way(match[2], match[3])
        at = match.end()
    return found


def _way(name: str, options: str | None) -> Way:
    if options is None:
        return way_of(name)
    given: dict[str, int | bool] = {}
    for each in options.split(",") if options.strip() else []:
        match = _OPTION.fullmatch(each.strip())
        if match is None:
            raise ValueError(f"{each.strip()!r} is no option of a way; there are heads=8, packed=3 and gather=True")
        given[match[1]] = int(match[2]) if match[2].isdigit() else match[2].lower() == "true"
    if name not in ("column", "row"):
        raise ValueError(f"the way {name!r} has no options; write {name!r} alone")
    try:
        return column(**given) if name == "column" else row(**given)  # type: ignore[arg-type]
    except TypeError:
        raise ValueError(
            f"row has the option heads alone, and column heads, packed and gather; got {options}"
        ) from None
