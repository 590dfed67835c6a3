"""`Ports`: the two groups of one rank in training: ranks with the same parameters, and ranks of one model.

             model 0          model 1
data 0       rank 0 ◀─ model ─▶ rank 1        parts of one model; they see the same samples
               ▲                  ▲
              data               data         the same parameters; they see other samples
               ▼                  ▼
data 1       rank 2             rank 3
"""

from __future__ import annotations

from typing import NamedTuple

from polytempo.core import Mesh, Port

DATA = "data"
"""The axis along which ranks hold the same parameters. Along all other axes they hold parts of one model."""
MODEL = "model"
"""The axis along which ranks hold the parts of one model's layers."""
STAGE = "stage"
"""The axis along which ranks hold the stages of one model."""


class Ports(NamedTuple):
    """One rank's groups."""

    whole: Port
    data: Port
    """Ranks that hold the same parameters. Gradients and parameters are exchanged here."""
    model: Port
    """Ranks that hold the parts of one model, each part once."""


def ports_of(whole: Port) -> Ports:
    """The groups in a world by its mesh. Without one, all ranks hold the same parameters. Errors: see `check_mesh`."""
    if whole.mesh is None:
        return Ports(whole, whole, whole.among([whole.rank]))
    check_mesh(whole)
    others = [axis for axis in whole.mesh.lengths if axis != DATA]
    return Ports(whole, whole.along(*[DATA] * (DATA in whole.mesh.lengths)), whole.along(*others))


def check_mesh(whole: Port) -> None:
    """ValueError for a mesh without the axis "data": along another axis ranks would train models that never meet."""
    mesh = mesh_of(whole)
    unknown = [axis for axis, length in mesh.axes if length > 1 and axis not in (MODEL, STAGE)]
    if DATA not in mesh.lengths and unknown:
        renamed = {DATA if axis == unknown[0] else axis: length for axis, length in mesh.axes}
        raise ValueError(
            f"the {mesh} has no axis {DATA!r}, so the ranks along {unknown[0]!r} would hold parts of one model and "
            f"exchange nothing; where they hold the same parameters, write pt.init(mesh={renamed}), and where they do "
            f"hold parts, pt.init(mesh={ {DATA: 1, **mesh.lengths} })"
        )


def mesh_of(whole: Port) -> Mesh:
    """The layout of a world; without a mesh, along the data axis alone."""
    return whole.mesh or Mesh(((DATA, whole.size),))
