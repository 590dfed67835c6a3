"""`dist.init_process_group("polytempo")`: ranks of one host through shared memory, hosts through gloo.

torch finds `register` by the entry point `torch.backends`, so nothing of Polytempo has to be imported first.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch.distributed as dist


@dataclass(frozen=True)
class Options:
    """`dist.init_process_group("polytempo", pg_options=Options(order="tree"))`.

    `order`: how sums are added within a host, see `native.group.Group`.
    """

    order: Literal["linear", "tree"] = "linear"


def register() -> None:
    """Make "polytempo" known to torch.distributed. Does nothing where it is known already."""
    if dist.is_available() and "POLYTEMPO" not in dist.Backend._plugins:
        dist.Backend.register_backend("polytempo", _create, extended_api=True, devices=["cpu"])


def _create(options: Any, backend_options: Any) -> dist.ProcessGroup:
    from polytempo.torch.backend.create import create  # `import torch` runs `register` and must stay quick

    return create(options, backend_options or Options())
