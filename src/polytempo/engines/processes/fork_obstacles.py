"""`fork_obstacles`: a process's past that keeps its forks from computing on a device, or from computing gradients."""

from __future__ import annotations

import sys
from collections.abc import Set

from polytempo.device import accelerator_in_use, gradients_after_fork


def fork_obstacles(*, uses_device: bool) -> set[str]:
    """Features of this process that keep forks of it from computing, as the table of refusals names them.

    `uses_device`: True if the forks may use a device.
    """
    used = uses_device and accelerator_in_use()
    return {*(["device in use"] if used else []), *([] if gradients_after_fork() else ["gradients"])}


def say_interpreters(what: str, why: Set[str]) -> None:
    """Say on standard error that processes are not forks, and the reason."""
    facts = "has used the accelerator" if "device in use" in why else "has computed gradients beside an accelerator"
    print(f"note: this process {facts}, so {what}, not forks", file=sys.stderr)
