"""`polytempo serve`, `client` and `tickets`, as they are typed."""

from __future__ import annotations

from polytempo.cli.clients.client_options import ClientOptions, ServeOptions, TicketsOptions
from polytempo.cli.options.command_line import takes
from polytempo.cli.options.shown_page import page_of


@takes(ServeOptions)
def serve(asked: ServeOptions) -> None:
    """Train JOB in rounds with clients on machines of their own.

    Clients dial in with `polytempo client`, each with a ticket of `polytempo tickets`. Their data stay with them.
    """
    with page_of(asked.out if asked.ui else None):
        from polytempo.cli.clients.real_clients import serve as command  # imports torch, which takes seconds

        command(asked)


@takes(ClientOptions)
def client(asked: ClientOptions) -> None:
    """Be a client of `polytempo serve`: train on --data, which stay here.

    Dials out to the ticket's server, again and again where the connection breaks, until the run is over.
    """
    from polytempo.cli.clients.real_clients import client as command  # imports torch, which takes seconds

    command(asked)


@takes(TicketsOptions)
def tickets(asked: TicketsOptions) -> None:
    """Make keys of a server and tickets of its clients, or revoke one.

    FOLDER/client-0.ticket and so on are secrets: any process that has one is that client.
    """
    from polytempo.cli.clients.real_clients import tickets as command  # imports torch, which takes seconds

    command(asked)
