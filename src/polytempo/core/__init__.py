"""The vocabulary: operations as data, ports, bundles, transforms, strategies. Imports nothing of the rest."""

from polytempo.core.bundle import Bundle
from polytempo.core.calls.call_name import call_name
from polytempo.core.codec import ALONE, Codec, CodecState, EncodeContext, Facts, Law
from polytempo.core.cost import Cost, Exchange, Sent, Steps, Sum
from polytempo.core.driver import WAITING, Task, interpreted
from polytempo.core.errors import Deadlock, Drifted, Mismatch, NotFinite, PeerLost, PolytempoError, TimedOut
from polytempo.core.mesh import Mesh
from polytempo.core.op import Op, Program, Work
from polytempo.core.port import Port, world_port
from polytempo.core.route import Price, Route, native
from polytempo.core.state import Late, Residual
from polytempo.core.strategy import Strategy, Turn
from polytempo.core.transform import (
    Promise,
    State,
    Transform,
    averaging,
    chain,
    identity,
    inside,
    is_idle,
    split,
    stateless,
)

__all__ = [
    "ALONE",
    "WAITING",
    "Bundle",
    "Codec",
    "CodecState",
    "Cost",
    "Deadlock",
    "Drifted",
    "EncodeContext",
    "Exchange",
    "Facts",
    "Late",
    "Law",
    "Mesh",
    "Mismatch",
    "NotFinite",
    "Op",
    "PeerLost",
    "PolytempoError",
    "Port",
    "Price",
    "Program",
    "Promise",
    "Residual",
    "Route",
    "Sent",
    "State",
    "Steps",
    "Strategy",
    "Sum",
    "Task",
    "TimedOut",
    "Transform",
    "Turn",
    "Work",
    "averaging",
    "call_name",
    "chain",
    "identity",
    "inside",
    "interpreted",
    "is_idle",
    "native",
    "split",
    "stateless",
    "world_port",
]
