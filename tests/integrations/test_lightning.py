"""Lightning and Fabric with shares by speed: params are those of one process that trains whole batches."""

import re
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("lightning", reason="make test-frameworks")

from tests.api.starts import BIN, start
from tests.integrations.lightning_cases import BATCH, CASES, train_dense
from tests.ranks import on_processes


def test_params_are_those_of_one_process(tmp_path: Path) -> None:
    by_rank = on_processes(2, "tests.integrations.lightning_cases:all_cases", tmp_path, "gloo", limit_s=200)
    for found in by_rank:
        resumed = {name: CASES["measured"] for name in found if name.startswith(("resumed", "by fabric"))}
        for name, case in (CASES | resumed | {"fitted twice": CASES["fixed"]}).items():
            params, divisions = found[name]
            expected = train_dense(case.epochs, case.drop_last)
            for key, param in params.items():
                torch.testing.assert_close(param, expected[key], rtol=1e-10, atol=1e-10, msg=f"{name}: {key}")
            assert divisions == by_rank[0][name][1]
            whole = [division for division in divisions if sum(division) == 2 * BATCH]
            if name.startswith("measured") or name in resumed:
                assert whole[0] == (8, 8)
                assert whole[-1] == (12, 4)
        assert found["measured"][1] == found["resumed"][1]
        assert found["by fabric"][1] == found["by fabric, resumed"][1]
        assert found["with BatchNorm"] == [(16, 0)] * 6 + [(4, 0)]  # not 1
        epochs, val_loss, names, plain_epochs = found["stopped early"]
        assert (epochs, names, plain_epochs) == (2, ["epoch=0.ckpt"], 3)
        assert val_loss == by_rank[0]["stopped early"][1]


EXAMPLE = Path(__file__).parents[2] / "examples" / "lightning_classifier.py"


@pytest.mark.parametrize("launcher", ["Lightning", "torchrun", "uneven run", "uneven run with settings"])
def test_the_example_runs_under_all_launchers(launcher: str, tmp_path: Path) -> None:
    commands: dict[str, list[str | Path]] = {
        "Lightning": [sys.executable, EXAMPLE],
        "torchrun": [BIN / "torchrun", "--standalone", "--nproc-per-node", "2", EXAMPLE],
        "uneven run": [BIN / "uneven", "run", EXAMPLE, "--devices", "cpu,cpu@0.3", "--"],
        "uneven run with settings": [BIN / "uneven", "run", EXAMPLE, "--devices", "cpu,cpu", "--shares", "3,1", "--"],
    }
    done = start([*commands[launcher], "--epochs", "1", "--batch-size", "100"], tmp_path)
    assert done.returncode == 0, done.stderr
    (shares,) = re.findall(r"shares \((\d+), (\d+)\)", done.stdout)
    assert sum(map(int, shares)) == 200
    assert launcher != "uneven run with settings" or shares == ("150", "50")
    (accuracy,) = re.findall(r"accuracy (\S+)", done.stdout)
    assert float(accuracy) > 0.6
