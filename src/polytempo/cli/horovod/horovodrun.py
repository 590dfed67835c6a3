"""`polytempo horovodrun`: ranks of a script for Horovod, started as Horovod's own launcher starts them."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping

import typer

import polytempo
from polytempo.cli.horovod.horovodrun_arguments import variables
from polytempo.horovod.launcher.elastic_ranks import run_elastic_ranks
from polytempo.horovod.launcher.hosts import HostDiscovery, parsed_hosts, read_hostfile
from polytempo.horovod.launcher.run_ranks import RanksFailed, run_ranks
from polytempo.horovod.launcher.settings import ElasticSettings, LaunchSettings
from polytempo.horovod.runtime.settings import HorovodSettings
from polytempo.horovod.torch.basics import nccl_built
from polytempo.native.library import why_not

_BUILD = """Polytempo v{version}, in the place of Horovod:

Available Frameworks:
    [ ] TensorFlow
    [X] PyTorch
    [ ] MXNet

Available Controllers:
    [ ] MPI
    [X] Gloo

Available Tensor Operations:
    [{nccl}] NCCL
    [ ] DDL
    [ ] CCL
    [ ] MPI
    [X] Gloo
    [{native}] shared memory of a host"""


def horovodrun(given: argparse.Namespace) -> None:
    """Run the command that the options describe."""
    if given.version or given.check_build:
        print(polytempo.__version__ if given.version else _build())
        return
    exported = variables(given)
    HorovodSettings.from_environment(exported)  # refuses wrong values here, before every rank does
    settings = LaunchSettings(
        start_timeout_s=given.start_timeout,
        network_interface=given.network_interfaces,
        ssh_port=given.ssh_port,
        ssh_identity_file=given.ssh_identity_file,
        output=given.output_filename,
        timestamps=given.prefix_output_with_timestamp,
        verbose=given.verbose,
        exported=exported,
    )
    hosts = _hosts(given)
    try:
        if given.host_discovery_script or given.min_num_proc or given.max_num_proc:
            script = given.host_discovery_script
            discovery = HostDiscovery(script, given.slots_per_host or 1) if script else (lambda: hosts)
            run_elastic_ranks(given.command, discovery, settings, _elastic(given))
        else:
            run_ranks(given.command, given.num_proc, hosts, settings)
    except RanksFailed as error:
        print(f"error: {error}", file=sys.stderr)
        raise typer.Exit(error.exit_code) from None


def _build() -> str:
    def mark(there: bool) -> str:
        return "X" if there else " "

    return _BUILD.format(version=polytempo.__version__, nccl=mark(bool(nccl_built())), native=mark(not why_not()))


def _hosts(given: argparse.Namespace) -> Mapping[str, int]:
    if given.hosts:
        return parsed_hosts(given.hosts)
    if given.hostfile:
        return read_hostfile(given.hostfile)
    return {"localhost": given.slots_per_host or given.num_proc or 1}


def _elastic(given: argparse.Namespace) -> ElasticSettings:
    return ElasticSettings.of(
        given.num_proc,
        given.min_num_proc,
        given.max_num_proc,
        timeout_s=given.elastic_timeout,
        reset_limit=given.reset_limit,
        cooldown_s=given.blacklist_cooldown_range,
    )
