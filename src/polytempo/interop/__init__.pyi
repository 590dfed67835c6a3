"""The public names of this package, each with its home. `__init__.py` reads this file."""

from polytempo.interop.averaging_rounds import map_reduce as map_reduce
from polytempo.interop.ddp_hook import comm_hook as comm_hook
from polytempo.native.arena import shared_empty as shared_empty
