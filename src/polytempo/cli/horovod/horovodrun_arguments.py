"""The options of Horovod 0.28's `horovodrun`, by its names, and their variables."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

_REFUSED = {
    "mpi": "no MPI takes part: leave --mpi out",
    "jsrun": "jsrun is not supported: leave --jsrun out, and give the hosts",
    "mpi_args": "no MPI takes part: leave --mpi-args out",
    "binding_args": "binding is jsrun's and not supported: leave --binding-args out",
    "config_file": "a file of options is not supported: leave --config-file out, and give the options themselves",
}


class _Tuned(NamedTuple):
    """An option that becomes a variable of the ranks."""

    option: str
    variable: str
    kind: Any = str
    factor: int = 1
    help: str = ""


_MIB = 1 << 20
_VALUES = (
    _Tuned(
        "--fusion-threshold-mb", "HOROVOD_FUSION_THRESHOLD", int, _MIB, "The most MiB of all-reduces that become one."
    ),
    _Tuned("--cycle-time-ms", "HOROVOD_CYCLE_TIME", float, 1, "For how long names wait for others."),
    _Tuned("--cache-capacity", "HOROVOD_CACHE_CAPACITY", int, 1, "Number of names that ranks remember."),
    _Tuned("--autotune-log-file", "HOROVOD_AUTOTUNE_LOG", str, 1, "File for the autotuner's trials."),
    _Tuned("--autotune-warmup-samples", "HOROVOD_AUTOTUNE_WARMUP_SAMPLES", int),
    _Tuned("--autotune-steps-per-sample", "HOROVOD_AUTOTUNE_STEPS_PER_SAMPLE", int),
    _Tuned("--autotune-bayes-opt-max-samples", "HOROVOD_AUTOTUNE_BAYES_OPT_MAX_SAMPLES", int),
    _Tuned("--autotune-gaussian-process-noise", "HOROVOD_AUTOTUNE_GAUSSIAN_PROCESS_NOISE", float),
    _Tuned("--timeline-filename", "HOROVOD_TIMELINE", str, 1, "A Chrome trace of negotiation and execution."),
    _Tuned("--stall-check-warning-time-seconds", "HOROVOD_STALL_CHECK_TIME_SECONDS", int),
    _Tuned("--stall-check-shutdown-time-seconds", "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS", int),
    _Tuned("--num-nccl-streams", "HOROVOD_NUM_NCCL_STREAMS", int),
    _Tuned("--thread-affinity", "HOROVOD_THREAD_AFFINITY", int),
    _Tuned("--gloo-timeout-seconds", "HOROVOD_GLOO_TIMEOUT_SECONDS", int),
    _Tuned("--log-level", "HOROVOD_LOG_LEVEL", str, 1, "TRACE, DEBUG, INFO, WARNING, ERROR or FATAL."),
)
_SWITCHES = (
    ("--autotune", "--no-autotune", "HOROVOD_AUTOTUNE"),
    ("--hierarchical-allreduce", "--no-hierarchical-allreduce", "HOROVOD_HIERARCHICAL_ALLREDUCE"),
    ("--hierarchical-allgather", "--no-hierarchical-allgather", "HOROVOD_HIERARCHICAL_ALLGATHER"),
    ("--timeline-mark-cycles", "--no-timeline-mark-cycles", "HOROVOD_TIMELINE_MARK_CYCLES"),
    ("--no-stall-check", "--stall-check", "HOROVOD_STALL_CHECK_DISABLE"),
    ("--log-without-timestamp", "--log-with-timestamp", "HOROVOD_LOG_HIDE_TIME"),
    ("--mpi-threads-disable", "--no-mpi-threads-disable", "HOROVOD_MPI_THREADS_DISABLE"),
)


def parsed(words: Sequence[str]) -> argparse.Namespace:
    """The options; `command` is the program of the ranks. Errors in argparse's words, and ValueError for refusals."""
    given = _parser().parse_args(list(words))
    for name, reason in _REFUSED.items():
        if getattr(given, name):
            raise ValueError(reason)
    if given.num_proc is not None and given.num_proc < 1:
        raise ValueError(f"-np {given.num_proc} must be at least 1")
    if given.command[:1] == ["--"]:
        del given.command[0]
    if given.check_build or given.version:
        return given
    if not given.command:
        raise ValueError("no command is given: polytempo horovodrun -np 4 python train.py")
    if given.hosts and given.hostfile:
        raise ValueError("hosts are given twice, by -H and by --hostfile; leave one of them out")
    elastic = given.host_discovery_script or given.min_num_proc or given.max_num_proc
    if elastic and not given.host_discovery_script and not (given.hosts or given.hostfile or given.slots_per_host):
        given.slots_per_host = given.max_num_proc or given.num_proc
    if given.num_proc is None and not (elastic and given.min_num_proc):
        raise ValueError("say how many processes: -np 4, or --min-np 2 where their number changes")
    return given


def variables(given: argparse.Namespace) -> dict[str, str]:
    """The HOROVOD_* variables of the ranks that the options mean."""
    found = {}
    for each in _VALUES:
        value = getattr(given, _name(each.option))
        if value is not None:
            found[each.variable] = str(value * each.factor if each.factor != 1 else value)
    for option, _, variable in _SWITCHES:
        value = getattr(given, _name(option))
        if value is not None:
            found[variable] = str(int(value))
    if given.disable_cache:
        found["HOROVOD_CACHE_CAPACITY"] = "0"
    return found


def _name(option: str) -> str:
    return option.removeprefix("--").replace("-", "_")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="polytempo horovodrun",
        description="Run a command on several ranks, which polytempo.horovod.torch connects; options as horovodrun's.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("-v", "--version", action="store_true", help="Print the version and exit.")
    add("-cb", "--check-build", action="store_true", help="Print the parts of this installation, and exit.")
    add("-np", "--num-proc", type=int, help="How many processes run.")
    add(
        "--start-timeout",
        type=float,
        default=30.0,
        metavar="S",
        help="How long hosts may take to be there. Default: 30.",
    )
    add("--network-interfaces", "--network-interface", help="The interface for the ranks' exchanges.")
    add("--output-filename", type=Path, help="A folder for each rank's output: rank.0/stdout, rank.0/stderr.")
    add("--prefix-output-with-timestamp", "-prefix-timestamp", action="store_true")
    add("--verbose", action="store_true", help="Show each start and its host.")
    add("--disable-cache", action="store_true", help="Ranks remember no names.")
    add("--config-file", help=argparse.SUPPRESS)
    _add_hosts(parser.add_argument_group("hosts"))
    _add_elastic(parser.add_argument_group("elastic"))
    tuning = parser.add_argument_group("variables of the ranks")
    for each in _VALUES:
        tuning.add_argument(each.option, type=each.kind, help=f"{each.help} ({each.variable})".strip())
    for option, other, variable in _SWITCHES:
        name = _name(option)
        tuning.add_argument(option, dest=name, action="store_true", default=None, help=f"({variable})")
        tuning.add_argument(other, dest=name, action="store_false", default=None)
    for option in ("--mpi", "--jsrun", "--gloo", "--tcp"):
        add(option, action="store_true", help=argparse.SUPPRESS)
    for option in ("--mpi-args", "--binding-args"):
        add(option, help=argparse.SUPPRESS)
    add("command", nargs=argparse.REMAINDER, help="The program of each rank.")
    return parser


def _add_hosts(group: argparse._ArgumentGroup) -> None:
    group.add_argument("-H", "--hosts", help="host1:2,host2:4: hosts and how many processes each takes.")
    group.add_argument("-hostfile", "--hostfile", type=Path, help="A file with lines like: host1 slots=2.")
    group.add_argument("-p", "--ssh-port", type=int, help="Of the hosts' ssh.")
    group.add_argument("-i", "--ssh-identity-file", help="The key of ssh.")


def _add_elastic(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--host-discovery-script", type=Path, help="A program that prints the hosts there are, one a line: host1:2.")
    add("--min-np", "--min-num-proc", dest="min_num_proc", type=int, help="With fewer processes the run waits.")
    add("--max-np", "--max-num-proc", dest="max_num_proc", type=int, help="There are never more processes.")
    add("--slots-per-host", "--slots", type=int, help="Of hosts that are printed without a number. Default: 1.")
    add("--elastic-timeout", type=float, default=600.0, metavar="S", help="How long --min-np may be waited for.")
    add("--reset-limit", type=int, help="After so many changes the run ends.")
    add(
        "--blacklist-cooldown-range",
        type=int,
        nargs=2,
        metavar=("MIN", "MAX"),
        help="After how many seconds a host that failed is used again: MIN, doubled each time up to MAX.",
    )
