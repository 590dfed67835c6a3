"""The tensors that a client of a real server keeps between its rounds."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest
import torch
from torch import Tensor

from polytempo.core.errors import PolytempoError
from polytempo.runs.clients.client_memory import MOST_STATES, ClientMemory
from polytempo.training.federated.remote_rounds import NO_ROUND


def state(number: int) -> dict[str, Tensor]:
    return {"control/weight": torch.full((3,), float(number), dtype=torch.float64)}


@pytest.mark.parametrize("folder", [None, "state"])
def test_a_server_that_forgot_rounds_finds_an_earlier_state(folder: str | None, tmp_path: Path) -> None:
    """Rounds 0, 2, 4, … each begin with the state after the one before; the server then goes on from round 6."""
    memory = ClientMemory(None if folder is None else tmp_path / folder)
    assert memory.after(NO_ROUND) == {}
    for number in range(0, 2 * MOST_STATES + 6, 2):
        memory.put(number, state(number), number - 2)
    assert memory.after(4) is None
    found = memory.after(6)
    assert found is not None
    assert torch.equal(found["control/weight"], state(6)["control/weight"])
    memory.close()


def test_files_bring_the_states_to_the_next_process(tmp_path: Path) -> None:
    memory = ClientMemory(tmp_path / "state")
    memory.put(3, state(3), NO_ROUND)
    memory.close()
    [path] = (tmp_path / "state").glob("round-*")
    assert path.stat().st_mode & 0o077 == 0
    with closing(ClientMemory(tmp_path / "state")) as other:
        again = other.after(3)
    assert again is not None
    assert torch.equal(again["control/weight"], state(3)["control/weight"])
    assert ClientMemory(None).after(3) is None


def test_the_state_that_the_server_counts_on_is_never_forgotten() -> None:
    """The server takes none of the client's late movements."""
    memory = ClientMemory(None)
    memory.put(0, state(0), NO_ROUND)
    for number in range(1, 3 * MOST_STATES):
        memory.put(number, state(number), 0)
    assert memory.after(0) is not None


def test_rounds_that_the_server_has_forgotten_push_out_no_others(tmp_path: Path) -> None:
    """Another run had the folder, with later rounds."""
    before = ClientMemory(tmp_path)
    for number in range(90, 100):
        before.put(number, state(number), number - 1)
    before.close()
    (tmp_path / "round-x.safetensors").touch()
    memory = ClientMemory(tmp_path)
    for number in range(3):
        memory.put(number, state(number), number - 1)
    assert [memory.after(number) is not None for number in (0, 1, 2, 99)] == [True, True, True, False]
    memory.close()


def test_two_processes_do_not_share_a_folder(tmp_path: Path) -> None:
    memory = ClientMemory(tmp_path)
    with pytest.raises(PolytempoError, match="another process is the client"):
        ClientMemory(tmp_path)
    memory.close()
    ClientMemory(tmp_path).close()
