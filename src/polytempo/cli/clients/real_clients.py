"""`polytempo serve`, `client` and `tickets`."""

from __future__ import annotations

import sys

import torch

from polytempo.cli.clients.client_options import ClientOptions, ServeOptions, TicketsOptions
from polytempo.cli.options.plan import found_job
from polytempo.cli.options.show import notes_on_stderr, show_json
from polytempo.federated.real_clients import RoundRules
from polytempo.report.status.progress import Progress
from polytempo.runs.clients.join import join
from polytempo.runs.clients.serve import serve as served
from polytempo.runs.clients.tickets import ClientTicket, make_tickets, revoke
from polytempo.spec.job_calls import data_of
from polytempo.spec.run_options import RunOptions


def serve(asked: ServeOptions) -> None:
    """Train with the clients that dial in."""
    with notes_on_stderr():
        torch.set_num_threads(asked.threads or torch.get_num_threads())
        job = found_job(asked.job)
        result = served(
            job,
            asked.strategy,
            asked.keys,
            listen=asked.listen,
            test=data_of(job, asked.data).test if asked.test else None,
            rules=RoundRules(asked.extra, asked.there, asked.fewest, asked.deadline_s, asked.wait_s),
            options=RunOptions(
                steps=asked.rounds,
                lr=asked.lr,
                seed=asked.seed,
                out=asked.out,
                resume=asked.resume,
                checkpoint_every=asked.checkpoint_every,
            ),
            progress=Progress(),
            on_listening=lambda address: print(f"listening at {address}", file=sys.stderr, flush=True),
        )
    if asked.json:
        show_json(result.as_json())
        return
    scored = "" if result.accuracy is None else f", accuracy {result.accuracy:.2%}"
    print(f"{result.job}, {result.strategy}: {result.steps} rounds, loss {result.loss:.4g}{scored}")
    if asked.out is not None:
        print(f"report: {asked.out}/report.html")


def client(asked: ClientOptions) -> None:
    """Be a client until the run is over."""
    torch.set_num_threads(asked.threads or torch.get_num_threads())
    ticket = ClientTicket.read(asked.ticket)
    who, server = f"client-{ticket.number}", asked.server or ticket.server.removeprefix("tcp://")
    print(f"{who} dials {server}, and waits {asked.patience_s:g} s for it at most", file=sys.stderr, flush=True)
    part = join(
        found_job(asked.job),
        ticket,
        asked.data,
        server=asked.server,
        patience_s=asked.patience_s,
        on_round=lambda number: print(f"{who} has trained in round {number}", file=sys.stderr, flush=True),
        state=asked.state,
    )
    print(f"client-{part.number}: trained in {part.trained} of {part.rounds} rounds")


def tickets(asked: TicketsOptions) -> None:
    """Make tickets, or revoke one."""
    if (asked.clients is None) == (asked.revoke is None):
        raise ValueError("give either --clients N, to make tickets, or --revoke NUMBER")
    if asked.revoke is not None:
        revoke(asked.folder, asked.revoke)
        print(f"client-{asked.revoke} is revoked")
        return
    assert asked.clients is not None
    paths = make_tickets(asked.folder, asked.clients, asked.server, asked.most_samples)
    print(f"{paths[0]} to {paths[-1].name}: hand each client its own; roster.json stays here")
