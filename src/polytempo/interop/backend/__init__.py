"""A torch.distributed backend: `dist.init_process_group("polytempo")`. Nothing here needs to be imported for it."""

from polytempo.interop.backend.create import Options

__all__ = ["Options"]
