"""What may be trained together, and what is refused before anything starts; the devices themselves are made up."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.hardware.fakes import GTX_1060, RTX_5060_TI, make_system
from uneven import InputError
from uneven.config import RunConfig, Task
from uneven.hardware.device import Device
from uneven.hardware.gpus import VisibleGpus
from uneven.hardware.roster import Roster
from uneven.hardware.system import Cpu
from uneven.launch.checks import parity, preflight
from uneven.launch.context import ProcessContext
from uneven.launch.environment import ALONE, LaunchEnvironment

TASK = Task(
    lambda: torch.nn.Linear(4, 1),
    lambda params: torch.optim.SGD(params, lr=0.1),
    lambda model, batch: model(batch).mean(),
    torch.zeros(8, 4),
)


@pytest.fixture(autouse=True)
def _everything_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight, "check_device", lambda _: None)
    monkeypatch.setattr(preflight, "has_nccl", lambda: True)


def prepared(**settings: Any) -> preflight.Prepared:
    config = RunConfig(**{"batch_size": 2, "epochs": 1, "progress": "off", **settings})
    return preflight.prepare(TASK, config, ProcessContext(LaunchEnvironment(ALONE)))


@pytest.mark.parametrize(
    "devices", ["cuda:0,cpu", "cuda:0,cuda:1", "cuda:0%60,cuda:0%24", "cuda:0@0.4,cuda:0", "cuda:0%60", "cpu,cuda:0%50"]
)
def test_any_mix_of_devices_is_taken(devices: str) -> None:
    assert ",".join(map(str, prepared(devices=devices).devices)) == devices


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"devices": "cuda:0,cuda:0%24"}, ("all ranks of a GPU are slices or none is", "'cuda:0%76,cuda:0%24'")),
        ({"devices": "cuda:0%60,cuda:0%24", "backend": "nccl"}, ("dead-locks", "backend='cpu'")),
        ({"devices": "cuda:0,cpu@0.4", "backend": "nccl"}, ("'cuda:0,cpu@0.4'", "backend='cpu'")),
        ({"devices": "cuda:0,cpu", "compile": "graph"}, ("compile='graph'", "which cpu cannot run", "'off'")),
    ],
)
def test_what_cannot_work_together_is_refused_with_the_fix(settings: dict[str, Any], words: tuple[str, ...]) -> None:
    with pytest.raises(InputError) as caught:
        prepared(**settings)
    assert all(word in str(caught.value) for word in words), str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_graph_and_nccl_are_fine_where_every_device_is_cuda() -> None:
    prepared(devices="cuda:0,cuda:1", compile="graph", backend="nccl")


def test_auto_is_every_usable_device(monkeypatch: pytest.MonkeyPatch) -> None:
    two = [Device("cuda", 0), Device("cuda", 1)]
    monkeypatch.setattr("uneven.launch.context.usable_devices", lambda: two)
    assert prepared().devices == tuple(two)


@pytest.mark.parametrize(
    ("devices", "flags", "expected"),
    [("cuda:0,cpu", (), "fp32"), ("cuda:0,cpu", ("amx",), "bf16"), ("cuda:0%60,cuda:0%24", (), "bf16")],
)
def test_auto_precision_is_one_that_all_devices_would_choose(
    monkeypatch: pytest.MonkeyPatch, devices: str, flags: tuple[str, ...], expected: str
) -> None:
    monkeypatch.setattr(preflight, "read_visible", lambda *_: VisibleGpus((RTX_5060_TI,)))
    monkeypatch.setattr(preflight, "read_system", lambda: make_system(cpu=Cpu("cpu", "x86_64", flags)))
    assert prepared(devices=devices, precision="auto").config.precision == expected


@pytest.mark.parametrize(
    ("settings", "flags", "line"),
    [
        ({"devices": "cpu", "precision": "auto"}, (), "  precision auto -> fp32: the cpu has no native bf16"),
        ({"devices": "cpu", "precision": "auto"}, ("amx",), "  precision auto -> bf16: the cpu has native bf16 (amx)"),
        (
            {"devices": "cuda:0,cpu", "precision": "auto"},
            (),
            "  precision auto -> fp32: the devices differ: cuda:0 would take bf16 (sm_120 has native bf16), cpu would "
            "take fp32 (the cpu has no native bf16)",
        ),
        (
            {"devices": "cuda:0,cpu", "precision": "bf16"},
            (),
            "  precision bf16: this CPU has no bf16 instructions, so bf16 is emulated there: slower than fp32",
        ),
        ({"devices": "cpu", "precision": "bf16"}, ("amx",), None),
        ({"devices": "cuda:0", "precision": "bf16"}, (), None),
        ({"devices": "cpu", "precision": "fp32"}, (), None),
    ],
)
def test_the_reason_for_the_precision_is_printed_where_there_is_one(
    settings: dict[str, Any],
    flags: tuple[str, ...],
    line: str | None,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(preflight, "read_visible", lambda *_: VisibleGpus((RTX_5060_TI,)))
    monkeypatch.setattr(preflight, "read_system", lambda: make_system(cpu=Cpu("cpu", "x86_64", flags)))
    prepared(**settings, progress="lines")
    printed = [text for text in capsys.readouterr().err.splitlines() if text.startswith("  precision ")]
    assert printed == ([] if line is None else [line])


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        ({"devices": "cpu"}, "  1 device: cpu"),
        ({"devices": "cpu,cpu", "policy": "sync"}, "  2 devices, alike: cpu, cpu"),
        (
            {"devices": "cpu,cpu@0.4"},
            "  2 devices, mismatched: cpu, cpu@0.4 (speeds are measured as it trains; policy balanced gives samples by "
            "speed)",
        ),
        (
            {"devices": "cpu,cpu@0.4", "policy": "sync"},
            "  2 devices, mismatched: cpu, cpu@0.4 (policy sync waits for the slowest in every step; 'balanced' would "
            "not wait)",
        ),
        (
            {"devices": "cpu,cpu@0.4", "policy": "async"},
            "  2 devices, mismatched: cpu, cpu@0.4 (speeds are measured as it trains; policy async lets each take "
            "batches at its own speed)",
        ),
        ({"devices": "cpu,cpu@0.4", "shares": (5.0, 2.0)}, "  2 devices, mismatched: cpu, cpu@0.4 (shares as given)"),
        (
            {"devices": "cuda:0,cuda:1", "policy": "cadence"},
            "  2 devices, mismatched: cuda:0 NVIDIA GeForce RTX 5060 Ti, cuda:1 NVIDIA GeForce GTX 1060 6GB (speeds "
            "are measured as it trains; policy cadence gives batches by speed)",
        ),
    ],
)
def test_the_devices_are_named_and_judged_once_at_the_start(
    settings: dict[str, Any], line: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(preflight, "read_visible", lambda *_: VisibleGpus((RTX_5060_TI, GTX_1060)))
    prepared(**settings, progress="lines")
    said = capsys.readouterr().err.splitlines()
    assert said[1] == line
    assert sum(settings["devices"].split(",")[-1] in one for one in said) == 1


def test_only_the_first_rank_says_what_it_found_and_only_where_anything_is_said(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    devices = (Device("cpu"), Device("cpu"))
    lines = '["resume is given = False", "replay is given = False"]'  # as the other rank posts them
    store = SimpleNamespace(set=lambda *_: None, wait=lambda *_: None, get=lambda _: lines)
    monkeypatch.setattr(parity, "describe_data", lambda _: {})
    monkeypatch.setattr(parity, "compare_data", lambda *_: None)
    monkeypatch.setattr(preflight, "check_facts", lambda *_: [])
    monkeypatch.setattr(preflight, "check_links", lambda *_: None)

    def rank(number: int, progress: str) -> str:
        config = RunConfig(batch_size=2, epochs=1, progress=progress)
        context: Any = SimpleNamespace(
            rank=number,
            notes=[],
            is_crowded=lambda _: False,
            is_alone=False,
            devices=lambda _: devices,
            of_this_machine=lambda all_of_them: all_of_them[:1],
            roster_of=lambda all_of_them: Roster(all_of_them, (0, 1), ("lab-a", "lab-b")),
            environment=SimpleNamespace(
                rank=number, connect=lambda _: store, door=None, address="", is_launched=False, without=None
            ),
            starts=0,
            ranks=SimpleNamespace(is_newcomer=False),
            share=lambda value: [value, value],
        )
        preflight.prepare(TASK, config, context)
        return capsys.readouterr().err

    said = rank(0, "lines")
    assert "2 devices on several machines: cpu, cpu (speeds are measured" in said
    assert "  backend gloo: NCCL needs a CUDA device for every rank; every rank is on another machine\n" in said
    assert rank(1, "lines") == rank(0, "off") == ""
