"""`from_folder`: a folder for each client.

clients/alice/cat/1.png             a client, its class, a picture
clients/bob/train/dog/7.png         a client with training samples
clients/bob/test/dog/9.png          and with test samples of its own
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import ConcatDataset, Dataset

from polytempo.data.readers.images import class_names, pictures_of, split_folders
from polytempo.federated.client_tests import ClientTests
from polytempo.federated.clients import Clients, held_out
from polytempo.federated.sampling import Sampling


def from_folder(
    path: str | Path,
    read: Callable[[Path], Dataset[Any]] | None = None,
    *,
    size: int = 64,
    test: float | None = None,
    seed: int = 0,
    sampling: Sampling | None = None,
) -> Clients:
    """Clients that are the folders in `path`, in the order of their names.

        dealt = pt.federated.from_folder("phones", test=0.2)
        pt.Data(dealt, dealt.test)

    `read(folder)`: the samples in a folder, as a data set. None: pictures of `size` × `size` in a folder for each class
    (`pt.data.images`), and a client may lack classes. A client with folders train and test (or val) has these test
    samples. The others hold out a fraction `test`, drawn from `seed`. `sampling`: see `clients`.

    Errors: ValueError for a folder without clients, and for a client without samples.
    """
    place = Path(path)
    folders = sorted(entry for entry in place.iterdir() if entry.is_dir()) if place.is_dir() else []
    if not folders:
        raise ValueError(f"{place} has no folders; put the samples of each client into a folder of its own there")
    if test is not None and not 0 < test < 1:
        raise ValueError(f"test={test}: a part of each client's samples is above 0 and below 1")
    split = [split_folders(folder) for folder in folders]
    if read is None:
        classes = sorted({name for training, _ in split for name in class_names(training)})

        def read(folder: Path) -> Dataset[Any]:
            return pictures_of(folder, classes, size)

    training, testing = [read(own) for own, _ in split], [None if own is None else read(own) for _, own in split]
    for folder, samples in zip(folders, training, strict=True):
        if not len(samples):  # type: ignore[arg-type]
            raise ValueError(f"client {folder.name} has no samples in {folder}; leave its folder out, or see its files")
    parts, begin = list[Tensor](), 0
    for samples in [*training, *(each for each in testing if each is not None)]:
        end = begin + len(samples)  # type: ignore[arg-type]
        parts.append(torch.arange(begin, end))
        begin = end
    given = iter(parts[len(folders) :])
    kept, tests = (
        parts[: len(folders)],
        [torch.empty(0, dtype=torch.long) if own is None else next(given) for own in testing],
    )
    for number, own in enumerate(testing):
        if own is None and test is not None:
            kept[number], tests[number] = held_out(kept[number], test, seed, number)
    dataset: Dataset[Any] = ConcatDataset([*training, *(each for each in testing if each is not None)])
    has_tests = any(len(each) for each in tests)
    return Clients(dataset, kept, sampling, ClientTests(dataset, tests) if has_tests else None)
