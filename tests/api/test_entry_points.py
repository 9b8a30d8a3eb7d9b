"""Every kind of start on real processes: plainly, by `uneven run`, by torchrun. All end with the same parameters.

One script uses `fit`, the own loop and the manual tier in turn, so that each start is paid for once and groups follow
each other in one process. Most processes are forked (tests/forked.py); each starter is started for real once.
"""

import json
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.api.starts import BIN, HEAD, assert_close, start
from uneven import TrainedState

EVERYTHING = (
    HEAD
    + """
import beside  # a module in the script's own folder

out, batch = Path(sys.argv[1]), int(sys.argv[2])
settings = {"batch_size": batch, "epochs": 2, "seed": 3, "progress": "off"}
state = fit(model=net, optimizer=sgd, step=loss_of, dataset=TensorData(X, Y), out=out / "run", **settings)

model = net()
ddp = Ddp.setup(model, sgd, dataset=TensorData(X, Y), **settings)
for epoch in range(2):
    for x, y in ddp.batches(epoch):
        ddp.step(F.cross_entropy(ddp(x), y))
loop = ddp.finish()

by_hand = net()
wrapped = Ddp.wrap(by_hand)
optimizer = sgd(by_hand.parameters())
for indices in torch.arange(150).split(40):
    mine = torch.tensor([i for i in indices.tolist() if i % wrapped.world_size == wrapped.rank])
    optimizer.zero_grad()
    loss_of(by_hand, (X[mine], Y[mine])).backward()
    wrapped.weighted_all_reduce_gradients(len(mine))
    optimizer.step()
wrapped.close()

rank = Ddp.rank()
loop_params = {name: value.cpu() for name, value in model.state_dict().items()}
trained = {"fit": state.params, "loop": loop_params, "hand": dict(by_hand.state_dict())}
torch.save(trained, out / f"r{rank}")
(out / f"r{rank}.json").write_text(json.dumps(
    {"name": __name__, "size": ddp.world_size, "config": state.config, "logs": len(loop.log),
     "finished": loop.finished}))
if len(sys.argv) > 3:
    state = fit(model=net, optimizer=sgd, step=loss_of, dataset=TensorData(X, Y), devices="cpu,cpu",
                **settings | {"batch_size": batch // 2})
    torch.save(state.params, out / "two")
"""
)


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("script")
    (folder / "beside.py").write_text("")
    (folder / "train.py").write_text(EVERYTHING)
    return folder / "train.py"


@pytest.fixture(scope="module")
def plain(script: Path) -> dict[str, dict[str, torch.Tensor]]:
    """A single process with the whole global batch: what every other start must equal."""
    out = script.parent / "plain"
    out.mkdir()
    done = start([sys.executable, script, out, "32", "two"], out)
    assert done.returncode == 0, done.stderr
    (folder,) = out.glob("r0")
    results: dict[str, dict[str, torch.Tensor]] = torch.load(folder)
    results["two"] = torch.load(out / "two")
    assert json.loads((out / "r0.json").read_text())["size"] == 1
    return results


def assert_same_everywhere(out: Path, plain: dict[str, dict[str, torch.Tensor]]) -> list[dict[str, Any]]:
    ranks = [torch.load(out / f"r{rank}") for rank in range(2)]
    for kind, reference in ((kind, plain[kind]) for kind in ("fit", "loop", "hand")):
        assert_close(ranks[0][kind], reference)
        assert all(torch.equal(value, ranks[0][kind][name]) for name, value in ranks[1][kind].items())
    # Written once, by the first rank, with everybody's log in it.
    saved = TrainedState.load(out / "run")
    assert saved.finished
    assert_close(saved.params, plain["fit"])
    assert len(json.loads((out / "run" / "log.json").read_text())["ranks"]) == 2
    assert not (out / "run.1").exists()
    facts = [json.loads((out / f"r{rank}.json").read_text()) for rank in range(2)]
    for fact in facts:
        assert (fact["name"], fact["size"], fact["logs"], fact["finished"]) == ("__main__", 2, 2, True)
    return facts


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
