"""`polytempo strategies`."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from textwrap import fill
from typing import NamedTuple

from polytempo.cli.look.look_options import StrategiesOptions
from polytempo.cli.options.show import show_json, show_table
from polytempo.spec.text.catalogue import CODECS, NAMES, STRATEGIES, WIRE_ROUTES
from polytempo.spec.text.resolution import Function, signature_of

WIDTH = 120


class Entry(NamedTuple):
    """A strategy, a codec or a wire route as the list shows it."""

    name: str
    signature: str
    summary: str
    source: str
    kind: str = "strategy"


def strategies(asked: StrategiesOptions) -> None:
    """Print every strategy, then every codec that `codec=` takes: its call, its effect, and its paper."""
    found = [
        *_entries("strategy", {**STRATEGIES, "then": NAMES.then}, signature_of),
        *_entries("strategy of clients", {**NAMES.federated, **NAMES.private}, signature_of),
        *_entries("codec", CODECS, signature_of),
        *_entries("wire route", WIRE_ROUTES, lambda function: str(function.__name__)),
    ]
    if asked.json:
        show_json([entry._asdict() for entry in found])
        return
    for kind in ("strategy", "strategy of clients", "codec", "wire route"):
        rows = [(entry.signature, entry.summary, entry.source) for entry in found if entry.kind == kind]
        if kind != "strategy":
            print()
        if sys.stdout.isatty():
            show_table((kind, "what it does", "source"), rows)
        else:
            _show_paragraphs(kind, rows)
    takers = [name for name, function in STRATEGIES.items() if WIRE_ROUTES.keys() <= NAMES.routes_of(function).keys()]
    takers_line = f"route=… takes wire routes in {', '.join(takers) or 'no strategy'}"
    print(f"\ncodec=… takes codecs\n{fill(takers_line, WIDTH)}")


def _show_paragraphs(kind: str, rows: Sequence[tuple[str, str, str]]) -> None:
    """Print paragraphs for a file or pipe: columns would be too wide. The signature stands alone, for grep."""
    print(f"{kind}: call, effect, source")
    indent = "    "
    for signature, *about in rows:
        print(f"\n{fill(signature, WIDTH, subsequent_indent=2 * indent)}")
        for text in filter(None, about):
            print(fill(text, WIDTH, initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False))


def _entries(kind: str, table: Mapping[str, Function], written: Callable[[Function], str]) -> list[Entry]:
    return [
        described(name, function)._replace(kind=kind, signature=written(function)) for name, function in table.items()
    ]


def described(name: str, function: Function) -> Entry:
    """The docstring's first line, and the paragraph that begins with `Source:`, else its module's."""
    own = inspect.getdoc(function) or ""
    module = inspect.getmodule(function)
    return Entry(
        name,
        signature_of(function),
        own.partition("\n")[0],
        source_in(own) or source_in((module and inspect.getdoc(module)) or ""),
    )


def source_in(docstring: str) -> str:
    """The rest of the paragraph that begins with `Source:`, on one line; empty without one."""
    _, found, after = f"\n{docstring}".partition("\nSource:")
    return " ".join(after.partition("\n\n")[0].split()) if found else ""
