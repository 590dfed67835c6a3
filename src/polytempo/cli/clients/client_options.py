"""The tables of `polytempo serve`, `client` and `tickets`, checked before torch is imported."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from msgspec import Meta

from polytempo.cli.options import values
from polytempo.cli.options.command_options import table
from polytempo.cli.options.completion import strategy_names
from polytempo.cli.options.shared_options import ARGUMENT, OPTIONS, Data, Job, Json, Seed, Threads, Ui, check_shown
from polytempo.spec.table.option import Count, Option, Positive

_WAITING = "Waiting"
_CLIENTS = Meta(ge=1, le=100_000)


def _address(text: str) -> str:
    host, _, port = text.rpartition(":")
    if not host or "/" in host or not (port.isdecimal() and int(port) < 1 << 16):
        raise ValueError("must be written HOST:PORT, as 127.0.0.1:7777")
    return text


def _file(text: str) -> str:
    if not Path(text).is_file():
        raise ValueError("there is no such file; `polytempo tickets` writes one for each client")
    return text


def _keys(text: str) -> str:
    if not Path(text).is_dir():
        raise ValueError("there is no such folder; `polytempo tickets` makes it")
    return text


@dataclass(frozen=True, kw_only=True)
class ServeOptions:
    """Options of `polytempo serve`."""

    job: Job
    keys: Annotated[str, Option(OPTIONS, "FOLDER", read=_keys)]
    """The folder that `polytempo tickets` has made."""
    strategy: Annotated[str, Option(OPTIONS, "S", read=values.strategy, complete=strategy_names)] = "fed_avg"
    """A strategy of rounds, such as 'fed_avg(cohort=5, epochs=2)'. Default: fed_avg."""
    listen: Annotated[str, Option(OPTIONS, "HOST:PORT", read=_address)] = "127.0.0.1:7777"
    """The address for clients, such as 0.0.0.0:7777. Default: 127.0.0.1:7777, this machine alone."""
    rounds: Annotated[Count, Option(OPTIONS, "K")] = 100
    """Stop after K rounds in all, also where a run is resumed. Default: 100."""
    test: Annotated[bool, Option(OPTIONS)] = False
    """Score rounds on the test set of the job's data at this machine."""
    data: Data = None
    lr: Annotated[Positive | None, table()["lr"]] = None
    seed: Seed = 0
    threads: Threads = None
    there: Annotated[Count | None, Option(_WAITING, "N")] = None
    """Begin when N clients are there. Default: as many as a round asks."""
    fewest: Annotated[Count | None, Option(_WAITING, "N")] = None
    """Answers that a round needs at least. Default: half of them."""
    extra: Annotated[float, Meta(ge=0, le=100), Option(_WAITING, "PART")] = 0.0
    """Ask so many more clients, and take the first to answer: 0.3 asks 130 %. Default: 0."""
    deadline_s: Annotated[Positive, Option(_WAITING, "S")] = 60.0
    """Seconds for the answers of a round. Default: 60."""
    wait_s: Annotated[Positive, Option(_WAITING, "S")] = 600.0
    """Seconds for enough clients to be there. Default: 600."""
    out: Annotated[Path | None, table()["out"]] = None
    resume: Annotated[bool, table()["resume"]] = False
    checkpoint_every: Annotated[Count | None, table()["checkpoint_every"]] = None
    ui: Ui = False
    json: Json = False

    def __post_init__(self) -> None:
        """Refuse a page without a folder."""
        check_shown(self, "out", "runs/served")


@dataclass(frozen=True, kw_only=True)
class ClientOptions:
    """Options of `polytempo client`."""

    job: Job
    ticket: Annotated[str, Option(OPTIONS, "FILE", read=_file)]
    """This client's ticket, which the server's owner has made."""
    data: Data = None
    server: Annotated[str | None, Option(OPTIONS, "HOST:PORT", read=_address)] = None
    """Another address of the server than the ticket's."""
    patience_s: Annotated[Positive, Option(OPTIONS, "S")] = 600.0
    """The longest time without the server. Default: 600 s."""
    state: Annotated[str | None, Option(OPTIONS, "FOLDER")] = None
    """Keep this client's control variate or head, and its record of opened secure sums, in files of FOLDER, for its
    next process. Default: in memory."""
    threads: Threads = None


@dataclass(frozen=True, kw_only=True)
class TicketsOptions:
    """Options of `polytempo tickets`."""

    folder: Annotated[str, Option(ARGUMENT, "FOLDER")]
    """The folder of the server's keys, which is made."""
    clients: Annotated[Annotated[int, _CLIENTS] | None, Option(OPTIONS, "N")] = None
    """Make keys, and tickets for N clients."""
    server: Annotated[str, Option(OPTIONS, "HOST:PORT", read=_address)] = "127.0.0.1:7777"
    """The address that clients dial. Default: 127.0.0.1:7777."""
    most_samples: Annotated[Count, Option(OPTIONS, "N")] = 1_000_000
    """The largest number of samples that a client may say to have. Default: 1,000,000."""
    revoke: Annotated[Annotated[int, Meta(ge=0, le=100_000)] | None, Option(OPTIONS, "NUMBER")] = None
    """Let this client take part no more; a server that runs follows in seconds."""
