"""The roster that ranks of another launcher make of each other's facts: machines, devices, cores."""

import os
from pathlib import Path
from typing import Any

from tests.hardware.fakes import write_tree
from uneven.hardware.device import parse_devices
from uneven.launch.environment import LaunchEnvironment
from uneven.launch.external.placement import Placement, machine_identity, read_facts


def fact(machine: str, *gpus: tuple[int, str], host: str = "", **others: Any) -> dict[str, Any]:
    given = {
        "host": host or machine,
        "machine": machine,
        "address": f"10.0.0.{ord(machine[0]) - 96}",
        "gpus": [list(gpu) for gpu in gpus],
        "cores": [0, 1],
    }
    return {**given, **others}


def test_machines_that_differ_in_devices_make_one_roster() -> None:
    placement = Placement(
        (
            fact("a", (0, "A"), (1, "B")),  # more GPUs than ranks
            fact("b", (0, "C"), (1, "D")),
            fact("b", (0, "C"), (1, "D")),
            fact("c"),
            fact("d", (0, "E")),  # too few for its two ranks
            fact("d", (0, "E")),
        )
    )
    roster = placement.roster(placement.auto_devices())
    assert roster.devices == parse_devices("cuda:0,cuda:0,cuda:1,cpu,cpu,cpu")
    assert roster.machines == (0, 1, 1, 2, 3, 3)
    assert roster.hosts == ("a", "b", "c", "d")
    assert not placement.is_crowded(roster.devices)
    assert placement.is_crowded(parse_devices("cuda:0,cuda:0,cuda:0,cpu,cpu,cpu"))


def test_gpus_that_slurm_gave_to_one_task_each_have_the_same_index_and_are_not_shared() -> None:
    placement = Placement((fact("a", (0, "A")), fact("a", (0, "B"))))
    assert placement.auto_devices() == parse_devices("cuda:0,cuda:0")
    assert not placement.is_crowded(placement.auto_devices())


def test_ranks_that_alternate_between_machines_and_machines_of_one_name() -> None:
    placement = Placement((fact("a", host="pc"), fact("b", host="pc"), fact("a", host="pc"), fact("b", host="pc")))
    assert placement.machines == (0, 1, 0, 1)
    assert placement.hosts == ("pc", "pc#2")
    assert placement.sharing_cores(2) == (0, 2)
    own = Placement((fact("a", cores=[0]), fact("a", cores=[1]), fact("a", cores=[1])))
    assert [own.sharing_cores(rank) for rank in range(3)] == [(0,), (1, 2), (1, 2)]


def test_an_identity_is_shared_by_processes_that_share_loopback_and_memory_alone(tmp_path: Path) -> None:
    def machine(name: str, boot: str, network: str) -> str:
        root = write_tree(tmp_path / name, {"proc/sys/kernel/random/boot_id": boot, "dev/shm/x": ""})
        (root / "proc/self/ns").mkdir(parents=True)
        os.symlink(network, root / "proc/self/ns/net")
        return machine_identity(root)

    assert machine("a", "1\n", "net:[1]") == machine("b", "1\n", "net:[1]")
    assert machine("c", "1\n", "net:[2]") != machine("d", "1\n", "net:[1]")  # two containers
    assert machine("e", "2\n", "net:[1]") != machine("f", "1\n", "net:[1]")
    assert machine_identity(tmp_path / "nothing")
    assert machine_identity() == read_facts(LaunchEnvironment("srun", 0, 2, None, None, "127.0.0.1"))["machine"]
