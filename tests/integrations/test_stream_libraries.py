"""Data of Hugging Face `datasets` and archives of `webdataset`'s writer, dealt to workers: each sample once."""

from __future__ import annotations

import gc
import json
from pathlib import Path

import datasets
import pytest
import torch
import webdataset
from torchdata.stateful_dataloader import StatefulDataLoader

import polytempo as pt


@pytest.fixture(autouse=True)
def _quiet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POLYTEMPO_CACHE", str(tmp_path / "cache"))
    datasets.disable_progress_bars()


def _table(tmp_path: Path) -> datasets.Dataset:
    made = datasets.Dataset.from_dict({"n": list(range(41)), "ids": [[number] * 3 for number in range(41)]})
    made.save_to_disk(str(tmp_path / "table"))
    return datasets.load_from_disk(str(tmp_path / "table"))


@pytest.mark.parametrize("form", ["as it is", "huggingface"])
@pytest.mark.parametrize("size", [1, 3])
def test_a_table_is_dealt_once(form: str, size: int, tmp_path: Path) -> None:
    table = _table(tmp_path).with_format("torch")
    source = table if form == "as it is" else pt.data.huggingface(table, rows_of_shard=7)
    seen = []
    for rank in range(size):
        for batch in pt.data.DataShard(source, rank=rank, size=size, batch_size=4):
            assert batch["ids"].shape == (len(batch["n"]), 3)
            assert torch.equal(batch["ids"][:, 0], batch["n"])
            seen += batch["n"].tolist()
    assert sorted(seen) == list(range(41))


def test_rows_are_read_many_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither a batch of a table as it is nor a shard of it asks for rows one by one."""
    table = _table(tmp_path).with_format("torch")
    asked = []
    plain = datasets.Dataset._getitem

    def counted(self: datasets.Dataset, key: object, **more: object) -> object:
        asked.append(key)
        return plain(self, key, **more)

    monkeypatch.setattr(datasets.Dataset, "_getitem", counted)
    for _ in pt.data.DataShard(table, rank=0, size=1, batch_size=8):
        pass
    assert len(asked) == 6
    asked.clear()
    assert len(list(pt.data.huggingface(table))) == 41
    assert len(asked) == 1


def test_columns_of_a_table(tmp_path: Path) -> None:
    table = _table(tmp_path)
    assert list(pt.data.huggingface(table, as_tuple=("n",), rows_of_shard=5)) == [(number,) for number in range(41)]
    with pytest.raises(ValueError, match="PT2605"):
        pt.data.huggingface(table, as_tuple=("m",))
    with pytest.raises(TypeError, match=r"datasets\.Dataset"):
        pt.data.huggingface(table.to_iterable_dataset())
    with pytest.raises(ValueError, match="PT2606"):
        pt.data.huggingface(table.select([]))


@pytest.mark.parametrize("size", [1, 2])
def test_a_streaming_data_set_is_dealt_once(size: int, tmp_path: Path) -> None:
    stream = _table(tmp_path).to_iterable_dataset(num_shards=3).with_format("torch")
    seen = []
    for rank in range(size):
        for batch in pt.data.DataShard(stream, rank=rank, size=size, batch_size=4):
            seen += batch["n"].tolist()
    assert sorted(seen) == list(range(41))


@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("ending", ["tar", "tar.gz"])
def test_archives_of_webdataset(ending: str, tmp_path: Path) -> None:
    """Samples of its writer, equal to the samples of its reader."""
    for part in range(3):
        with webdataset.TarWriter(str(tmp_path / f"part-{part}.{ending}")) as writer:
            for number in range(part * 10, part * 10 + 10):
                array = torch.full((number,), number).numpy()
                writer.write({"__key__": f"s/{number:03d}", "cls": number, "json": {"n": number}, "npy": array})
    source = pt.data.webdataset(str(tmp_path / f"part-*.{ending}"))
    assert source.counts == [10, 10, 10]
    assert [sample["cls"] for sample in source] == list(range(30))
    assert source[17]["npy"].tolist() == [17] * 17
    urls = [str(path) for path in sorted(tmp_path.glob(f"*.{ending}"))]
    theirs = webdataset.WebDataset(urls, shardshuffle=False).decode()
    for ours, other in zip(source, theirs, strict=True):
        assert ours["__key__"] == other["__key__"]
        assert json.dumps(ours["json"]) == json.dumps(other["json"])
        assert ours["npy"].tolist() == other["npy"].tolist()
    del theirs
    gc.collect()  # its reader leaves files open


def test_parquet_of_datasets(tmp_path: Path) -> None:
    _table(tmp_path).to_parquet(str(tmp_path / "a.parquet"), batch_size=10)
    source = pt.data.parquet(tmp_path / "a.parquet", as_tuple=("n", "ids"))
    seen = [int(n) for n, ids in source if ids.tolist() == [int(n)] * 3]
    assert seen == list(range(41))


@pytest.mark.filterwarnings("ignore:'set_vital'")
def test_a_stateful_loader_gives_its_settings_and_goes_on_with_other_workers() -> None:
    loader = StatefulDataLoader(torch.utils.data.TensorDataset(torch.arange(41)), batch_size=4, shuffle=True)  # type: ignore[var-annotated]
    shards = [pt.data.DataShard(loader, rank=rank, size=3) for rank in range(3)]
    seen = []
    for shard in shards:
        for _, (batch,) in zip(range(2), shard, strict=False):
            seen += batch.tolist()
    place = shards[0].state_dict()
    for rank in range(2):
        shard = pt.data.DataShard(loader, rank=rank, size=2)
        shard.load_state_dict(place)
        for (batch,) in shard:
            seen += batch[: shard.local_samples].tolist()
    assert sorted(seen) == list(range(41))
