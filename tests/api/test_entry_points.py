"""Every kind of start on real processes: plainly, by `uneven run`, by torchrun. All end with the same parameters.

One script uses `fit`, the own loop and the manual tier in turn, so that each start is paid for once and groups follow
each other in one process. Most processes are forked (tests/forked.py); each starter is started for real once.
"""

import types
from pathlib import Path

import pytest
import torch

from tests.api.entries import assert_same_everywhere
from tests.api.starts import BIN, HEAD, assert_close, start


def test_an_unguarded_script_may_name_two_devices_in_fit(plain: dict[str, dict[str, torch.Tensor]]) -> None:
    assert_close(plain["two"], plain["fit"])
    assert_close(plain["loop"], plain["fit"])


def test_uneven_run_equals_one_process(script: Path, plain: dict[str, dict[str, torch.Tensor]], tmp_path: Path) -> None:
    settings = ["--devices", "cpu,cpu@0.4", "--max-grad-norm", "1000"]
    done = start([BIN / "uneven", "run", script, tmp_path, "16", *settings], tmp_path)
    assert done.returncode == 0, done.stderr
    for fact in assert_same_everywhere(tmp_path, plain):
        # The command line stands above the script, on every rank.
        assert fact["config"]["devices"] == "cpu,cpu@0.4"
        assert fact["config"]["max_grad_norm"] == 1000.0


def test_torchrun_equals_one_process(script: Path, plain: dict[str, dict[str, torch.Tensor]], tmp_path: Path) -> None:
    done = start([BIN / "torchrun", "--standalone", "--nproc-per-node", "2", script, tmp_path, "16"], tmp_path)
    assert done.returncode == 0, done.stderr
    assert_same_everywhere(tmp_path, plain)


SMALL = """
import sys, torch
from pathlib import Path
from uneven import Ddp

model = torch.nn.Linear(1, 1, bias=False)
ddp = Ddp.wrap(model)
ddp(torch.full((1, 1), 1.0 + ddp.rank)).sum().backward()
ddp.weighted_all_reduce_gradients(1 + 2 * ddp.rank)
Path(sys.argv[1], f"r{ddp.rank}").write_text(str(model.weight.grad.item()))
ddp.close()
"""


@pytest.mark.real_start
@pytest.mark.parametrize(
    ("starter", "means"),
    [
        (("uneven", "run", "--devices", "cpu,cpu"), [(1 * 1 + 3 * 2) / 4] * 2),
        pytest.param(("torchrun", "--standalone", "--nproc-per-node", "1"), [1.0], marks=pytest.mark.soak),
    ],
)
def test_it_is_so_after_a_real_start(starter: tuple[str, ...], means: list[float], tmp_path: Path) -> None:
    (tmp_path / "small.py").write_text(SMALL)
    done = start([BIN / starter[0], *starter[1:], "small.py", tmp_path], tmp_path)
    assert done.returncode == 0, done.stderr
    assert [float(path.read_text()) for path in sorted(tmp_path.glob("r?"))] == means


def test_a_notebook_cell_trains_on_two_devices(plain: dict[str, dict[str, torch.Tensor]]) -> None:
    cell = HEAD + (
        "state = fit(model=net, optimizer=sgd, step=loss_of, dataset=TensorData(X, Y), devices='cpu,cpu',"
        " batch_size=16, epochs=2, seed=3, progress='off')"
    )
    space = types.ModuleType("__main__")  # as in a notebook: no __file__, and nothing of it can be imported
    exec(compile(cell, "<cell>", "exec"), space.__dict__)
    assert_close(space.__dict__["state"].params, plain["fit"])
