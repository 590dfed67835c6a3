"""Advice for an error from a lack of memory in a process with a limited address space."""

from __future__ import annotations

import re
import resource

_LACK = re.compile(r"MemoryError|alloc|out of memory|start new thread|no shared memory", re.IGNORECASE)


def address_space_advice(said: str) -> str:
    """A sentence with the remedy; "" without a limit, or if `said`, an error's name and text, has another subject."""
    most, _ = resource.getrlimit(resource.RLIMIT_AS)
    if most == resource.RLIM_INFINITY or "ulimit -v" in said or not _LACK.search(said):
        return ""
    return (
        f"Each process may have {most / 1e9:,.2f} GB of address space (ulimit -v): raise that limit (ulimit -v "
        "unlimited), or take a smaller model."
    )
