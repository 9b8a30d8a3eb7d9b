"""Under torchrun a rank that hangs inside an epoch is found by rank 0's watch and named; a paused one is let be."""

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import sys, time, torch
from torch.nn import functional as F
from uneven import Ddp, TensorData

X, Y = torch.randn(64, 6), torch.arange(64) % 3
model = torch.nn.Linear(6, 3)
ddp = Ddp.setup(model, torch.optim.SGD(model.parameters(), lr=0.1), dataset=TensorData(X, Y), policy="sync",
                batch_size=8, epochs=1, deadline=2.0, progress="off")
for x, y in ddp:
    if ddp.rank == 1 and ddp.global_step == 2:
        if sys.argv[1] == "pause":
            with ddp.pause("evaluation"):
                time.sleep(6)
        else:
            time.sleep(600)
    ddp.step(F.cross_entropy(ddp(x), y))
print("trained", ddp.finish().samples)
"""


@pytest.mark.soak
@pytest.mark.parametrize("how", ["hang", "pause"])
def test_torchrun_watch(tmp_path: Path, how: str) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    command = [Path(sys.executable).parent / "torchrun", "--standalone", "--nproc-per-node", "2", script, how]
    done = subprocess.run(command, capture_output=True, text=True, timeout=180, check=False)
    if how == "pause":
        assert done.returncode == 0, done.stderr
        assert done.stdout.count("trained 64") == 2
    else:
        assert done.returncode != 0
        assert "uneven: error: rank 1 (cpu on " in done.stderr
        assert "is stuck in compute at slot 2 for 2 s" in done.stderr
        assert 'with ddp.pause("evaluation"):' in done.stderr
