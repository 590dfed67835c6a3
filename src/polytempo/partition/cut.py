from collections.abc import Mapping
from dataclasses import dataclass

from torch import nn


@dataclass(frozen=True)
class Value:
    name: str
    source: int
    targets: tuple[int, ...]


@dataclass(frozen=True)
class Stage:
    index: int
    module: nn.Module
    inputs: tuple[str, ...]
    takes: tuple[str, ...]
    gives: tuple[str, ...]
    is_last: bool


@dataclass(frozen=True)
class Cut:
    stages: tuple[Stage, ...]
    values: tuple[Value, ...]
    shared: Mapping[str, tuple[int, ...]]
