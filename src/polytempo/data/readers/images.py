"""Pictures in a folder for each class, here or at a URL."""

from __future__ import annotations

from io import BytesIO
from pathlib import Path

import numpy as np
import torch
from PIL import Image, UnidentifiedImageError
from torch import Tensor
from torch.utils.data import Dataset

from polytempo.core.system.url_path import P, Place, UrlPath, place
from polytempo.data.plan import permutation

SUFFIXES = frozenset({".jpg", ".jpeg", ".png", ".bmp", ".gif", ".webp", ".ppm", ".pgm"})
TEST_FRACTION = 0.2
_NO_CLASS = -100
_TRAINING, _TESTING = ("train", "training"), ("test", "val", "validation")


class Pictures(Dataset[tuple[Tensor, int]]):
    """Pictures, read when they are asked for: float32 (3, size, size) from -1 to 1, and the number of the class."""

    def __init__(self, files: list[tuple[Place, int]], classes: list[str], size: int) -> None:
        self.files, self.classes, self.size = files, classes, size

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, number: int) -> tuple[Tensor, int]:
        path, label = self.files[number]
        try:
            with Image.open(BytesIO(path.read()) if isinstance(path, UrlPath) else path) as image:
                pixels = np.array(image.convert("RGB").resize((self.size, self.size), Image.Resampling.BILINEAR))
        except (UnidentifiedImageError, OSError, Image.DecompressionBombError) as error:
            raise ValueError(f"{path} cannot be read as a picture: {error}") from error
        return torch.from_numpy(pixels).permute(2, 0, 1).float() / 127.5 - 1, label


def images(
    path: str | Place, size: int = 64, seed: int = 0, *, like: str | Place | None = None
) -> tuple[Pictures, Pictures]:
    """The pictures in `path`, a folder with a folder for each class, each scaled to `size` × `size`.

    `path` may be a URL of fsspec, such as s3://bucket/flowers: one listing for each folder, twice, then one request
    for each picture when it is asked for, in every epoch.

    Where `path` has folders train and test (or val), these have the classes; else 80 % of the pictures, drawn by
    `seed`, are to learn from. Classes are numbered in the order of their names. ValueError for a folder without
    pictures of two classes.

    `like`: the folder that a model was trained on. Its pictures are to train on, and name the classes; all pictures in
    `path` are to test with, of classes or, where `path` has no folder of a class, of an unknown one: -100, which
    torch's losses leave out.
    """
    path = place(path)
    if like is not None:
        known = images(like, size, seed)[0]
        return known, _unsplit(path, known.classes, size)
    training, testing = split_folders(path) if path.is_dir() else (path, None)
    if testing is not None:
        classes = _classes(training)
        return Pictures(_files(training, classes), classes, size), Pictures(_files(testing, classes), classes, size)
    classes = _classes(path)
    files = _files(path, classes)
    order = permutation(len(files), seed, 0).tolist()
    first = len(files) - max(1, round(len(files) * TEST_FRACTION))
    chosen = [[files[number] for number in part] for part in (order[:first], order[first:])]
    return Pictures(chosen[0], classes, size), Pictures(chosen[1], classes, size)


def _classes(path: Place) -> list[str]:
    found = class_names(path) if path.is_dir() else []
    if len(found) < 2:
        raise ValueError(
            f"{path} has pictures of {len(found)} classes; put them into folders, one for each of two classes or more, "
            "or these into train and test"
        )
    return found


def _files(path: Place, classes: list[str]) -> list[tuple[Place, int]]:
    found = list[tuple[Place, int]]()
    for label, name in enumerate(classes):
        folder = path / name
        if not folder.is_dir():
            raise ValueError(f"{path} has no folder {name!r}, and the training pictures have one")
        found += [(file, label) for file in _pictures(folder)]
    return found


def class_names(path: Place) -> list[str]:
    """The folders in `path` that have pictures, in order."""
    return [name for name in _folders(path) if _pictures(path / name)]


def pictures_of(path: Place, classes: list[str], size: int) -> Pictures:
    """The pictures in the folders of `path` that are named as the classes. Some may be missing."""
    there = set(_folders(path))
    found = [(label, name) for label, name in enumerate(classes) if name in there]
    return Pictures([(file, label) for label, name in found for file in _pictures(path / name)], classes, size)


def _unsplit(path: Place, classes: list[str], size: int) -> Pictures:
    if not path.is_dir():
        raise ValueError(f"{path} is not a folder; name one with pictures, or with folders of pictures")
    found = pictures_of(path, classes, size)
    if not found.files:
        found = Pictures([(file, _NO_CLASS) for file in _pictures(path)], classes, size)
    if not found.files:
        raise ValueError(f"{path} has no pictures, nor folders of {', '.join(classes)} with some")
    return found


def split_folders(path: P) -> tuple[P, P | None]:
    """The folders train and test (or val) in `path`; without both of them `path`, and None."""
    parts = {name: path / name for name in _folders(path)}
    training = next((parts[name] for name in _TRAINING if name in parts), None)
    testing = next((parts[name] for name in _TESTING if name in parts), None)
    return (path, None) if training is None or testing is None else (training, testing)


def _folders(path: Place) -> list[str]:
    """The names of the folders in `path`, in order."""
    return [name for name, is_folder in _entries(path) if is_folder]


def _pictures(path: P) -> list[P]:
    """The files in `path` that are named as pictures, in order."""
    named = [name for name, is_folder in _entries(path) if not is_folder and Path(name).suffix.lower() in SUFFIXES]
    return [path / name for name in named]


def _entries(path: Place) -> list[tuple[str, bool]]:
    if isinstance(path, UrlPath):
        return path.entries()
    return sorted((entry.name, entry.is_dir()) for entry in path.iterdir() if entry.exists())
