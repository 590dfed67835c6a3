"""The class of Ray's actors: one agent each. Ray pickles the name of this class, and texts as its arguments."""

from __future__ import annotations

from polytempo.engines.extras import required
from polytempo.engines.remote.held_agent import AgentHolder


class AgentActor(AgentHolder):
    """An actor with two threads: one holds the agent, the other answers."""

    def node(self) -> str:
        """The id of the Ray node that it is on."""
        return str(required("ray", "ray").get_runtime_context().get_node_id())
