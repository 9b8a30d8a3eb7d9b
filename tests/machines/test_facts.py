"""The facts of this machine: complete, plain JSON, without torch, and equal to themselves."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.hardware.fakes import GTX_1060, RTX_5060_TI, make_system
from uneven.hardware.choices import native_precisions
from uneven.hardware.device import Device
from uneven.machines import table
from uneven.machines.code import script_digests
from uneven.machines.facts import collect_facts, stamped
from uneven.machines.parity import compare


def facts() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(json.dumps(collect_facts({}, ["cpu", "cpu@0.5"])))
    return found


def test_facts_agree_with_themselves_and_go_into_a_table() -> None:
    own = facts()
    assert [device["device"] for device in own["devices"]] == ["cpu", "cpu@0.5"]
    assert compare(stamped(own), stamped(own), round_trip_s=0.1) == []
    lines = table.lines([own, {**own, "host": "another"}])
    assert lines[0].split() == ["machine", own["host"], "another"]
    assert {"torch", "devices", "dtype", "memory", "disk"} <= {line.split()[0] for line in lines}


def test_facts_are_collected_without_torch() -> None:
    code = (
        "import sys; from uneven.machines.facts import collect_facts; import uneven.machines.table;"
        "collect_facts({}, ['cpu']); print([m for m in ('torch', 'numpy') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_the_code_of_a_run_is_the_script_and_what_it_imports_beside_it(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("import torch\nfrom model import Net\nimport tools.readers as readers\n")
    (tmp_path / "model.py").write_text("import layers\n")
    (tmp_path / "layers.py").write_text("")
    (tmp_path / "scratch.py").write_text("never imported")
    (tmp_path / "tools").mkdir()
    (tmp_path / "tools" / "readers.py").write_text("import broken(")
    found = script_digests(tmp_path / "train.py", tmp_path)
    assert list(found) == ["train.py", "layers.py", "model.py", "tools/readers.py"]
    (tmp_path / "scratch.py").write_text("changed")
    assert script_digests(tmp_path / "train.py", tmp_path) == found
    (tmp_path / "layers.py").write_text("# changed")
    changed = script_digests(tmp_path / "train.py", tmp_path)
    assert [name for name in found if changed[name] != found[name]] == ["layers.py"]


def test_the_code_of_a_module_is_its_package_and_what_it_imports_beside_that(tmp_path: Path) -> None:
    (tmp_path / "shop").mkdir()
    for name, text in (("__init__", ""), ("train", "from . import model\nimport tools\n"), ("model", "")):
        (tmp_path / "shop" / f"{name}.py").write_text(text)
    (tmp_path / "tools.py").write_text("")
    found = script_digests(tmp_path / "shop" / "train.py", tmp_path, "shop")
    assert list(found) == ["shop/train.py", "shop/__init__.py", "shop/model.py", "tools.py"]


@pytest.mark.parametrize(
    ("device", "gpu", "native"),
    [
        ("cpu", None, ("fp32",)),
        ("cuda", RTX_5060_TI, ("fp32", "bf16", "fp16")),
        ("cuda", GTX_1060, ("fp32", "fp16")),
        ("cuda", None, ("fp32", "bf16", "fp16")),  # unknown is no reason to refuse
    ],
)
def test_what_a_device_computes_by_itself(device: Any, gpu: Any, native: tuple[str, ...]) -> None:
    index = None if device == "cpu" else 0
    assert native_precisions(Device(device, index), make_system(), gpu) == native


def test_a_full_disk_is_a_warning() -> None:
    own = facts()
    assert "disk" in table.warnings({**own, "disk_free_bytes": 2**20})[0]
    assert table.warnings({**own, "disk_free_bytes": None}) == []
