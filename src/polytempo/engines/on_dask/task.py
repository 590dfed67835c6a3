"""The code that runs on dask's workers: a task that holds one agent, and the call that ends it."""

from __future__ import annotations

import asyncio
from typing import Any

from polytempo.engines.extras import required
from polytempo.engines.remote.held_agent import AGENT, AgentHolder

_LOOK_S = 1.0
_WANTED = ("executing", "long-running")
_SERVING = ("init", "running", "paused")

_held: dict[str, AgentTask] = {}
"""The tasks of this process by their keys."""


class AgentTask(AgentHolder):
    """Holds an agent as long as dask wants its task: not cancelled, on a worker that is not closing."""

    def __init__(self, key: str, worker: Any, module: str = AGENT) -> None:
        super().__init__(module)
        self._key, self._worker = key, worker

    def unwanted(self) -> bool:
        """True once the task was cancelled, or its worker closes."""
        task = self._worker.state.tasks.get(self._key)
        return task is None or task.state not in _WANTED or self._worker.status.name not in _SERVING


def hold_agent(key: str, ticket: str, module: str = AGENT) -> str:
    """The task `key`: an agent of a run. How it ended, in words."""
    distributed = required("distributed", "dask")
    task = _held[key] = AgentTask(key, distributed.get_worker(), module)
    try:
        distributed.secede()  # an agent takes none of the worker's places for tasks
        return task.hold(ticket, _LOOK_S)
    finally:
        del _held[key]


async def end_agent(key: str) -> None:
    """End the agent of the task `key`, if it is here. `Client.run` calls it beside the worker's tasks."""
    if key in _held:
        await asyncio.to_thread(_held[key].end)
