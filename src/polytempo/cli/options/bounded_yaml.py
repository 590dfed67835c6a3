"""YAML whose aliases cannot make much of little: `b: [*a, *a]`, `c: [*b, *b]`, … doubles with every line.

What is written is composed first, which keeps an alias a reference; only what is small with all aliases written out is
made into values.
"""

from __future__ import annotations

from typing import Any

import yaml

MAX_VALUES = 10_000
"""Keys and values in all, each alias counted as what it stands for."""
MAX_DEPTH = 50


def load(text: str) -> Any:
    """What `yaml.safe_load` gives. Errors: yaml.YAMLError; ValueError where it is too large or nested too deeply."""
    loader = yaml.SafeLoader(text)
    try:
        node = loader.get_single_node()
        if node is None:
            return None
        _size(node, {}, 0)
        return loader.construct_document(node)
    except RecursionError:
        raise ValueError(_TOO_DEEP) from None
    finally:
        loader.dispose()


_TOO_DEEP = f"it is nested more than {MAX_DEPTH} levels deep; options are names and plain values"


def _size(node: yaml.Node, known: dict[int, int], depth: int) -> int:
    """How many values `node` stands for. A node that is part of itself is found by its depth."""
    if depth > MAX_DEPTH:
        raise ValueError(_TOO_DEEP)
    if id(node) in known:
        return known[id(node)]
    size = 1
    if isinstance(node, yaml.MappingNode):
        size += sum(_size(part, known, depth + 1) for pair in node.value for part in pair)
    elif isinstance(node, yaml.SequenceNode):
        size += sum(_size(part, known, depth + 1) for part in node.value)
    if size > MAX_VALUES:
        raise ValueError(
            f"it stands for more than {MAX_VALUES:,} values with its aliases written out; write options without aliases"
        )
    known[id(node)] = size
    return size
