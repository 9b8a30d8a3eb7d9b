"""PyTorch's own tests of its DDP, from its wheel, with ours in the place of its class: on CPU, two processes each."""

import subprocess
import sys
from pathlib import Path

import pytest

NAMES = [
    "test_DistributedDataParallelCPU",
    "test_DistributedDataParallelCPU_grad_is_view",
    "test_DistributedDataParallel_requires_grad",
    "test_accumulate_gradients_no_sync",
    "test_accumulate_gradients_no_sync_grad_is_view",
]
DRIVER = """
import os, sys, tempfile
os.environ.update(BACKEND="gloo", WORLD_SIZE="2", MASTER_ADDR="127.0.0.1")
os.environ["INIT_METHOD"] = "file://" + tempfile.mkdtemp() + "/meet"
import torch
from torch import nn
from torch.testing._internal.common_utils import run_tests
from torch.testing._internal.distributed import distributed_test
from uneven.comm.torch_group import as_group
from uneven.parallel.ddp import DDPBucketed

class Ours(nn.Module):
    "PyTorch's DDP averages where ours sums."
    def __init__(self, module, process_group=None, gradient_as_bucket_view=False, **_):
        super().__init__()
        if not any(p.requires_grad for p in module.parameters()):
            raise RuntimeError("nothing to train")
        self.module = module
        group = as_group(process_group or torch.distributed.group.WORLD)
        for param in module.parameters():
            if param.requires_grad:
                param.register_hook(lambda grad: grad / group.world_size)
        self.strategy = [DDPBucketed(module, lambda params: torch.optim.SGD(params, 0.1), group)]
    def forward(self, *args, **kwargs):
        return self.module(*args, **kwargs)
    def no_sync(self):
        return self.strategy[0].no_sync()
    def __reduce__(self):
        return Ours, (self.module,)

nn.parallel.DistributedDataParallel = Ours
class TestOurs(distributed_test.TestDistBackend, distributed_test.DistributedTest._DistTestBase):
    def setUp(self):
        super().setUp()
        self._spawn_processes()
        torch.backends.cudnn.flags(enabled=True, allow_tf32=False).__enter__()

if __name__ == "__main__":
    run_tests()
"""


@pytest.mark.grid
@pytest.mark.parametrize("name", NAMES)
def test_pytorchs_own_test_passes_with_ours(name: str, tmp_path: Path) -> None:
    path = tmp_path / "driver.py"
    path.write_text(DRIVER)
    done = subprocess.run([sys.executable, path, f"TestOurs.{name}"], capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    assert "OK" in done.stderr
    assert "skipped" not in done.stderr
