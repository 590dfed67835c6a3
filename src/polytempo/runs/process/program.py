"""`perform`: the work of a process that knows only the run's `RunSpec`, its role, and the addresses of the others.

engine ── RunSpec, Role, setting (JSON) ──▶ python -m polytempo.worker ──▶ perform ──▶ result, or failure (JSON)
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from msgspec import structs

from polytempo.core.system.url_path import UrlPath
from polytempo.engines.engine import Result, Role
from polytempo.runs.calibration.measurement import CALIBRATION, calibration
from polytempo.runs.calibration.probe import PROBE, probe
from polytempo.runs.elastic.elastic_worker import train_member
from polytempo.runs.frame.launcher_filesystem import with_launcher_files
from polytempo.runs.process.host_mail import HostMailboxes, HostMemory
from polytempo.runs.run_collective import train_rank
from polytempo.runs.served.served_node import Setting, act
from polytempo.runs.served.served_program import ServedProgram
from polytempo.spec.run_spec import RunSpec
from polytempo.wire.keys import Keys


def perform(
    spec: RunSpec, role: Role, setting: Mapping[str, Any], host: str, memory: HostMemory | None = None
) -> Result:
    """Be `role` to the end. `setting` comes from the launcher; others reach this process at `host`.

    `memory` is shared with the other processes that one process of this host has forked.
    """
    if role.kind == PROBE:
        return probe()
    if role.kind == CALIBRATION:
        return calibration(spec.options.device)
    if role.kind == "member":
        return train_member(with_launcher_files(spec, setting), role.life, setting["rendezvous"])
    spec = with_launcher_files(spec, setting)
    if role.kind == "rank":
        return train_rank(spec)
    served = Setting.from_plain(setting)
    if isinstance(spec.options.out, UrlPath):
        served = structs.replace(served, record=None)  # a record grows by every message, and an object cannot grow
    program, keys = ServedProgram(spec, spec.topology(served.hosts)), Keys.from_plain(setting["keys"])
    node, address = setting["keeper"]
    mail = HostMailboxes(role.life, host, keys, program.plan.mail_bytes, (node, address), memory)
    return act(program, role, served, mail, None if memory is None else memory.arenas)
