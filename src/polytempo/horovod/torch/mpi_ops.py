"""Horovod's module of some functions, for scripts that import it. No MPI takes part here."""

from __future__ import annotations

from polytempo.horovod.torch import *  # noqa: F403 - the same names, under the name of a module of Horovod
