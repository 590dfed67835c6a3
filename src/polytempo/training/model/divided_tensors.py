"""How a rank's tensors were cut, as a checkpoint has it."""

from __future__ import annotations

import json
from collections.abc import Mapping

from polytempo.partition.tensor.division import Division

Cuts = Mapping[str, Division]
"""By the whole model's names, of those tensors that are cut."""
PARTS = "parts"
"""The scalar that says how a rank's tensors were cut."""


def described(number: int, cut: Cuts) -> str:
    """How the model is cut and which part this is."""
    cuts = {name: [how.dim, list(how.sizes), how.packed] for name, how in cut.items()}
    return json.dumps({"number": number, "cut": cuts})


def cuts_of(described: str) -> tuple[int, dict[str, Division]]:
    """The number of the part and the cuts that `described` has told. KeyError, TypeError or ValueError for another."""
    told = json.loads(described)
    cut = {
        str(name): Division(int(dim), tuple(int(size) for size in sizes), int(packed))
        for name, (dim, sizes, packed) in told["cut"].items()
    }
    return int(told["number"]), cut
