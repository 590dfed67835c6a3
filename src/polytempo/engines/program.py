"""`perform`: what a process does that knows nothing but the run's `RunSpec`, its role, and where the others are.

engine ── RunSpec, Role, setting (JSON) ──▶ python -m polytempo.worker ──▶ perform ──▶ result, or failure (JSON)
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from polytempo.engines.elastic_worker import train_member
from polytempo.engines.engine import Result, Role
from polytempo.engines.mailbox_directory import MailboxStore
from polytempo.engines.rendezvous import Rendezvous
from polytempo.engines.run_collective import train_rank
from polytempo.engines.served_node import Setting, act
from polytempo.engines.served_program import ServedProgram
from polytempo.spec.run_spec import RunSpec
from polytempo.wire.keys import Keys


def perform(spec: RunSpec, role: Role, setting: Mapping[str, Any], host: str) -> Result:
    """Be `role` to the end. `setting` is what the run's own process says; `host` is where others reach this one."""
    if role.kind == "member":
        return train_member(spec, role.life, setting["rendezvous"])
    if role.kind == "rank":
        return train_rank(spec)
    program, rendezvous = ServedProgram(spec), Rendezvous.joined(setting["rendezvous"])
    mail = MailboxStore(rendezvous, host, Keys.from_plain(setting["keys"]), program.mail_bytes)
    return act(program, role, Setting.from_plain(setting), mail)
