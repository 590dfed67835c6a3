"""Horovod's API over this library's worlds: `polytempo.horovod.torch`, and `run`."""

from polytempo.horovod.run_function import run

__all__ = ["run"]
