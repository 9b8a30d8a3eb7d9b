"""The most likely bad inputs, each refused in one line that names the fix, with nothing started and nothing written."""

import multiprocessing
import os
import random
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import psutil
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import Dataset, TensorDataset

from uneven import Ddp, InputError, MachineError, fit
from uneven.cli import main as command_line

X, Y = torch.randn(16, 4), torch.arange(16) % 2
TWO = "cpu,cpu"  # refused before any rank starts


class Net(nn.Module):
    def __init__(self, hidden: int = 8) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, hidden), nn.Tanh(), nn.Linear(hidden, 2))

    def forward(self, x: torch.Tensor) -> Any:
        return self.layers(x)


class NeedsSize(Net):
    def __init__(self, hidden: int) -> None:
        super().__init__(hidden)


class Compiled(nn.Module):
    """As torch.compile(model) gives it, without importing the compiler."""

    def __init__(self) -> None:
        super().__init__()
        self._orig_mod = Net()


class Locked(Net):
    def __init__(self) -> None:
        super().__init__()
        self.lock = multiprocessing.Lock()


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.DataParallel(Net())


class InDDP(nn.Module):
    """As DistributedDataParallel(Net()), without a process group."""

    def __init__(self) -> None:
        super().__init__()
        self.module = Net()


InDDP.__name__, InDDP.__module__ = "DistributedDataParallel", "torch.nn.parallel.distributed"


class Samples(Dataset[Any]):
    def __len__(self) -> int:
        return 4


class Output(NamedTuple):
    loss: torch.Tensor


class SAM(torch.optim.SGD):
    def step(self, closure: Any) -> Any:  # type: ignore[override]
        return super().step(closure)


class Accelerated(torch.optim.Optimizer):
    """Wraps another one without torch's own __init__, as accelerate's does."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        self.param_groups, self.state = optimizer.param_groups, optimizer.state


def step(model: nn.Module, batch: Any) -> torch.Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1)


def with_scheduler() -> dict[str, Any]:
    net = Net()
    optimizer = sgd(net.parameters())
    StepLR(optimizer, 3)
    return {"model": net, "optimizer": optimizer}


GOOD: dict[str, Any] = {
    "model": Net,
    "optimizer": sgd,
    "step": step,
    "dataset": TensorDataset(X, Y),
    "batch_size": 4,
    "epochs": 1,
    "devices": "cpu",
    "progress": "off",
}
ELSEWHERE = nn.Linear(3, 3)
TEST = TensorDataset(X, Y)

# What is passed, and what the one line says: the argument, and what to do.
ROWS: list[tuple[str, dict[str, Any], str]] = [
    ("model is a name", {"model": "resnet18"}, r"model must be a function .*'resnet18'.*lambda: Net"),
    ("model needs arguments", {"model": NeedsSize}, r"model=NeedsSize cannot be called as model\(\).*lambda: Net"),
    ("model is None", {"model": None}, r"model must be a function .*lambda: Net"),
    ("model makes no module", {"model": lambda: torch.zeros(3), "devices": TWO}, r"made a Tensor.*nn.Module"),
    ("model without params", {"model": nn.Tanh, "devices": TWO}, "Tanh has no param to train"),
    ("model is frozen", {"model": lambda: Net().requires_grad_(False), "devices": TWO}, "set it to True"),
    ("model is lazy", {"model": lambda: nn.LazyLinear(2), "devices": TWO}, "lazy layers.*run one batch through it"),
    (
        "model of complex128",
        {"model": lambda: nn.Linear(4, 2, dtype=torch.complex128), "devices": TWO},
        "complex128.*64",
    ),
    ("sparse optimizer", {"optimizer": torch.optim.SparseAdam, "devices": TWO}, "SparseAdam.*sums dense ones.*cadence"),
    ("model on meta", {"model": lambda: nn.Linear(4, 2, device="meta"), "devices": TWO}, "meta device.*to_empty"),
    ("model compiled", {"model": Compiled, "devices": TWO}, "_orig_mod.*compile='default'"),
    ("model in DataParallel", {"model": lambda: nn.DataParallel(Net()), "devices": TWO}, "DataParallel.*its .module"),
    ("model in DDP", {"model": InDDP, "devices": TWO}, "model is wrapped in DistributedDataParallel.*its .module"),
    ("DataParallel inside", {"model": Inner, "devices": TWO}, "model.body is wrapped in DataParallel.*its .module"),
    ("model that cannot be copied", {"model": Locked()}, r"cannot be copied.*model=lambda: Locked\(...\)"),
    ("optimizer is a name", {"optimizer": "adam"}, "optimizer must be a function.*'adam'.*torch.optim.Adam"),
    ("optimizer takes nothing", {"optimizer": lambda: None}, r"called as optimizer\(params\).*torch.optim.Adam"),
    ("optimizer makes none", {"optimizer": lambda p: None, "devices": TWO}, "made a NoneType.*torch.optim.Adam"),
    (
        "optimizer of others",
        {"optimizer": lambda p: sgd(ELSEWHERE.parameters()), "devices": TWO},
        "not the model's.*SGD",
    ),
    (
        "optimizer instance of others",
        {"optimizer": sgd(ELSEWHERE.parameters())},
        "makes another: pass optimizer=lambda",
    ),
    (
        "instances apart",
        {"model": Net(), "optimizer": sgd(ELSEWHERE.parameters())},
        r"make it from model.parameters\(\)",
    ),
    ("optimizer instance with scheduler", with_scheduler(), "scheduler was made.*scheduler=lambda optimizer"),
    ("optimizer without hooks", {"optimizer": lambda p: Accelerated(sgd(p))}, r"Accelerated has none.*its \.optimizer"),
    ("LBFGS", {"optimizer": torch.optim.LBFGS, "devices": TWO}, "LBFGS.*closure.*use SGD, Adam"),
    ("a closure of one's own", {"optimizer": SAM, "devices": TWO}, "SAM.*closure.*use SGD, Adam"),
    (
        "step is a loss module",
        {"step": nn.CrossEntropyLoss()},
        "module CrossEntropyLoss.*pass step=lambda model, batch",
    ),
    ("step is a class", {"step": nn.CrossEntropyLoss}, "the class CrossEntropyLoss.*pass step=lambda model, batch"),
    ("step takes the batch alone", {"step": lambda batch: None}, "pass step=lambda model, batch"),
    ("step returns 3", {"step": lambda m, b: (step(m, b), 1, 2)}, r"tuple of 3; .*\(loss_sum, count\)"),
    (
        "step returns the output",
        {"step": lambda m, b: (step(m, b), m(b[0]))},
        r"shape \(4, 2\)\); .*\(loss_sum, count\)",
    ),
    ("step returns a dict", {"step": lambda m, b: {"metric": step(m, b)}}, "returned dict; it must return"),
    ("step returns a float", {"step": lambda m, b: step(m, b).item()}, "returned float.*without .item"),
    ("step returns nothing", {"step": lambda m, b: None}, "returned NoneType; it must return the batch's mean loss"),
    ("step returns a vector", {"step": lambda m, b: m(b[0])}, r"shape \(4, 2\); it must return the batch's mean loss"),
    ("loss detached", {"step": lambda m, b: step(m, b).detach()}, "without a graph.*before detach"),
    ("step returns an object", {"step": lambda m, b: Output(step(m, b))}, "tuple of 1; it must return"),
    ("dataset is (X, Y)", {"dataset": (X, Y)}, r"tuple of 2 arrays.*TensorDataset\(X, Y\)"),
    ("dataset is [X, Y]", {"dataset": [X, Y]}, r"list of 2 arrays.*TensorDataset\(X, Y\)"),
    ("dataset is arrays", {"dataset": (X.numpy(), Y.numpy())}, r"tuple of 2 arrays.*TensorDataset\(X, Y\)"),
    ("dataset is a dict", {"dataset": {"x": X, "y": Y}}, r"dict with the keys 'x', 'y'.*TensorDataset\(x, y\)"),
    ("dataset is a name", {"dataset": "mnist"}, "dataset='mnist' is a name.*pass the object"),
    ("dataset is a class", {"dataset": Samples}, r"the class Samples.*dataset=Samples\(...\)"),
    ("dataset is None", {"dataset": None}, "dataset is missing.*TensorDataset"),
    ("dataset is a generator", {"dataset": (x for x in X)}, "no length.*pass a list or a map-style"),
    ("dataset is empty", {"dataset": TensorDataset(X[:0], Y[:0])}, "dataset is empty: pass one with"),
    ("scheduler is a name", {"scheduler": "cosine"}, "scheduler must be a function.*'cosine'.*CosineAnnealingLR"),
    (
        "scheduler made already",
        {"scheduler": StepLR(sgd(Net().parameters()), 3)},
        "function, got StepLR.*lambda optimizer",
    ),
    ("scheduler makes none", {"scheduler": lambda o: 0.1, "devices": TWO}, "scheduler made a float; it must make"),
    ("evaluate without a step", {"evaluate": TEST}, r"evaluate must be a pair.*evaluate=\(test_set, eval_step\)"),
    ("evaluate the wrong way round", {"evaluate": (step, TEST)}, r"wrong way round.*evaluate=\(test_set, eval_step\)"),
    ("evaluate without a function", {"evaluate": (TEST, None)}, "eval_step must be a function"),
    ("evaluate on nothing", {"evaluate": (TensorDataset(X[:0]), step)}, "test set of evaluate is empty"),
    ("eval step returns a float", {"evaluate": (TEST, lambda m, b: 0.5)}, r"returned float.*\(sums by name, count\)"),
    (
        "eval step returns a dict",
        {"evaluate": (TEST, lambda m, b: {"a": 1.0})},
        r"returned dict.*\(sums by name, count\)",
    ),
    ("metric of a vector", {"evaluate": (TEST, lambda m, b: ({"a": b[0]}, 4))}, "as 'a', not one number"),
    ("metric called samples", {"evaluate": (TEST, lambda m, b: ({"samples": 1}, 4))}, "'samples'.*rename it"),
    ("batch_size 0", {"batch_size": 0}, "batch_size=0 must be a whole number of at least 1"),
    ("batch_size as text", {"batch_size": "32"}, "batch_size='32' must be a whole number"),
    ("epochs 0", {"epochs": 0}, "epochs=0 must be a whole number of at least 1"),
    ("epochs negative", {"epochs": -1}, "epochs=-1 must be a whole number of at least 1"),
    ("epochs a float", {"epochs": 1.5}, "epochs=1.5 must be a whole number"),
    ("epochs twice", {"num_epochs": 3}, "epochs=1 and num_epochs=3 are one setting.*pass epochs alone"),
    ("seed too large", {"seed": 2**63}, r"seed=9223372036854775808 must be .* below 2\*\*63"),
    ("seed negative", {"seed": -1}, "seed=-1 must be a whole number of at least 0"),
    ("num_workers negative", {"num_workers": -1}, "num_workers=-1 must be a whole number of at least 0"),
    ("a name misspelled", {"batchsize": 4}, "'batchsize'; did you mean 'batch_size'"),
    ("an argument misspelled", {"optimiser": sgd}, "'optimiser'; did you mean 'optimizer'"),
    ("a name of another library", {"max_epochs": 4}, "'max_epochs'; did you mean 'epochs'"),
    ("the learning rate", {"lr": 0.1}, "'lr': it belongs to the optimizer: pass optimizer=lambda"),
    ("the loss as an argument", {"loss_fn": F.mse_loss}, "'loss_fn': pass step=lambda model, batch"),
    ("a policy that is none", {"policy": "fast"}, "policy='fast' must be one of sync, balanced, cadence, async"),
    ("a precision that is none", {"precision": "float16"}, "precision='float16' must be one of fp32, bf16, fp16"),
    ("an unknown device", {"devices": "tpu"}, "'tpu': allowed is cpu, cuda.*uneven devices"),
    ("devices as a number", {"devices": 2}, "devices=2 must be text, as in 'cuda:0,cpu'"),
    ("no such cuda device", {"devices": "cuda:99"}, "'cuda:99'.*uneven devices"),
    ("100 ranks on a few cores", {"devices": ",".join(["cpu"] * 2000)}, "2000 devices.*name at most"),
    ("fsdp on one device", {"strategy": "fsdp"}, "strategy='fsdp'.*name several.*leave strategy out"),
    ("zero1 on one device", {"strategy": "zero1"}, "strategy='zero1'.*name several.*leave strategy out"),
    ("a strategy with async", {"strategy": "zero1", "policy": "async", "devices": TWO}, "policy='balanced' or 'sync'"),
    ("shares for others", {"shares": (1, 2, 3), "devices": TWO}, "3 entries for 2 devices"),
    ("shares on one device", {"shares": (5, 2), "devices": "cpu"}, "2 entries for 1 device: cpu"),
    ("checkpoints without out", {"save_every": 1}, "save_every needs a folder.*add out="),
    ("overwrite without out", {"overwrite": True}, "overwrite=True without out.*add out="),
    ("out holds other files", {"out": "."}, r"holds files .*\(thesis.tex\).*overwrite=True \(--overwrite\)"),
    ("out is the root", {"out": "/"}, r"overwrite=True \(--overwrite\)"),
    ("out is a file", {"out": "thesis.tex"}, "'thesis.tex' is a file; name a folder"),
    ("out below a file", {"out": "thesis.tex/run"}, "a part of the path is a file; choose another folder"),
    ("out cannot be made", {"out": "/proc/run"}, "cannot write to /proc/run.*choose another folder"),
    ("out is empty text", {"out": ""}, "out='' must be a path"),
    ("a bad model with a good out", {"out": "runs/one", "model": nn.Tanh}, "Tanh has no param to train"),
    ("replay of nothing", {"replay": "absent"}, "no log.json in it; pass the folder"),
]


@pytest.fixture
def untouched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """A folder of the user's as the current one; the function returned checks that nothing was written or started."""
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "thesis.tex").write_text("years of work")
    (tmp_path / "tmp").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    monkeypatch.setattr("subprocess.Popen", lambda *_, **__: pytest.fail("a process was started"))

    def check() -> None:
        assert sorted(tmp_path.rglob("*")) == sorted(
            [tmp_path / "here", tmp_path / "here" / "thesis.tex", tmp_path / "tmp"]
        )
        assert (tmp_path / "here" / "thesis.tex").read_text() == "years of work"
        assert multiprocessing.active_children() == []

    return check


def test_the_table_is_long_enough_and_has_no_row_twice() -> None:
    assert len({name for name, _, _ in ROWS}) == len(ROWS) >= 60


@pytest.mark.parametrize(("given", "words"), [row[1:] for row in ROWS], ids=[row[0] for row in ROWS])
def test_a_bad_input_is_one_line_with_the_fix(
    given: dict[str, Any], words: str, untouched: Callable[[], None], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises((InputError, MachineError), match=words) as caught:
        fit(**{**GOOD, **given})
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 400
    assert capsys.readouterr() == ("", "")
    untouched()


def test_the_functions_are_tried_before_ranks_start_without_a_trace(
    untouched: Callable[[], None], capfd: pytest.CaptureFixture[str]
) -> None:
    def wrong(optimizer: Any) -> None:
        print(optimizer, flush=True)
        os.write(2, b"printed by a library")
        torch.rand(3), random.random(), np.random.rand()

    before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    with pytest.raises(InputError, match="scheduler made a NoneType"):
        fit(**{**GOOD, "devices": TWO, "scheduler": wrong})
    after = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    assert torch.equal(before[0], after[0])
    assert before[1:] == after[1:]
    assert capfd.readouterr() == ("", "")
    untouched()


def test_a_function_that_hangs_or_fails_by_itself_is_left_to_the_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("uneven.launch.checks.trial.LIMIT_S", 0.3)
    monkeypatch.setattr("uneven.launch.run.train_on_ranks", lambda *_, **__: pytest.fail("ranks"))
    before = psutil.Process().children()

    def fails() -> nn.Module:
        raise RuntimeError("needs a rank")

    def hangs() -> nn.Module:
        subprocess.run(["sleep", "100"], check=False)
        return Net()

    for make in (fails, hangs):
        with pytest.raises(pytest.fail.Exception, match="ranks"):
            fit(**{**GOOD, "devices": TWO, "model": make})
    assert psutil.Process().children() == before


LOOP_ROWS = [
    ({"make_optimizer": torch.optim.LBFGS}, "LBFGS.*closure.*use SGD, Adam"),
    ({"model": Net().requires_grad_(False)}, "set it to True"),
    ({"model": InDDP()}, "DistributedDataParallel.*its .module"),
    ({"model": Net}, r"model must be the model itself, as in Ddp.setup\(Net\(\)"),
    ({"dataset": (X, Y)}, r"TensorDataset\(X, Y\)"),
    ({"scheduler": "cosine"}, "scheduler must be a function"),
    ({"devices": TWO}, "uneven run"),
]


@pytest.mark.parametrize(("given", "words"), LOOP_ROWS)
def test_a_loop_of_ones_own_refuses_the_same(given: dict[str, Any], words: str, untouched: Callable[[], None]) -> None:
    good = {"model": Net(), "make_optimizer": sgd, "dataset": TEST, "batch_size": 4, "epochs": 1, "devices": "cpu"}
    call: dict[str, Any] = {**good, "progress": "off", "out": "runs/loop", **given}
    with pytest.raises(InputError, match=words) as caught:
        Ddp.setup(call.pop("model"), call.pop("make_optimizer"), **call)
    assert "\n" not in str(caught.value)
    untouched()


SCRIPTS = {
    "plain.py": "import torch\nprint('trained')\n",
    "beside.py": "import helper\n",
    "helper.py": "from torch import nn\n",
    "late.py": "def main():\n    from uneven import fit\nmain()\n",
    "broken.py": "def loss():\n    raise ValueError('boom')\n\nloss()\n",
}
LINES: list[tuple[str, int, str]] = [
    ("run absent.py", 2, "absent.py.*there is no such file; give its path"),
    ("run .", 2, r"script '\.' is a folder; name the script in it, as in train.py"),
    ("plan absent.py", 2, "there is no such file; give its path"),
    ("run plain.py --devices cpu,cpu", 2, "plain.py never imports uneven.*2 times.*call fit or Ddp.setup in it"),
    ("run beside.py --devices cpu,cpu@0.4", 2, "beside.py never imports uneven.*start it by: python beside.py"),
    ("bench policies plain.py", 2, "plain.py never imports uneven.*4 times, once per policy"),
    ("run late.py --policy fast", 2, "policy='fast' must be one of"),
    ("run late.py --seed -1", 2, "seed=-1 must be a whole number"),
    ("run late.py --devices tpu", 2, "'tpu': allowed is cpu"),
    ("run late.py --devices cuda:99", 2, "'cuda:99'.*uneven devices"),
    (f"run late.py --devices {','.join(['cpu'] * 2000)}", 2, "2000 devices.*name at most"),
    ("run late.py --shares 5;2", 2, "--shares '5;2' must be numbers with commas"),
]


@pytest.mark.parametrize(("line", "code", "words"), LINES, ids=[line[:40] for line, _, _ in LINES])
def test_a_bad_command_is_one_line_with_the_fix(
    line: str,
    code: int,
    words: str,
    untouched: Callable[[], None],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name, source in SCRIPTS.items():
        Path(name).write_text(source)
    monkeypatch.setattr("uneven.launch.context._contexts", [])
    monkeypatch.setattr(sys, "argv", ["uneven", *line.split()])
    monkeypatch.setattr(sys, "path", list(sys.path))
    with pytest.raises(SystemExit) as ended:
        command_line.main()
    out, err = capsys.readouterr()
    assert ended.value.code == code
    assert out == ""
    (told,) = err.splitlines()
    assert told.startswith("uneven: ")
    assert re.search(words, told), told
    for name in SCRIPTS:
        Path(name).unlink()
    untouched()
