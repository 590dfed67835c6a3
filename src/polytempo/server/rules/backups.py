"""Backup workers by their number: a step waits for all members but `backups` of them."""

from __future__ import annotations

from functools import lru_cache

from polytempo.core.calls.call_name import call_name
from polytempo.core.rule import Action, Arrival, Rule, RuleState, Situation
from polytempo.server.rules.first_gradients import first


def all_but(backups: int) -> Rule:
    """`first(n)` with n = the members at the time less `backups`, at least 1. all_but(0) waits for all members."""
    if backups < 0:
        raise ValueError(f"all_but needs backups >= 0 workers, got {backups}")

    first_of = lru_cache(maxsize=8)(first)  # the members seldom change

    def receive(state: RuleState, arrival: Arrival, situation: Situation) -> tuple[RuleState, list[Action]]:
        return first_of(max(1, len(situation.members) - backups)).receive(state, arrival, situation)

    return first(1)._replace(name=call_name(all_but, locals()), receive=receive)
