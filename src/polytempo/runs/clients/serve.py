"""`serve`: a run in rounds of clients on machines of their own. It is one process, and sees no data of clients."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Unpack

import torch
from torch.utils.data import Dataset

from polytempo.core import Strategy
from polytempo.core.calls.refusals import refuse
from polytempo.federated.real_clients import RoundRules
from polytempo.federated.rounds import unserved
from polytempo.federated.secure_sum import primitives
from polytempo.report.status.progress import Progress
from polytempo.runs.clients.client_messages import ClientWelcome
from polytempo.runs.clients.round_server import RoundServer
from polytempo.runs.clients.tickets import TicketRoster, url_of
from polytempo.runs.frame.arguments import checked_job
from polytempo.runs.frame.run_page import reported, show_rows
from polytempo.spec.job import Job
from polytempo.spec.result import Result
from polytempo.spec.run_options import OptionKeywords, RunOptions, with_keywords
from polytempo.spec.run_spec import RunSpec
from polytempo.spec.text.catalogue import parse_strategy, strategy_from
from polytempo.training.federated.client_movements import most_wire_bytes
from polytempo.training.federated.local_passes import LocalPasses
from polytempo.training.federated.noise_record import NoiseRecord
from polytempo.training.federated.remote_rounds import RemoteData
from polytempo.training.job.evaluate import tensors_of
from polytempo.training.model.randomness import caller_state_kept, kept_random_states
from polytempo.training.trainer import Trainer


@caller_state_kept()
def serve(
    job: Job | str,
    strategy: Strategy | str,
    keys: str | Path,
    *,
    listen: str = "127.0.0.1:7777",
    test: Dataset[Any] | None = None,
    rules: RoundRules | None = None,
    options: RunOptions | None = None,
    on_listening: Callable[[str], None] | None = None,
    progress: Progress | None = None,
    **more: Unpack[OptionKeywords],
) -> Result:
    """Train `job` by `strategy` with the clients of `keys`, which dial in; see `polytempo.federated.serve`."""
    job, strategy = checked_job(job), strategy_from(strategy)
    options, rules, roster = with_keywords(options, more), rules or RoundRules(), TicketRoster(keys)
    _check_strategy(strategy, rules, len(roster.members))
    rounds = strategy.rounds
    assert rounds is not None
    admitted, needed = sum(not each.revoked for each in roster.members), rules.there or rounds.number
    if rounds.privacy is None and admitted < needed:
        refuse({"real clients", "too few"}, found=admitted, when="have a ticket", needed=needed, places=rounds.number)
    spec = RunSpec.of(job, strategy, 1, options)
    with kept_random_states():
        passes = LocalPasses(spec, rounds.local, torch.device("cpu"))
    welcome = ClientWelcome(0, str(strategy), spec.lr, spec.seed)
    tensors = tensors_of(passes.model)
    most_bytes = sum(most_wire_bytes(each, rounds.codec) for each in tensors.values())
    crypto = None
    if rounds.secure is not None:
        crypto = primitives()
        most_bytes = max(most_bytes, sum(each.numel() for each in tensors.values()) * rounds.secure.bits // 8)
    if rounds.local.controls:
        most_bytes += sum(each.nbytes for each in tensors.values())
    cohort = rounds.number if rounds.privacy is None else rounds.privacy.cohort
    buffering = rounds.local.buffering
    server = RoundServer(url_of(listen), roster, rules, welcome, cohort, tensors, most_bytes, buffering, crypto)
    noise = NoiseRecord(options.out, len(roster.members), resume=options.resume)
    try:
        own = replace(job, data=RemoteData(rounds.number, server, len(roster.members), noise, test))
        trainer = Trainer(RunSpec.of(own, strategy, 1, options))
        if on_listening is not None:
            on_listening(server.address)
        with show_rows(progress, spec) as show:
            result = trainer.fit(on_row=show)
        server.close()
        result = result if options.out is None else reported(result, options.out)
        return result.made_by(job, options.out)
    finally:
        server.abandon()


def _check_strategy(strategy: Strategy, rules: RoundRules, clients: int) -> None:
    """PT2516 for rounds that need more from clients than movements; ValueError for rules that cannot be followed."""
    named = False
    with suppress(ValueError):
        named = str(parse_strategy(str(strategy))) == str(strategy)
    reason = unserved(strategy)
    if reason is None and not named:
        reason = "its text does not make it again, so no client could follow it"
    if reason is not None:
        refuse({"real clients", "other rounds"}, strategy=strategy, reason=reason)
    rounds = strategy.rounds
    assert rounds is not None
    if rounds.merge is not None:
        rounds.merge([torch.zeros(2) for _ in range(rules.least(rounds.number))])
    if rounds.privacy is not None and rules.extra:
        raise ValueError(
            f"extra={rules.extra:g} takes the first to answer, and clients of private rounds take part with equal "
            "probabilities; leave it out"
        )
    if rounds.privacy is not None and rounds.privacy.cohort > clients:
        raise ValueError(
            f"a round of {rounds.privacy.cohort} clients needs that many, and there are {clients} tickets; give a "
            "smaller cohort"
        )
