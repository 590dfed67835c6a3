"""A copy of a shard of a loop of one's own: forked beside rank 0, or by the agent of a rank that serves."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import accumulate
from typing import Any

from polytempo.engines.engine import Role
from polytempo.runs.process.host_mail import HostMailboxes
from polytempo.runs.served.served_node import Mailboxes, Setting, joined_mail
from polytempo.server.loop import serve
from polytempo.server.message import View
from polytempo.server.snapshots.snapshot import begin_with
from polytempo.training.own_loop.loop_facts import LOOP_FORMAT, LoopFacts
from polytempo.wire.keys import Keys


def is_loop(text: Mapping[str, Any]) -> bool:
    """True if an agent's `Welcome` is for a loop of one's own, and not for a job."""
    return text.get("format") == LOOP_FORMAT


def hold_shard_of(
    text: Mapping[str, Any], data: bytes, role: Role, setting: Mapping[str, Any], host: str
) -> dict[str, Any]:
    """Be `role` in this process, which others reach at `host`. `data`: `LoopFacts.blobs` together."""
    first, second, _ = accumulate(text["sizes"])
    facts = LoopFacts.from_plain(text, data[:first], data[first:second], data[second:])
    now, (node, address) = Setting.from_plain(setting), setting["keeper"]
    mail = HostMailboxes(role.life, host, Keys.from_plain(setting["keys"]), facts.plan.mail_bytes, (node, address))
    return hold_shard(facts, role, now.view, mail, now.zero_s)


def hold_shard(facts: LoopFacts, role: Role, view: View, mail: Mailboxes, zero_s: float) -> dict[str, Any]:
    """Be a copy of a shard until the loop ends. `zero_s`: the zero of the run's clock, on the monotonic one."""
    plan = facts.plan
    shard = plan.shard(role.shard, view.spans)
    if facts.states and not role.blank:
        begin_with(shard, facts.states[role.shard])
    node = plan.copy(role.node, shard, blank=role.blank)
    with joined_mail(mail, role.node, plan, zero_s, max_events=0) as (line, world):
        for to, message in node.receive(world.now_s(), plan.topology.coordinator, view):
            line.post(to, message)
        world.drive(serve(world.port, node))
    return {}
