"""`VectorFormat`: the parameters that a worker exchanges with shards, and how they travel."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from polytempo.core.codec import Codec
from polytempo.server.layout import Parameter


class VectorFormat(NamedTuple):
    """`parameters` are needed where some of them are tables, and for codecs. The codecs are those of `Service`."""

    dtype: torch.dtype = torch.float32
    parameters: Sequence[Parameter] = ()
    codec: Codec | None = None
    """Encodes what the worker pushes; None: vectors travel as they are."""
    pull_codec: Codec | None = None
    """Encodes what the shards answer to a pull."""
