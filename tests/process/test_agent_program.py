"""An agent's work before its processes train."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

pytestmark = pytest.mark.process

LONG_S = 120.0
AGENT = """
import json, sys
from polytempo.runs.process import agent
import torch

def serve_head(ticket, parent):
    known = set(sys.modules)
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.{optimizer}(model.parameters(), lr=0.1)
    optimizer.zero_grad()
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    print(json.dumps(sorted(set(sys.modules) - known)))

agent.AgentTicket.read = lambda path: None
agent.serve_head = serve_head
{change}
sys.exit(agent.be_agent(0))
"""


def loaded_by_a_step(optimizer: str, change: str = "") -> list[str]:
    """The modules that the first step of training loads in an agent that has just begun to serve."""
    code = AGENT.format(optimizer=optimizer, change=change)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, timeout=LONG_S)
    found: list[str] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize("optimizer", ["SGD", "AdamW"])
def test_an_agent_has_loaded_what_a_first_step_needs(optimizer: str) -> None:
    """The agent forks its processes, so none of them imports anything in a step, which would be training time."""
    assert loaded_by_a_step(optimizer) == []


def test_without_that_a_first_step_imports_much() -> None:
    assert len(loaded_by_a_step("SGD", "agent._warm_up = lambda: None")) > 10
