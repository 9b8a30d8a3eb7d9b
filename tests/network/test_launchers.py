"""The same script under Slurm's, Kubernetes' and torchrun's variables on three machines that differ.

Names lead to loopback or nowhere, a VPN-like interface is up, machines have 1, 2 and 1 ranks. Most are for `make soak`:
each starts four processes that load torch.
"""

import subprocess
import sys
import time
from collections.abc import Iterator
from itertools import takewhile
from pathlib import Path

import pytest
import torch

from tests.network.launcher_runs import (
    POLICIES,
    SIZES,
    assert_ended,
    assert_trained,
    finish,
    listeners_on_all_interfaces,
    places,
    plain_run,
    pod_variables,
    slurm_variables,
    write_script,
)
from tests.network.namespaces import Machine, needs_namespaces, network

pytestmark = needs_namespaces
TORCHRUN = str(Path(sys.executable).parent / "torchrun")
ALL = ",".join(POLICIES)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> dict[str, torch.Tensor]:
    return plain_run(tmp_path_factory.mktemp("plain"))


@pytest.fixture
def script(tmp_path: Path) -> Iterator[Path]:
    return write_script(tmp_path)


def add_vpn(machines: list[Machine]) -> None:
    for machine in machines:
        machine.add_interface("tailscale0", f"100.64.0.{machine.number}/10")


def start_slurm(machines: list[Machine], script: Path, *command: str, **others: str) -> list["subprocess.Popen[str]"]:
    words = (*command, str(script), str(script.parent), "8", ALL)
    return [
        machine.start(*words, env={**slurm_variables(rank, node, local, machines), **others})
        for machine, rank, node, local in places(machines)
    ]


def test_srun_uneven_run_on_machines_with_debian_names_and_a_vpn(script: Path, plain: dict[str, torch.Tensor]) -> None:
    with network(script.parent, 3, names="debian", family="dual") as machines:
        add_vpn(machines)
        words = ("-m", "uneven", "run", str(script), str(script.parent), "8", ALL)
        ranks = [
            machine.forked_python(*words, env=slurm_variables(rank, node, local, machines))
            for machine, rank, node, local in places(machines)
        ]
        said = finish(ranks)
        assert_ended(ranks, said)
        assert "network: lan0 (10.77.0.1), the way to the store, not what the hostnames lead to" in said[0]
        assert "(node1, node2, node3 to 127.0.1.1)" in said[0]
    assert_trained(script.parent, plain)


@pytest.mark.soak
@pytest.mark.parametrize(
    ("names", "family", "master"),
    [
        ("unresolvable", "v4", "10.77.0.1"),
        ("debian", "v4", "node1"),
        ("plain", "v6", "node1"),
        ("unresolvable", "dual", "fd77::1"),
    ],
)
def test_pods_find_each_other_by_the_four_variables(
    script: Path, plain: dict[str, torch.Tensor], names: str, family: str, master: str
) -> None:
    with network(script.parent, 3, names=names, family=family) as machines:  # type: ignore[arg-type]
        add_vpn(machines)
        words = (str(script), str(script.parent), "8", ALL)
        ranks = [machine.python(*words, env=pod_variables(rank, master)) for machine, rank, *_ in places(machines)]
        watched = [listeners_on_all_interfaces(machine) for machine in machines for _ in _until_done(ranks)]
        said = finish(ranks)
        assert_ended(ranks, said)
        assert watched
        assert not any(watched)
    assert_trained(script.parent, plain)


def _until_done(processes: list["subprocess.Popen[str]"]) -> Iterator[None]:
    """Again and again while the ranks run: listeners come and go."""
    for _ in range(40):
        yield
        try:
            processes[0].wait(0.2)
        except subprocess.TimeoutExpired:
            continue
        return


@pytest.mark.soak
def test_srun_with_names_that_nobody_knows(script: Path, plain: dict[str, torch.Tensor]) -> None:
    with network(script.parent, 3, names="unresolvable") as machines:
        add_vpn(machines)
        ranks = start_slurm(machines, script, sys.executable)
        said = finish(ranks)
        assert all(rank.returncode for rank in ranks)
        assert (
            "SLURM_STEP_NODELIST=node[1-3]: 'node1' is no name that node3 can resolve; export MASTER_ADDR=" in said[3]
        )
        for process in ranks:
            assert process.poll() is not None
        ranks = start_slurm(machines, script, sys.executable, MASTER_ADDR="10.77.0.1")
        said = finish(ranks)
        assert_ended(ranks, said)
    assert_trained(script.parent, plain)


def start_torchrun(machines: list[Machine], script: Path, *options: str) -> list["subprocess.Popen[str]"]:
    started = []
    for node, machine in enumerate(machines):
        own = [option for option in options if option != "is_host"]
        if "is_host" in options:
            own += ["--rdzv-conf", f"is_host={int(node == 0)}", "--local-addr", machine.address]
        command = [TORCHRUN, "--nnodes=3", f"--nproc-per-node={SIZES[node]}", f"--node-rank={node}", *own]
        started.append(
            machine.python(*command, str(script), str(script.parent), "8", ALL, env={"OMP_NUM_THREADS": "1"})
        )
    return started


@pytest.mark.soak
@pytest.mark.parametrize(
    ("names", "options"),
    [
        ("unresolvable", ("--master-addr", "10.77.0.1", "--master-port", "29500")),
        ("debian", ("--master-addr", "node1", "--master-port", "29500")),
        ("debian", ("--rdzv-backend", "c10d", "--rdzv-id", "job", "--rdzv-endpoint", "node1:29400")),
        # An agent does not know its own machine by a number where its name leads to loopback, or nowhere.
        ("debian", ("--rdzv-backend=c10d", "--rdzv-id=job", "--rdzv-endpoint=10.77.0.1:29400", "is_host")),
        ("unresolvable", ("--rdzv-backend=c10d", "--rdzv-id=job", "--rdzv-endpoint=10.77.0.1:29400", "is_host")),
    ],
    ids=["static numeric", "static debian", "c10d debian", "c10d numeric", "c10d unresolvable"],
)
def test_torchrun(script: Path, plain: dict[str, torch.Tensor], names: str, options: tuple[str, ...]) -> None:
    with network(script.parent, 3, names=names) as machines:  # type: ignore[arg-type]
        add_vpn(machines)
        agents = start_torchrun(machines, script, *options)
        said = finish(agents)
        assert_ended(agents, said)
    if "c10d" in " ".join(options):
        _assert_trained_in_any_order(script.parent, plain)
    else:
        assert_trained(script.parent, plain)


def _assert_trained_in_any_order(out: Path, plain: dict[str, torch.Tensor]) -> None:
    """c10d numbers machines as it likes: put them back into the order of the roster that the others have."""
    import json

    told = [json.loads((out / f"roster-{rank}.json").read_text()) for rank in range(4)]
    assert all(one["hosts"] == told[0]["hosts"] and one["machines"] == told[0]["machines"] for one in told)
    sizes = {host: told[0]["machines"].count(number) for number, host in enumerate(told[0]["hosts"])}
    assert sizes == {"node1": 1, "node2": 2, "node3": 1}
    for rank, one in enumerate(told):
        one.update(machines=[0, 1, 1, 2], hosts=["node1", "node2", "node3"])
        (out / f"roster-{rank}.json").write_text(json.dumps(one))
    assert_trained(out, plain)


@pytest.mark.soak
@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("eth7", "node2: GLOO_SOCKET_IFNAME=eth7: there is no interface 'eth7'"),
        ("lo", "node2: GLOO_SOCKET_IFNAME=lo is loopback, which other machines cannot reach"),
        ("tailscale0", "node2: GLOO_SOCKET_IFNAME=tailscale0 (100.64.0.2) does not lead to the other machines"),
    ],
)
def test_a_wrong_interface_of_the_users_is_refused_by_all(script: Path, value: str, words: str) -> None:
    with network(script.parent, 3) as machines:
        add_vpn(machines)
        ranks = [
            machine.python(
                *(str(script), str(script.parent), "8", "sync"),
                env={
                    **slurm_variables(rank, node, local, machines),
                    **({"GLOO_SOCKET_IFNAME": value} if node == 1 else {}),
                },
            )
            for machine, rank, node, local in places(machines)
        ]
        said = finish(ranks, 60)
    for rank, text in zip(ranks, said, strict=True):
        assert rank.returncode == 1, text
        assert words in text
        assert "export GLOO_SOCKET_IFNAME=lan0" in text
    assert not [*script.parent.glob("sync-*")]


@pytest.mark.soak
@pytest.mark.parametrize("seconds", [0.0, 0.5])  # before the first heartbeats may have come, and after
def test_a_pulled_cable_ends_the_run_on_all_sides_naming_the_host(script: Path, seconds: float) -> None:
    script.write_text(script.read_text().replace("epochs=2", "epochs=2000"))
    with network(script.parent, 3) as machines:
        ranks = start_slurm(machines, script, sys.executable)
        assert ranks[0].stdout is not None
        for line in ranks[0].stdout:
            if line.startswith("epoch 2/"):
                break
        time.sleep(seconds)
        machines[2].pull_cable()
        pulled_s = time.monotonic()
        said = finish(ranks, 60)
        assert time.monotonic() - pulled_s < 20.0
        assert [rank.returncode for rank in ranks] == [1, 1, 1, 1], said
        for text in said[:2]:  # of every machine that is still there
            assert "rank 3 (cpu on node3) fell silent" in text
        assert "the store of rank 0 (node1)" in said[3]
        assert [machine.pids() for machine in machines] == [[], [], []]


OWN_CODE = """
import time, torch
from uneven import Ddp, TensorData

torch.manual_seed(0)
model = torch.nn.Linear(6, 3)
ddp = Ddp.setup(model, torch.optim.SGD(model.parameters(), lr=0.1), dataset=TensorData(torch.randn(64, 6)),
                batch_size=8, epochs=2, progress="off")
for epoch in range(2):
    for x in ddp:
        ddp.step(ddp(x).square().mean())
    print("between epochs", flush=True)
    time.sleep(600)
"""


@pytest.mark.soak
def test_a_pulled_cable_in_code_of_the_users_own_ends_the_run_too(script: Path) -> None:
    """No heartbeat is expected of such a rank, since its code may hold Python's lock: its kernel must answer."""
    script.write_text(OWN_CODE)
    with network(script.parent, 3) as machines:
        ranks = start_slurm(machines, script, sys.executable)
        for rank in ranks:
            assert rank.stdout is not None
            heard = list(takewhile(lambda line: not line.startswith("between epochs"), rank.stdout))
            assert rank.poll() is None, heard
        time.sleep(1.0)  # for a heartbeat of that phase
        machines[2].pull_cable()
        pulled_s = time.monotonic()
        said = finish(ranks, 60)
        assert time.monotonic() - pulled_s < 20.0
        assert [rank.returncode for rank in ranks] == [1, 1, 1, 1], said
        for text in said[:2]:
            assert "rank 3 (cpu on node3) fell silent" in text, said
            assert "it or its machine is gone" in text
        assert [machine.pids() for machine in machines] == [[], [], []]
