"""The environment of each launcher, and the place that it means."""

from __future__ import annotations

from pathlib import Path

import pytest

from polytempo.engines.join.environment import RankPlace, first_host, recognise

TORCHRUN = {
    "TORCHELASTIC_RUN_ID": "none",
    "TORCHELASTIC_RESTART_COUNT": "2",
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "GROUP_RANK": "1",
    "MASTER_ADDR": "node1.example",
    "MASTER_PORT": "29400",
}
RAY = {
    "RAY_JOB_ID": "01000000",
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "NODE_RANK": "1",
    "MASTER_ADDR": "10.0.0.7",
    "MASTER_PORT": "41234",
}
BY_HAND = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}
SLURM = {
    "SLURM_JOB_ID": "4711",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "4",
    "SLURM_NTASKS": "7",
    "SLURM_STEP_NUM_TASKS": "7",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_STEP_NUM_NODES": "3",
    "SLURM_STEP_TASKS_PER_NODE": "3(x2),1",
    "SLURM_STEP_NODELIST": "node[003-004,8]",
    "SLURM_LAUNCH_NODE_IPADDR": "10.1.0.1",
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "2",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "2",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
    "OMPI_COMM_WORLD_NODE_RANK": "2",
    "PMIX_NAMESPACE": "prterun-node1-815@1",
}
MPICH = {
    "PMI_RANK": "1",
    "PMI_SIZE": "2",
    "PMI_FD": "8",
    "MPI_LOCALRANKID": "1",
    "MPI_LOCALNRANKS": "2",
    "HYDI_CONTROL_FD": "7",
    "MPIR_CVAR_CH3_INTERFACE_HOSTNAME": "node1",
}
INTEL_MPI = {**MPICH, "I_MPI_ROOT": "/opt/intel/oneapi/mpi/latest"}
MPICH_SPREAD = {**MPICH, "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "1"}
SPREAD = {**OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_RANK": "0", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}
POLYTEMPO = {
    "POLYTEMPO_RANK": "1",
    "POLYTEMPO_SIZE": "2",
    "POLYTEMPO_RENDEZVOUS": "/somewhere/polytempo-1",
    "POLYTEMPO_GENERATION": "0",
}
ALONE = RankPlace("none", 0, 1, 0, 1, None, None, None)


@pytest.mark.parametrize(
    ("environ", "place"),
    [
        pytest.param({}, ALONE, id="nothing"),
        pytest.param({"PATH": "/bin", "LOCAL_RANK": "3"}, ALONE, id="nothing that counts"),
        pytest.param(TORCHRUN, RankPlace("torchrun", 5, 8, 1, 4, 1, "node1.example", 29400), id="torchrun"),
        pytest.param(BY_HAND, RankPlace("torchrun", 1, 2, 1, 2, 0, "localhost", 29500), id="by hand, one host"),
        pytest.param(
            {**BY_HAND, "MASTER_ADDR": "node1"},
            RankPlace("torchrun", 1, 2, 0, None, None, "node1", 29500),
            id="by hand, hosts unknown",
        ),
        pytest.param(
            {"RANK": "0", "WORLD_SIZE": "1"}, RankPlace("torchrun", 0, 1, 0, 1, 0, None, None), id="by hand, alone"
        ),
        pytest.param(
            {**POLYTEMPO, "POLYTEMPO_RENDEZVOUS": "tcp://127.0.0.1:4711"},
            RankPlace("Polytempo", 1, 2, 1, 2, 0, "127.0.0.1", 4711),
            id="an engine of this host without a folder",
        ),
        pytest.param(
            {**POLYTEMPO, "POLYTEMPO_RENDEZVOUS": "tcp://[fd00::7]:4711"},
            RankPlace("Polytempo", 1, 2, 0, None, None, "fd00::7", 4711),
            id="an engine of several hosts that says no more",
        ),
        pytest.param(
            {
                **POLYTEMPO,
                "POLYTEMPO_RENDEZVOUS": "tcp://node1:4711",
                "POLYTEMPO_LOCAL_RANK": "0",
                "POLYTEMPO_LOCAL_SIZE": "1",
                "POLYTEMPO_HOST": "1",
            },
            RankPlace("Polytempo", 1, 2, 0, 1, 1, "node1", 4711),
            id="an engine of several hosts",
        ),
        pytest.param(RAY, RankPlace("Ray", 3, 4, 1, 2, 1, "10.0.0.7", 41234), id="Ray Train"),
        pytest.param(
            {**RAY, **TORCHRUN},
            RankPlace("torchrun", 5, 8, 1, 4, 1, "node1.example", 29400),
            id="torchrun under Ray",
        ),
        pytest.param(SLURM, RankPlace("Slurm", 4, 7, 1, 3, 1, "node003", 63853), id="srun on three hosts"),
        pytest.param(
            {**SLURM, "SLURM_NODEID": "0", "SLURM_STEP_NUM_NODES": "1", "SLURM_STEP_TASKS_PER_NODE": "7"},
            RankPlace("Slurm", 4, 7, 1, 7, 0, "127.0.0.1", 63853),
            id="srun on one host",
        ),
        pytest.param(
            {**SLURM, "MASTER_ADDR": "node9", "MASTER_PORT": "2000"},
            RankPlace("Slurm", 4, 7, 1, 3, 1, "node9", 2000),
            id="srun, the user names the master",
        ),
        pytest.param(
            {**SLURM, **TORCHRUN},
            RankPlace("torchrun", 5, 8, 1, 4, 1, "node1.example", 29400),
            id="torchrun under srun",
        ),
        pytest.param({**SLURM, "SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"}, ALONE, id="srun --pty, one task"),
        pytest.param(
            {"SLURM_JOB_ID": "4711", "SLURM_NTASKS": "4", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"},
            ALONE,
            id="sbatch script",
        ),
        pytest.param({"SLURM_JOB_ID": "4711", "SLURM_NTASKS": "4"}, ALONE, id="salloc on the login node"),
        pytest.param({**SLURM, "SLURM_STEP_ID": "4294967290"}, ALONE, id="salloc's interactive step"),
        pytest.param(OPEN_MPI, RankPlace("Open MPI", 2, 4, 2, 4, 0, "127.0.0.1", 62511), id="mpirun on one host"),
        pytest.param(
            {**SLURM, **OPEN_MPI}, RankPlace("Open MPI", 2, 4, 2, 4, 0, "127.0.0.1", 62511), id="mpirun in Slurm"
        ),
        pytest.param(
            {**SPREAD, "OMPI_MCA_orte_hnp_uri": "1531576320.0;tcp://10.96.0.1,10.148.0.1:34911"},
            RankPlace("Open MPI", 2, 4, 0, 2, None, "10.96.0.1", 62511),
            id="mpirun 4 on several hosts",
        ),
        pytest.param(
            {**SPREAD, "OMPI_MCA_orte_hnp_uri": "1314521088.0;tcp6://[fe80::b9b:ac5d:9cf0:b858,2620::2]:43370"},
            RankPlace("Open MPI", 2, 4, 0, 2, None, "fe80::b9b:ac5d:9cf0:b858", 62511),
            id="mpirun 4 over IPv6",
        ),
        pytest.param(
            {**SPREAD, "MASTER_ADDR": "node1", "MASTER_PORT": "29500"},
            RankPlace("Open MPI", 2, 4, 0, 2, None, "node1", 29500),
            id="mpirun 5 on several hosts",
        ),
        pytest.param(MPICH, RankPlace("MPICH", 1, 2, 1, 2, 0, "127.0.0.1", 61646), id="MPICH on one host"),
        pytest.param(INTEL_MPI, RankPlace("Intel MPI", 1, 2, 1, 2, 0, "127.0.0.1", 61646), id="Intel MPI on one host"),
        pytest.param(
            {**MPICH_SPREAD, "MASTER_ADDR": "node1", "MASTER_PORT": "29500"},
            RankPlace("MPICH", 1, 2, 0, 1, None, "node1", 29500),
            id="MPICH on several hosts",
        ),
        pytest.param(
            {**SLURM, **MPICH_SPREAD, "SLURM_JOB_NODELIST": "node[003-004,8]"},
            RankPlace("MPICH", 1, 2, 0, 1, None, "node003", 63853),
            id="MPICH in an allocation of Slurm",
        ),
        pytest.param(
            {**MPICH, "PMI_RANK": "0", "PMI_SIZE": "1", "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "1"},
            RankPlace("MPICH", 0, 1, 0, 1, 0, None, None),
            id="MPICH, one process",
        ),
        pytest.param(
            {**SLURM, "PMI_RANK": "4", "PMI_SIZE": "7", "PMI_FD": "13"},
            RankPlace("Slurm", 4, 7, 1, 3, 1, "node003", 63853),
            id="srun --mpi=pmi2",
        ),
        pytest.param(
            {**MPICH, **OPEN_MPI}, RankPlace("Open MPI", 2, 4, 2, 4, 0, "127.0.0.1", 62511), id="Open MPI under MPICH"
        ),
        pytest.param(
            {**TORCHRUN, **POLYTEMPO},
            RankPlace("Polytempo", 1, 2, 1, 2, 0, None, None, 0, Path("/somewhere/polytempo-1")),
            id="our own engine, started under torchrun",
        ),
    ],
)
def test_recognise(environ: dict[str, str], place: RankPlace) -> None:
    assert recognise(environ, lambda: 4711) == place


def test_torchrun_counts_restarts_by_agent_so_they_are_no_generation() -> None:
    assert recognise({**TORCHRUN, "TORCHELASTIC_RESTART_COUNT": "2"}).generation == 0


@pytest.mark.parametrize(
    ("environ", "named"),
    [
        ({**TORCHRUN, "RANK": "8"}, ["RANK=8", "WORLD_SIZE=8"]),
        ({**TORCHRUN, "RANK": "-1"}, ["RANK='-1'"]),
        ({**TORCHRUN, "WORLD_SIZE": "many"}, ["WORLD_SIZE='many'"]),
        ({**TORCHRUN, "LOCAL_RANK": "4"}, ["local rank 4 of 4", "WORLD_SIZE=8"]),
        ({**TORCHRUN, "LOCAL_WORLD_SIZE": "9"}, ["local rank 1 of 9", "WORLD_SIZE=8"]),
        ({**TORCHRUN, "MASTER_PORT": "70000"}, ["MASTER_PORT=70000"]),
        ({**TORCHRUN, "MASTER_PORT": ""}, ["MASTER_PORT is not set", "'RANK': '5'"]),
        ({**BY_HAND, "MASTER_ADDR": ""}, ["MASTER_ADDR is not set"]),
        ({"RANK": "0"}, ["WORLD_SIZE is not set", "'RANK': '0'"]),
        ({"WORLD_SIZE": "2"}, ["RANK is not set"]),
        ({**SLURM, "SLURM_PROCID": "7"}, ["SLURM_PROCID=7", "SLURM_NTASKS=7"]),
        ({**SLURM, "SLURM_LOCALID": "3"}, ["local rank 3 of 3"]),
        (SPREAD, ["-x MASTER_ADDR"]),
        ({**OPEN_MPI, "PMIX_NAMESPACE": ""}, ["PMIX_NAMESPACE", "-x MASTER_PORT"]),
        ({**OPEN_MPI, "OMPI_COMM_WORLD_RANK": "4"}, ["OMPI_COMM_WORLD_RANK=4", "OMPI_COMM_WORLD_SIZE=4"]),
        (MPICH, ["MPICH", "-genv MASTER_ADDR 127.0.0.1 -genv MASTER_PORT 29500"]),
        (MPICH_SPREAD, ["MPICH", "2 ranks", "-genv MASTER_ADDR <host of rank 0> -genv MASTER_PORT 29500"]),
        ({**MPICH_SPREAD, "MASTER_ADDR": "node1"}, ["-genv MASTER_PORT 29500"]),
        ({**MPICH, "PMI_RANK": "2", "MASTER_PORT": "29500"}, ["PMI_RANK=2", "PMI_SIZE=2"]),
        ({"PMI_ID": "1", "MPI_LOCALRANKID": "1"}, ["PMI_RANK is not set", "'MPI_LOCALRANKID': '1'"]),
        ({"PMI_RANK": "1", "PMI_SIZE": "2"}, ["MPI_LOCALRANKID is not set", "'PMI_SIZE': '2'"]),
        ({"POLYTEMPO_RANK": "0", "POLYTEMPO_SIZE": "2"}, ["POLYTEMPO_RENDEZVOUS is not set"]),
    ],
)
def test_what_does_not_fit_together_is_refused_by_name(environ: dict[str, str], named: list[str]) -> None:
    with pytest.raises(ValueError, match=r".") as refused:
        recognise(environ, lambda: None)
    for name in named:
        assert name in str(refused.value)


@pytest.mark.parametrize(
    ("hosts", "first"),
    [
        ("node7", "node7"),
        ("node[003-005,8]", "node003"),
        ("node[1,5],login1", "node1"),
        ("login1,node[1-4]", "login1"),
        ("rack[1-2]-node[03-04]", "rack1-node03"),
    ],
)
def test_first_host_of_a_slurm_list(hosts: str, first: str) -> None:
    assert first_host(hosts) == first


@pytest.mark.parametrize(
    ("environ", "text"),
    [
        ({}, "no launcher: a world of one"),
        (TORCHRUN, "torchrun: rank 5 of 8, meeting at node1.example:29400"),
        (POLYTEMPO, "Polytempo: rank 1 of 2, meeting at /somewhere/polytempo-1"),
    ],
)
def test_a_place_says_who_was_recognised(environ: dict[str, str], text: str) -> None:
    assert str(recognise(environ)) == text


def test_two_steps_of_one_job_meet_at_different_ports() -> None:
    ports = {recognise({**SLURM, "SLURM_STEP_ID": str(step)}).master_port for step in range(4)}
    assert len(ports) == 4
