"""The serving processes of a launcher, and their way to a run's ticket."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from polytempo.core import PolytempoError
from polytempo.engines.join.server_ranks import KEYS, check_servers, chosen, secret_in
from polytempo.engines.remote.ticket import AgentTicket
from polytempo.wire.keys import make_keys, write_keys


@pytest.mark.parametrize(
    ("hosts", "servers", "ranks"),
    [
        ("aaaa", 1, (3,)),
        ("aaaa", 3, (1, 2, 3)),
        ("aaabbb", 1, (5,)),
        ("aaabbb", 2, (2, 5)),
        ("aaabbb", 3, (2, 4, 5)),
        ("aaabbb", 5, (1, 2, 3, 4, 5)),
        ("abab", 2, (2, 3)),
        ("abb", 2, (1, 2)),  # rank 0 trains, though it is the only one on its host
    ],
)
def test_servers_are_the_last_of_each_host_and_never_rank_0(hosts: str, servers: int, ranks: tuple[int, ...]) -> None:
    assert chosen(hosts, servers) == ranks


@pytest.mark.parametrize(("servers", "size", "problem"), [(2, 2, "start 3 or more"), (-1, 2, "from 0 on")])
def test_one_process_must_train(servers: int, size: int, problem: str) -> None:
    check_servers(1, 2)
    with pytest.raises(ValueError, match=problem):
        check_servers(servers, size)


def test_a_ticket_is_a_text_or_a_file_or_an_address_with_keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ticket = AgentTicket("tcp://127.0.0.1:5", make_keys())
    assert secret_in(ticket.to_json()) == ticket
    tmp_path.chmod(0o700)
    (tmp_path / "ticket").write_text(ticket.to_json())
    (tmp_path / "ticket").chmod(0o600)
    assert secret_in(str(tmp_path / "ticket")) == ticket
    with pytest.raises(ValueError, match=f"{KEYS} is set on the workers and not on this server"):
        secret_in(ticket.head)
    write_keys(tmp_path / "keys", ticket.keys)
    monkeypatch.setenv(KEYS, str(tmp_path / "keys"))
    assert secret_in(ticket.head) == ticket
    with pytest.raises(PolytempoError, match=f"travels once; set {KEYS}"):
        secret_in("spent")
    tmp_path.chmod(0o755)
    with pytest.raises(PolytempoError, match="is not a private folder of this user"):
        secret_in(str(tmp_path / "ticket"))


def test_an_agent_knows_its_parent_before_torch_is_loaded() -> None:
    """A parent that ends in the seconds that loading takes would else be taken for another process's end."""
    look = "import sys, polytempo.agent; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", look], check=False).returncode == 0
