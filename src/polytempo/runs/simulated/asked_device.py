"""The device of a simulated cluster's workers, for an option `device`.

                      cluster with a device              cluster without
auto                  it, as on the cluster's hosts      the host
cpu                   the host                           the host
cuda, …               it; another kind is refused        the host
"""

from __future__ import annotations

from dataclasses import replace

from polytempo.cluster import Cluster
from polytempo.core import Strategy
from polytempo.core.calls.refusals import refuse
from polytempo.core.system.url_path import Place
from polytempo.device import HOST, accelerator_kind
from polytempo.report.status.stream import ends_of
from polytempo.spec.run_options import RunOptions
from polytempo.training.model.run_device import suits_device


def on_asked_device(cluster: Cluster, device: str) -> Cluster:
    """The cluster without its device, if workers compute on the host.

    Errors: `Incompatible` (PT1908) for a device of another kind than the measured one.
    """
    kind, measured = device.partition(":")[0], cluster.device
    if measured is not None and kind not in ("auto", HOST.type, measured.kind):
        refuse({"device", "calibration"}, device=kind, measured=measured.name, kind=measured.kind, cluster=cluster.name)
    return replace(cluster, device=None) if kind == HOST.type else cluster


def device_of(run: Place) -> str:
    """The kind of the device that the run's workers computed on; the host, if the run does not say."""
    start, _ = ends_of(run)
    return HOST.type if start is None else start.environment.get("device", HOST.type)


def on_suited_device(cluster: Cluster, strategy: Strategy) -> Cluster:
    """The cluster with workers on its device. Strategies of the CPU alone stay on the host."""
    return cluster.on_device() if suits_device(RunOptions(), strategy) else cluster


def here(device: str) -> str:
    """The place where this machine computes for a run that is predicted on `device`: there, or else "auto"."""
    kind = device.partition(":")[0]
    return device if kind in (HOST.type, accelerator_kind()) else "auto"
