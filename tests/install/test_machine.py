"""A machine is read from files, recorded without what identifies it, and read again as it was."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from tests.hardware.fakes import TWO_GPUS, make_system, write_tree
from uneven.errors import InputError, MachineError
from uneven.hardware.cards import AmdGpu, Card, Nvidia, read_amd, read_cards, read_nvidia
from uneven.install.machine import Machine, read_machine, read_record, write_record


def test_cards_of_the_pci_bus(tmp_path: Path) -> None:
    bus = "sys/bus/pci/devices/0000:0"
    files = {
        f"{bus}1:00.0/vendor": "0x10de\n",
        f"{bus}1:00.0/class": "0x030000\n",
        f"{bus}1:00.0/device": "0x2684\n",
        f"{bus}1:00.1/vendor": "0x10de\n",  # its sound
        f"{bus}1:00.1/class": "0x040300\n",
        f"{bus}2:00.0/vendor": "0x8086\n",
        f"{bus}2:00.0/class": "0x020000\n",  # a network card
    }
    write_tree(tmp_path, files)
    (tmp_path / "drivers" / "nouveau").mkdir(parents=True)
    (tmp_path / f"{bus}1:00.0" / "driver").symlink_to(tmp_path / "drivers" / "nouveau")
    assert read_cards(tmp_path) == (Card("NVIDIA", "0x2684", "nouveau"),)
    assert read_cards(tmp_path / "nothing") == ()


def test_gpus_of_amd(tmp_path: Path) -> None:
    nodes = "sys/class/kfd/kfd/topology/nodes"
    files = {
        f"{nodes}/0/properties": "cpu_cores_count 16\nsimd_count 0\ngfx_target_version 0\n",
        f"{nodes}/1/properties": "simd_count 192\ngfx_target_version 110000\n",
        f"{nodes}/1/mem_banks/0/properties": "heap_type 1\nsize_in_bytes 25753026560\n",
        f"{nodes}/2/properties": "simd_count 440\ngfx_target_version 90010\n",
        "opt/rocm/.info/version": "6.4.1-83\n",
        "dev/kfd": "",
    }
    report = read_amd(write_tree(tmp_path, files))
    assert report.gpus == (AmdGpu(0, "gfx1100", 25753026560), AmdGpu(1, "gfx90a"))
    assert (report.rocm, report.may_use) == ("6.4.1", True)
    assert read_amd(tmp_path / "nothing").may_use is None


def test_signs_of_nvidia(tmp_path: Path) -> None:
    files = {
        "proc/driver/nvidia/version": "NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.95.05  Tue Sep 23 2025\n",
        "dev/nvidiactl": "",
        "etc/nv_tegra_release": "# R36 (release), REVISION: 4.3, GCID: 38968081, BOARD: generic\n",
    }
    found = read_nvidia(write_tree(tmp_path, files), {"NVIDIA_VISIBLE_DEVICES": "all"})
    assert found == Nvidia(True, "580.95.05", "all", "R36.4")
    tegra = write_tree(tmp_path / "tegra", {"proc/sys/kernel/osrelease": "5.15.148-tegra\n"})
    assert read_nvidia(tegra, {}) == Nvidia(jetson="unknown")


def test_a_record_is_read_as_it_was_without_serial_numbers(tmp_path: Path) -> None:
    machine = Machine(make_system(), TWO_GPUS, cards=(Card("NVIDIA", "0x2d04", "nvidia"),))
    path = tmp_path / "machine.json"
    write_record(machine, path)
    assert "GPU-aaaa" not in path.read_text()
    gpus = tuple(replace(gpu, uuid=None) for gpu in TWO_GPUS.gpus)
    assert read_record(path) == replace(machine, gpus=replace(TWO_GPUS, gpus=gpus))
    newer = {**json.loads(path.read_text()), "something": 1}
    path.write_text(json.dumps(newer))
    assert read_record(path).cards == machine.cards


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (None, "No such file"),
        ("{", "not JSON"),
        ("[]", "not a recorded machine"),
        ('{"format": "uneven-machine-1"}', "incomplete or wrong"),
        ('{"format": "uneven-machine-1", "system": {"cpu": {}, "surroundings": {}}}', "Cpu.model is missing"),
    ],
)
def test_a_file_that_is_no_record(tmp_path: Path, text: str | None, says: str) -> None:
    path = tmp_path / "machine.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(InputError, match=says):
        read_record(path)


@pytest.mark.parametrize(
    ("place", "field", "value"),
    [
        (("gpus",), "driver_cuda", 13.0),
        (("gpus", "gpus", 0), "sm", 89),
        (("gpus", "gpus", 0), "memory_bytes", "8GB"),
        (("gpus", "gpus", 0), "index", True),
        (("gpus",), "source", "guess"),
        (("nvidia",), "jetson", 3),
        (("system", "cpu"), "flags", [1]),
        (("system",), "available_cores", "0-3"),
    ],
)
def test_a_record_with_a_value_of_another_type(
    tmp_path: Path, place: tuple[str | int, ...], field: str, value: object
) -> None:
    path = tmp_path / "machine.json"
    write_record(Machine(make_system(), TWO_GPUS), path)
    values = json.loads(path.read_text())
    part = values
    for step in place:
        part = part[step]
    part[field] = value
    path.write_text(json.dumps(values))
    with pytest.raises(InputError, match=rf"incomplete or wrong .*\.{field} must not be"):
        read_record(path)


def test_a_record_that_cannot_be_written() -> None:
    with pytest.raises(MachineError, match="cannot write /proc/nowhere"):
        write_record(Machine(make_system()), Path("/proc/nowhere"))


def test_this_machine_can_be_recorded(tmp_path: Path) -> None:
    machine = read_machine()
    write_record(machine, tmp_path / "here.json")
    assert read_record(tmp_path / "here.json").system.cpu == machine.system.cpu
