"""The module in which scripts for Horovod look for some of its functions. No MPI takes part here."""

from __future__ import annotations

from polytempo.horovod.torch import *  # noqa: F403 - the same names, under the name of a module of Horovod
