"""What torchrun, Slurm and Kubernetes say in their variables, and what is no launcher at all."""

from pathlib import Path
from typing import Any

import pytest

from uneven import InputError
from uneven.launch import script
from uneven.launch.context import ProcessContext
from uneven.launch.environment import LaunchEnvironment
from uneven.launch.external import variables
from uneven.launch.external.variables import agent_endpoint, expand_nodes, parse_tasks_per_node, read_launcher
from uneven.launch.find_script import Script

FOUR = {"RANK": "3", "WORLD_SIZE": "4", "MASTER_ADDR": "host", "MASTER_PORT": "1234"}
TORCHRUN = {**FOUR, "TORCHELASTIC_RUN_ID": "job", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "1"}
SLURM = {
    "SLURM_PROCID": "3",
    "SLURM_NTASKS": "5",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2),1",
    "SLURM_STEP_NODELIST": "gpu[09-11]",
    "SLURM_JOB_NODELIST": "gpu[01-99]",
    "SLURM_JOB_ID": "4711",
    "SLURM_STEP_ID": "0",
    "SLURMD_NODENAME": "gpu10",
}
POD = {**FOUR, "KUBERNETES_SERVICE_HOST": "10.96.0.1", "PET_NNODES": "4", "PET_NPROC_PER_NODE": "1"}


@pytest.fixture(autouse=True)
def without_an_agent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(variables, "_commands_above", list)


def without(environ: dict[str, str], *names: str, **others: str) -> dict[str, str]:
    return {name: value for name, value in {**environ, **others}.items() if name not in names}


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        (
            {**TORCHRUN, "TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "2"},
            ("torchrun", 3, 4, 1, 2, "host", 1234, "uneven/job/", True),
        ),
        (
            {**TORCHRUN, "TORCHELASTIC_USE_AGENT_STORE": "False", "SLURM_PROCID": "0", "SLURM_NTASKS": "2"},
            ("torchrun", 3, 4, 1, 2, "host", 1234, "uneven/job/", False),
        ),
        (FOUR, ("RANK and WORLD_SIZE", 3, 4, None, None, "host", 1234, "uneven/", False)),
        (POD, ("PyTorchJob", 3, 4, None, None, "host", 1234, "uneven/", False)),
        (
            without(POD, "MASTER_ADDR", "MASTER_PORT", PET_MASTER_ADDR="master-0", PET_MASTER_PORT="23456"),
            ("PyTorchJob", 3, 4, None, None, "master-0", 23456, "uneven/", False),
        ),
        (SLURM, ("srun", 3, 5, 1, 2, "gpu09", None, "uneven/4711.0/", False)),
        (
            without(SLURM, "SLURM_STEP_TASKS_PER_NODE", "SLURM_STEP_NODELIST", "SLURM_STEP_ID", MASTER_PORT="99"),
            ("srun", 3, 5, 1, None, "gpu01", 99, "uneven/4711.0/", False),
        ),
        # Of the job, beside a step with fewer tasks: the roster will tell how many are here.
        (
            without(SLURM, "SLURM_STEP_TASKS_PER_NODE", SLURM_TASKS_PER_NODE="8(x99)", MASTER_ADDR="10.0.0.1"),
            ("srun", 3, 5, 1, None, "10.0.0.1", None, "uneven/4711.0/", False),
        ),
        (
            {**SLURM, **FOUR, "WORLD_SIZE": "8"},
            ("RANK and WORLD_SIZE", 3, 8, None, None, "host", 1234, "uneven/", False),
        ),
    ],
)
def test_every_launcher_is_read(environ: dict[str, str], expected: tuple[Any, ...]) -> None:
    found = read_launcher(environ)
    assert found is not None
    told = (found.launcher, found.rank, found.world_size, found.local_rank, found.local_world_size, found.host)
    assert (*told, found.prefix, found.has_store) == (*expected[:6], *expected[7:])
    assert found.port == expected[6] if expected[6] is not None else 15000 <= found.port < 25000
    assert found.is_external
    assert not found.hosts_store


def test_the_other_ranks_of_a_job_find_the_same_store_and_rank_0_serves_it() -> None:
    first = read_launcher({**SLURM, "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0"})
    other = read_launcher(SLURM)
    assert first is not None
    assert other is not None
    assert (first.host, first.port, first.prefix) == (other.host, other.port, other.prefix)
    assert first.hosts_store
    assert other.peers == ("gpu09", "gpu11")
    step = read_launcher({**SLURM, "SLURM_STEP_ID": "1"})
    assert step is not None
    assert step.port != other.port  # two steps of one job may run at the same time


@pytest.mark.parametrize(
    "environ",
    [
        {},
        {"RANK": "0"},
        {"RANK": "0", "WORLD_SIZE": "2"},
        {**FOUR, "RANK": "0", "WORLD_SIZE": "1"},  # one process, which may start ranks itself
        {"MASTER_ADDR": "host", "MASTER_PORT": "1234"},
        {**SLURM, "SLURM_PROCID": "0", "SLURM_NTASKS": "1"},
        without(SLURM, "SLURM_PROCID"),  # the shell of salloc
        without(SLURM, "SLURM_STEP_ID", ENVIRONMENT="BATCH", SLURM_PROCID="0"),  # a batch script, which runs once
        {**SLURM, "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"},  # an interactive step of a job with more tasks
        {"OMPI_COMM_WORLD_SIZE": "1", "OMPI_COMM_WORLD_RANK": "0"},
        {"PET_NNODES": "2"},
    ],
)
def test_it_is_no_launcher_without_the_rest_of_its_variables(environ: dict[str, str]) -> None:
    assert read_launcher(environ) is None


@pytest.mark.parametrize(
    ("environ", "words"),
    [
        ({**FOUR, "RANK": "x"}, ("RANK='x'", "whole number")),
        ({**FOUR, "RANK": "4"}, ("RANK=4 with WORLD_SIZE=4",)),
        ({**FOUR, "WORLD_SIZE": "0"}, ("WORLD_SIZE=0",)),
        ({**FOUR, "MASTER_PORT": "70000"}, ("MASTER_PORT=70000", "1 to 65535")),
        (without(FOUR, "MASTER_PORT"), ("RANK=3", "MASTER_ADDR=host", "without MASTER_PORT")),
        ({**FOUR, "LOCAL_RANK": "2", "LOCAL_WORLD_SIZE": "2"}, ("LOCAL_RANK=2", "LOCAL_WORLD_SIZE=2")),
        ({**FOUR, "LOCAL_WORLD_SIZE": "5"}, ("LOCAL_WORLD_SIZE=5",)),
        (without(TORCHRUN, "MASTER_ADDR"), ("MASTER_ADDR is not set",)),
        ({**FOUR, "RANK": "0", "SLURM_PROCID": "2", "SLURM_NTASKS": "4"}, ("RANK=0", "SLURM_PROCID=2")),
        ({**SLURM, "SLURM_PROCID": "5"}, ("SLURM_PROCID=5 with SLURM_NTASKS=5",)),
        ({**SLURM, "SLURM_STEP_TASKS_PER_NODE": "2(y2)"}, ("SLURM_STEP_TASKS_PER_NODE='2(y2)'", "'2(x2),1'")),
        ({**SLURM, "SLURM_STEP_NODELIST": "gpu[1-"}, ("SLURM_STEP_NODELIST='gpu[1-'",)),
        ({**SLURM, "SLURM_LOCALID": "2"}, ("SLURM_LOCALID=2",)),
        (without(SLURM, "SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST"), ("SLURM_JOB_NODELIST", "export MASTER_ADDR=")),
        ({**POD, "PET_NPROC_PER_NODE": "2"}, ("PET_NPROC_PER_NODE=2", "torchrun train.py")),
        ({"PET_NNODES": "1:3", "PET_RDZV_ENDPOINT": "a:1"}, ("PET_NNODES=1:3", "torchrun train.py")),
        ({"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "1"}, ("mpirun", "torchrun")),
    ],
)
def test_what_cannot_be_is_named_with_its_value(environ: dict[str, str], words: tuple[str, ...]) -> None:
    with pytest.raises(InputError) as caught:
        read_launcher(environ)
    assert "\n" not in str(caught.value)
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("node1", ("node1",)),
        ("node[1-3]", ("node1", "node2", "node3")),
        ("n[08-10,3],login", ("n08", "n09", "n10", "n3", "login")),
        ("r[1-2]n[1-2]-ib", ("r1n1-ib", "r1n2-ib", "r2n1-ib", "r2n2-ib")),
        ("a,b-c,d.e", ("a", "b-c", "d.e")),
    ],
)
def test_node_lists(text: str, names: tuple[str, ...]) -> None:
    assert expand_nodes("SLURM_NODELIST", text) == names


@pytest.mark.parametrize("text", ["", "a,,b", "a[1-2", "a]1[", "a[[1]]", "a[2-1]", "a[x]", "a[1-]", "a[0-999999999]"])
def test_bad_node_lists(text: str) -> None:
    with pytest.raises(InputError, match="SLURM_NODELIST="):
        expand_nodes("SLURM_NODELIST", text)


def test_tasks_per_node() -> None:
    assert parse_tasks_per_node("X", "2(x2),1") == (2, 2, 1)
    assert parse_tasks_per_node("X", "4") == (4,)
    for text in ("", "2(x)", "a", "2(x999999999)"):
        with pytest.raises(InputError, match="X="):
            parse_tasks_per_node("X", text)


@pytest.mark.parametrize(
    ("environ", "words", "expected"),
    [
        ({}, ["torchrun", "--rdzv-backend=c10d", "--rdzv-endpoint=node1:29500", "t.py"], ("node1", 29500)),
        ({}, ["torchrun", "--rdzv_backend", "c10d", "--rdzv_endpoint", "node1", "t.py"], ("node1", 29400)),
        ({}, ["python", "--rdzv-backend=c10d", "--rdzv-endpoint=[fd77::1]:1234"], ("fd77::1", 1234)),
        ({"PET_RDZV_BACKEND": "c10d", "PET_RDZV_ENDPOINT": "10.0.0.1:7"}, ["bash"], ("10.0.0.1", 7)),
        ({}, ["torchrun", "--standalone", "t.py"], None),
        ({}, ["torchrun", "--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0"], None),
        ({}, ["torchrun", "--rdzv-backend=static", "--rdzv-endpoint=node1:29500"], None),
        ({}, ["torchrun", "--master-addr=node1"], None),
    ],
)
def test_the_rendezvous_of_the_agent(
    environ: dict[str, str], words: list[str], expected: tuple[str, int] | None
) -> None:
    assert agent_endpoint(environ, [["/bin/sh"], words]) == expected


def test_devices_must_match_the_processes_there_are() -> None:
    started = read_launcher(TORCHRUN)
    assert started is not None
    with pytest.raises(InputError) as caught:
        ProcessContext(started).devices("cpu,cpu@0.4")
    assert "names 2 for the 4 processes that torchrun started" in str(caught.value)


def test_uneven_run_takes_part_as_the_rank_that_srun_made_of_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "train.py").write_text("import uneven\nuneven.fit()\n")
    took: list[LaunchEnvironment | None] = []
    monkeypatch.setattr(script, "_execute_here", lambda *args: took.append(args[2]))
    monkeypatch.setattr(script, "run_on_ranks", lambda *_: pytest.fail("it has started ranks of its own"))
    for name, value in SLURM.items():
        monkeypatch.setenv(name, value)
    script.run_script(Script(tmp_path / "train.py"), {"devices": "cpu,cpu,cpu,cpu,cpu@0.5"})
    assert [environment.rank for environment in took if environment is not None] == [3]
