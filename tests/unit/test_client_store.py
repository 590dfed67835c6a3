"""The store of clients' tensors: its bound, its files and their hashes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from polytempo.federated.client_store import ClientStore, DamagedState


def test_clients_beyond_the_bound_are_in_files_and_come_back_to_the_bit() -> None:
    store, tensors = (
        ClientStore(most_bytes=32),
        {k: {"a": torch.arange(4.0) + k, "n": torch.tensor(k)} for k in range(5)},
    )
    for client, each in tensors.items():
        store.put(client, each)
    assert list(store) == [0, 1, 2, 3, 4]
    assert 7 not in store
    assert store.get(7) == {}
    assert list(store._near) == [4]
    for client, each in tensors.items():
        found = store.get(client)
        assert all(torch.equal(found[name], each[name]) and found[name].dtype == each[name].dtype for name in each)
    store.drop(2)
    store.put(3, {"a": torch.zeros(4)})
    assert list(store) == [0, 1, 3, 4]
    assert torch.equal(store.get(3)["a"], torch.zeros(4))


def test_a_changed_file_is_told() -> None:
    store = ClientStore(most_bytes=1)
    store.put(1, {"a": torch.zeros(4)})
    store.put(2, {"a": torch.zeros(4)})
    assert store._folder is not None
    [file] = Path(store._folder.path).iterdir()
    file.write_bytes(file.read_bytes()[:-1] + b"x")
    with pytest.raises(DamagedState, match="client 1"):
        store.get(1)
