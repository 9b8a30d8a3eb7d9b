"""What a framework in a script of `uneven run` finds: torchrun's variables, torch's default group, its own device."""

import re
from pathlib import Path

from tests.api.starts import BIN, start

SCRIPT = """
import os, sys, torch
import torch.distributed as dist
from uneven.launch.frameworks import begin_use, join_ranks

join_ranks()
if sys.argv[1:] != ["forgets"]:
    told = begin_use(int(sys.argv[1]), ("policy",))
    names = "RANK", "LOCAL_RANK", "WORLD_SIZE", "ACCELERATE_USE_CPU"
    total = torch.ones(1)
    if dist.is_initialized():
        dist.all_reduce(total)
    print("found", *(os.environ.get(name, "-") for name in names), int(total), told.speed, *told.settings.values())
"""


def run(folder: Path, *words: str, starter: str = "uneven") -> tuple[int, list[str], str]:
    (folder / "train.py").write_text(SCRIPT)
    command = [BIN / "uneven", "run", "train.py"] if starter == "uneven" else [BIN / starter]
    done = start([*command, *words], folder)
    return done.returncode, sorted(re.findall(r"found (.+)", done.stdout)), done.stderr


def test_ranks_are_found_as_under_torchrun_and_each_has_its_device(tmp_path: Path) -> None:
    code, found, said = run(tmp_path, "--devices", "cpu,cpu@0.4", "--", "2")
    assert code == 0, said
    assert found == ["0 0 2 true 2 1.0", "1 1 2 true 2 0.4"]


def test_a_single_device_is_slowed_down_and_forms_no_group(tmp_path: Path) -> None:
    assert run(tmp_path, "--devices", "cpu@0.5", "--", "1")[:2] == (0, ["- - - true 1 0.5"])


def test_settings_reach_the_loop_and_those_without_effect_are_named(tmp_path: Path) -> None:
    devices = ("--devices", "cpu,cpu", "--grace", "5")
    code, found, said = run(tmp_path, *devices, "--policy", "sync", "--", "2")
    assert (code, found) == (0, ["0 0 2 true 2 1.0 sync", "1 1 2 true 2 1.0 sync"]), said
    code, _, said = run(tmp_path, *devices, "--epochs", "3", "--", "2")
    assert code == 2
    assert "epochs" in said


def test_a_framework_that_has_looked_around_too_early_is_named(tmp_path: Path) -> None:
    code, _, said = run(tmp_path, "--devices", "cpu,cpu", "--", "1")
    assert code == 2
    assert "top of the script" in said


def test_a_script_that_shares_nothing_is_told(tmp_path: Path) -> None:
    code, _, said = run(tmp_path, "--devices", "cpu,cpu", "--", "forgets")
    assert code == 2
    assert "without calling uneven" in said


def test_under_torchrun_there_is_nothing_to_do(tmp_path: Path) -> None:
    words = ("--standalone", "--nproc-per-node", "2", "train.py", "2")
    assert run(tmp_path, *words, starter="torchrun")[:2] == (0, ["0 0 2 - 1 1.0", "1 1 2 - 1 1.0"])
