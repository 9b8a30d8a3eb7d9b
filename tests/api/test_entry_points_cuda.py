"""`uneven run` with a CUDA device among several: `fit`, the own loop and the manual tier, as on CPUs."""

import sys
from pathlib import Path

import pytest
import torch

from tests.api.entries import assert_same_everywhere
from tests.api.starts import HEAD, start
from uneven import TrainedState

pytestmark = pytest.mark.cuda

OWN_LOOP = (
    HEAD
    + """
ddp = Ddp.setup(net(), sgd, dataset=TensorData(X, Y), batch_size=8, epochs=3, progress="off", verify=True, out="run")
for epoch in range(3):
    for x, y in ddp.batches(epoch):
        ddp.step(F.cross_entropy(ddp(x), y))
ddp.finish()
"""
)


@pytest.mark.parametrize("devices", ["cuda:0,cuda:0", "cuda:0,cpu"])
def test_uneven_run_on_cuda_equals_one_process(
    script: Path, plain: dict[str, dict[str, torch.Tensor]], tmp_path: Path, devices: str
) -> None:
    """The own loop and the manual tier too; of the latter the model stays on the CPU."""
    done = start([sys.executable, "-m", "uneven", "run", script, tmp_path, "16", "--devices", devices], tmp_path)
    assert done.returncode == 0, done.stderr
    assert_same_everywhere(tmp_path, plain)


@pytest.mark.parametrize("policy", ["cadence", "async"])
def test_an_own_loop_on_a_gpu_and_a_cpu(tmp_path: Path, policy: str) -> None:
    (tmp_path / "train.py").write_text(OWN_LOOP)
    settings = ["--devices", "cuda:0,cpu", "--policy", policy]
    done = start([sys.executable, "-m", "uneven", "run", tmp_path / "train.py", *settings], tmp_path)
    assert done.returncode == 0, done.stderr
    assert TrainedState.load(tmp_path / "run").finished
