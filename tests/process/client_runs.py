"""Runs of a server of rounds, and its clients, in threads of this process."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

import polytempo as pt
from laws.test_federated import CLIENTS, SEED, data, job
from polytempo import federated as fed
from polytempo.core import Strategy
from polytempo.federated.arrivals import ClientArrival
from polytempo.runs.clients.round_server import RoundServer
from process.client_processes import part

import_module("torch._dynamo")  # seconds here, instead of in the first round
ANY = "127.0.0.1:0"
LONG_S = 60.0


class Running:
    """A server's run in a thread, and clients in threads."""

    def __init__(
        self, folder: Path, strategy: Strategy, clients: int = CLIENTS, of: pt.Job | None = None, **more: Any
    ) -> None:
        self.job = of or job()
        self.folder, self._pool = folder, ThreadPoolExecutor(clients + 2)
        self.keys = folder / "keys"
        if not self.keys.exists():
            fed.make_tickets(self.keys, clients, ANY, most_samples=100)
        address: Future[str] = Future()
        given: dict[str, Any] = {"seed": SEED, "listen": ANY, "rules": fed.RoundRules(there=clients)} | more
        told: dict[str, Any] = {"on_listening": address.set_result, "out": folder / "run"}
        self.result = self._pool.submit(fed.serve, self.job, strategy, self.keys, **told, **given)
        wait([self.result, address], LONG_S, FIRST_COMPLETED)
        self.address = address.result(0).removeprefix("tcp://")

    def ticket(self, client: int) -> Path:
        return self.keys / f"client-{client}.ticket"

    def join(self, client: int, given: Any = None, of: pt.Job | None = None, **more: Any) -> Future[Any]:
        own = part(client) if given is None else given
        return self._pool.submit(fed.join, of or self.job, self.ticket(client), own, server=self.address, **more)

    def begin(self, work: Callable[..., Any], *given: Any) -> Future[Any]:
        return self._pool.submit(work, *given)

    def end(self) -> pt.Result:
        found: pt.Result = self.result.result(LONG_S)
        self._pool.shutdown()
        return found

    def texts(self, name: str = "clients") -> list[str]:
        return [row["text"] for row in self._rows() if row["kind"] == "text" and row["name"] == name]

    def values(self, name: str) -> list[float]:
        """Numbers of that name in the run's stream."""
        return [row["values"][name] for row in self._rows() if name in row.get("values", {})]

    def _rows(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.folder / "run/metrics.jsonl").read_text().splitlines()]


def alone(client: int, rounds: int, strategy: Strategy | None = None, **more: Any) -> str:
    """The digest of a run with one client's data alone."""
    clients = fed.Clients(data(), [fed.clients(data(), fed.by_size(CLIENTS, sigma=0.7), SEED).parts[client]])
    own = job(data=lambda path: pt.Data(clients), **more)
    trainer = pt.Trainer(own, strategy or fed.fed_avg(1, 1, 4), seed=SEED, steps=rounds)
    digest = trainer.fit().parameters_sha256
    assert digest is not None
    return digest


def arrivals(run: Running) -> list[list[ClientArrival]]:
    """The buffer of each round."""
    found = [re.findall(r"client-(\d+)(?: \(age (\d+)\))?", text) for text in run.texts("clients/round")]
    return [[ClientArrival(int(client), int(age or 0), 0.0) for client, age in each] for each in found]


@pytest.fixture
def dies(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Lets the server die in a round, with its answers; a negative number: no longer."""
    note, at = RoundServer._note, [-1]

    def notes(server: RoundServer, opened: Any, found: list[int]) -> None:
        if opened.number == at[0]:
            raise OSError("the server's machine is gone")
        note(server, opened, found)

    def in_round(number: int) -> None:
        at[0] = number

    monkeypatch.setattr(RoundServer, "_note", notes)
    return in_round
