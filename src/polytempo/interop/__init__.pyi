"""The public names of this package, each with its home. `__init__.py` reads this file."""

from polytempo.interop.averaging_rounds import map_reduce as map_reduce
from polytempo.interop.ddp_hook import comm_hook as comm_hook
from polytempo.interop.facts_of_exchange import ExchangeMeter as ExchangeMeter
from polytempo.interop.facts_of_exchange import accelerate_tracker as accelerate_tracker
from polytempo.interop.facts_of_exchange import add_to_trainer as add_to_trainer
from polytempo.interop.facts_of_exchange import lightning_callback as lightning_callback
from polytempo.native.arena import shared_empty as shared_empty
