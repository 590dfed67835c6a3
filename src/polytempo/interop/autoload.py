"""`dist.init_process_group("polytempo")`: ranks of one host through shared memory, hosts through gloo.

torch finds `register` by the entry point `torch.backends`, so nothing of Polytempo has to be imported first. The rest
of the backend is loaded with the first group: `import torch` must not wait for it, nor meet a module half loaded.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist


def register() -> None:
    """Make "polytempo" known to torch.distributed. Does nothing where it is known already."""
    if dist.is_available() and "POLYTEMPO" not in dist.Backend._plugins:
        dist.Backend.register_backend("polytempo", _create, extended_api=True, devices=["cpu"])


def _create(options: Any, backend_options: Any) -> Any:
    from polytempo.interop.backend.create import create

    return create(options, backend_options)
