"""Every kind of start on real processes: plainly, by `uneven run`, by torchrun. All end with the same parameters.

One script uses `fit`, the own loop and the manual tier in turn, so that each start is paid for once and groups follow
each other in one process. Most processes are forked (tests/forked.py); each starter is started for real once.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from tests.forked import ForkedPopen, run_forked
from uneven import InputError, TrainedState
from uneven.cli.main import app
from uneven.errors import RankError
from uneven.launch import environment
from uneven.launch.context import ProcessContext
from uneven.launch.environment import LaunchEnvironment, read_torchrun
from uneven.launch.script import run_script

BIN = Path(sys.executable).parent
HEAD = """
import json, sys, torch
from pathlib import Path
from torch import nn
from torch.nn import functional as F
from uneven import Ddp, TensorData, fit

X = torch.randn(150, 6, generator=torch.Generator().manual_seed(0)).double()
Y = torch.arange(150) % 3

def net():
    torch.manual_seed(7)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).double()

def sgd(params):
    return torch.optim.SGD(params, lr=0.1, momentum=0.9)

def loss_of(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1])
"""
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
wrapped.sync_params()
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


def start(command: list[str | Path], cwd: Path, **options: Any) -> subprocess.CompletedProcess[str]:
    return run_forked(command, cwd=cwd, **options)


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


def assert_close(ours: dict[str, torch.Tensor], reference: dict[str, torch.Tensor]) -> None:
    assert ours.keys() == reference.keys()
    for name, value in ours.items():
        torch.testing.assert_close(value, reference[name], rtol=1e-10, atol=1e-10)


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
        (("torchrun", "--standalone", "--nproc-per-node", "1"), [1.0]),
    ],
)
def test_it_is_so_after_a_real_start(starter: tuple[str, ...], means: list[float], tmp_path: Path) -> None:
    (tmp_path / "small.py").write_text(SMALL)
    done = start([BIN / starter[0], *starter[1:], "small.py", tmp_path], tmp_path)
    assert done.returncode == 0, done.stderr
    assert [float(path.read_text()) for path in sorted(tmp_path.glob("r?"))] == means


BREAKS = (
    HEAD
    + """
ddp = Ddp.setup(net(), sgd, dataset=TensorData(X, Y), batch_size=8, epochs=2, progress="off")
for x, y in ddp.batches(0):
    if ddp.rank == 1:
        break
    ddp.step(F.cross_entropy(ddp(x), y))
"""
)


@pytest.mark.parametrize("policy", ["balanced", pytest.param("async", marks=pytest.mark.soak)])
def test_a_break_on_one_rank_ends_the_run_with_its_name(tmp_path: Path, policy: str) -> None:
    (tmp_path / "train.py").write_text(BREAKS)
    command = [sys.executable, "-m", "uneven", "run", "train.py", "--devices", "cpu,cpu", "--policy", policy]
    done = start(command, tmp_path)
    assert done.returncode == 1
    assert "rank 0 (cpu" in done.stderr
    assert "rank 1 left its epoch" in done.stderr
    assert 'train.py", line' in done.stderr  # the rank's own traceback


FORGETS = (
    HEAD
    + """
model = net()
wrapped = Ddp.wrap(model)
optimizer = sgd(model.parameters())
for x, y in zip(X.split(10), Y.split(10)):
    optimizer.zero_grad()
    F.cross_entropy(wrapped(x), y).backward()
    optimizer.step()
"""
)


def test_a_forgotten_all_reduce_ends_the_run_instead_of_training_separate_replicas(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(FORGETS)
    done = start([BIN / "uneven", "run", "train.py", "--devices", "cpu,cpu"], tmp_path)
    assert done.returncode == 2
    assert "all_reduce_gradients() or weighted_all_reduce_gradients(count)" in done.stderr
    alone = start([sys.executable, "train.py"], tmp_path)
    assert alone.returncode == 0, alone.stderr


WAITS = (
    HEAD
    + """
ddp = Ddp.setup(net(), sgd, dataset=TensorData(X, Y), batch_size=8, epochs=10**6, progress="lines")
for epoch in range(10**6):
    for x, y in ddp.batches(epoch):
        ddp.step(F.cross_entropy(ddp(x), y))
    if epoch == 1 and ddp.rank == 0:  # outside the epoch: a rank that others slow down may have no batch in it
        print("training", flush=True)
"""
)


def test_ctrl_c_stops_all_ranks_after_one_step_and_saves(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(WAITS)
    command = [sys.executable, "-m", "uneven", "run", "train.py", "--devices", "cpu,cpu"]
    with ForkedPopen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "training\n"
        child.send_signal(signal.SIGINT)
        _, errors = child.communicate(timeout=150)
    assert child.returncode == 130, errors
    assert "stopped after" in errors
    (folder,) = (tmp_path / "runs").iterdir()
    state = TrainedState.load(folder)
    assert not state.finished
    assert state.slot > 10
    assert len(json.loads((folder / "log.json").read_text())["ranks"]) == 2


def test_a_notebook_cell_trains_on_two_devices(plain: dict[str, dict[str, torch.Tensor]]) -> None:
    cell = HEAD + (
        "state = fit(model=net, optimizer=sgd, step=loss_of, dataset=TensorData(X, Y), devices='cpu,cpu',"
        " batch_size=16, epochs=2, seed=3, progress='off')"
    )
    space = types.ModuleType("__main__")  # as in a notebook: no __file__, and nothing of it can be imported
    exec(compile(cell, "<cell>", "exec"), space.__dict__)
    assert_close(space.__dict__["state"].params, plain["fit"])


@pytest.fixture
def clean(monkeypatch: pytest.MonkeyPatch) -> None:
    """`uneven run` changes the process it runs a script in; put it back."""
    monkeypatch.setattr("uneven.launch.context._contexts", [])
    monkeypatch.setattr(sys, "argv", ["uneven"])
    monkeypatch.setattr(sys, "path", list(sys.path))


@pytest.mark.usefixtures("clean")
def test_with_one_device_the_script_runs_in_this_process(tmp_path: Path) -> None:
    (tmp_path / "here.py").write_text(
        HEAD
        + "state = fit(model=net, optimizer=sgd, step=loss_of, dataset=TensorData(X, Y), batch_size=16, epochs=2)\n"
        "import os\n"
        "Path(sys.argv[1]).write_text(json.dumps([os.getpid(), __name__, sys.argv[2:], state.config]))\n"
    )
    given = {"devices": "cpu", "epochs": 1, "seed": 9, "progress": "off"}
    run_script(tmp_path / "here.py", [str(tmp_path / "facts"), "--flag"], given)
    pid, name, args, used = json.loads((tmp_path / "facts").read_text())
    assert (pid, name, args) == (os.getpid(), "__main__", ["--flag"])
    assert (used["devices"], used["epochs"], used["seed"], used["batch_size"]) == ("cpu", 1, 9, 16)


@pytest.mark.usefixtures("clean")
@pytest.mark.parametrize("wrong", [{"strategy": "zero9"}, {"policy": "fast"}, {"optimizer_state": "drop"}])
def test_a_setting_that_is_wrong_by_itself_is_refused_before_anything_starts(
    wrong: dict[str, str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "t.py").write_text("raise AssertionError('it ran')\n")
    monkeypatch.setattr("uneven.launch.script.run_on_ranks", lambda *_: pytest.fail("ranks were started"))
    ((name, value),) = wrong.items()
    with pytest.raises(InputError, match=f"{name}='{value}' must be one of"):
        run_script(tmp_path / "t.py", [], {"devices": "cpu,cpu", **wrong})


@pytest.mark.usefixtures("clean")
def test_the_command_line_takes_settings_before_and_after_the_script(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    seen: list[Any] = []
    monkeypatch.setattr("uneven.launch.script.run_script", lambda *order: seen.append(order))
    line = ["run", "--seed", "4", "t.py", "data", "--shares", "5,2", "--policy", "balanced", "--", "--epochs", "x"]
    assert CliRunner().invoke(app, line).exit_code == 0
    (order,) = seen
    assert order == (Path("t.py"), ["data", "--epochs", "x"], {"seed": 4, "shares": (5.0, 2.0), "policy": "balanced"})
    assert CliRunner().invoke(app, ["run", "t.py", "--no-such-setting", "3"]).exit_code == 2


@pytest.mark.usefixtures("clean")
@pytest.mark.parametrize(
    ("name", "settings", "words"),
    [
        ("absent.py", {}, "there is no such file"),
        ("here.py", {"epohcs": 1}, "did you mean 'epochs'"),
        ("here.py", {"devices": "cpu,tpu"}, "tpu"),
    ],
)
def test_a_run_that_cannot_start_says_why(name: str, settings: dict[str, Any], words: str, tmp_path: Path) -> None:
    (tmp_path / "here.py").write_text("raise AssertionError('it must not run')")
    with pytest.raises(InputError) as caught:
        run_script(tmp_path / name, [], settings)
    assert words in str(caught.value)


TORCHRUN = {
    "TORCHELASTIC_RUN_ID": "job",
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "host",
    "MASTER_PORT": "1234",
}


def test_what_torchrun_says_is_read() -> None:
    started = read_torchrun({**TORCHRUN, "TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "2"})
    assert started == LaunchEnvironment("torchrun", 3, 4, 1, 2, "host", 1234, "uneven/job/2/", hosts_store=False)
    first = read_torchrun({**TORCHRUN, "RANK": "0", "LOCAL_RANK": "0", "TORCHELASTIC_USE_AGENT_STORE": "False"})
    assert first is not None
    assert first.hosts_store
    assert read_torchrun({**TORCHRUN, "RANK": "1", "TORCHELASTIC_USE_AGENT_STORE": "False"}) != first
    assert read_torchrun({"RANK": "0", "WORLD_SIZE": "1"}) is None


def test_ranks_whose_starter_has_no_store_meet_at_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "_hosted", [])
    with socket.socket() as finder:
        finder.bind(("127.0.0.1", 0))
        port = finder.getsockname()[1]
    first, second = (
        LaunchEnvironment("torchrun", rank, 2, rank, 2, "127.0.0.1", port, "uneven/job/0/", hosts_store=rank == 0)
        for rank in range(2)
    )
    first.connect("run/1").set("key", "here")
    assert second.connect("run/1").get("key") == b"here"
    assert not second.connect("run/2").check(["key"])  # every run has its own keys


def test_devices_must_match_the_processes_there_are() -> None:
    started = read_torchrun(TORCHRUN)
    assert started is not None
    with pytest.raises(InputError) as caught:
        ProcessContext(started).devices("cpu,cpu@0.4")
    assert "names 2 for the 4 processes that torchrun started" in str(caught.value)


@pytest.mark.soak
@pytest.mark.parametrize("name", ["fit", "builder", "own_loop", "manual", "muon_gpt"])
@pytest.mark.parametrize(
    "starter", [("uneven", "run", "--devices", "cpu,cpu@0.4"), ("torchrun", "--standalone", "--nproc-per-node", "2")]
)
def test_every_example_runs_by_every_starter(name: str, starter: tuple[str, ...], tmp_path: Path) -> None:
    """Plainly started they are run by test_readme.py."""
    example = Path(__file__).parents[2] / "examples" / f"{name}.py"
    done = start([BIN / starter[0], *starter[1:], example], tmp_path)
    assert done.returncode == 0, done.stderr
    (line,) = done.stdout.splitlines()  # the first rank's alone
    assert float(line.split()[-1]) > 0.88


@pytest.mark.soak
@pytest.mark.parametrize("policy", ["cadence", "async"])
@pytest.mark.parametrize("name", ["fit", "builder", "own_loop"])
@pytest.mark.parametrize("starter", ["python", "uneven", "torchrun"])
def test_every_example_runs_with_the_local_policies(name: str, policy: str, starter: str, tmp_path: Path) -> None:
    """By changing one word of the script, or none of it and one of the command line."""
    source = (Path(__file__).parents[2] / "examples" / f"{name}.py").read_text()
    command: list[str | Path] = [BIN / "uneven", "run", "--devices", "cpu,cpu@0.4", "--policy", policy]
    if starter != "uneven":
        source = source.replace('"balanced"', f'"{policy}"').replace(
            "batch_size=32", f'batch_size=32, policy="{policy}"'
        )
        assert policy in source
        command = [BIN / "torchrun", "--standalone", "--nproc-per-node", "2"]
    if starter == "python":
        command = [sys.executable]
        if name != "own_loop":  # a loop of one's own needs a starter for several devices
            source = source.replace("epochs=3", 'epochs=3, devices="cpu,cpu@0.4"').replace(
                ".epochs(3)", '.epochs(3).devices("cpu,cpu@0.4")'
            )
            assert "cpu@0.4" in source
    (tmp_path / "example.py").write_text(source)
    done = start([*command, tmp_path / "example.py"], tmp_path)
    assert done.returncode == 0, done.stderr
    (line,) = done.stdout.splitlines()
    assert float(line.split()[-1]) > 0.86


def test_a_rank_error_is_a_line_and_exit_code_1(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    from uneven.cli import main

    def fail() -> None:
        raise RankError("rank 1 (cpu on here) failed")

    monkeypatch.setattr(main, "app", fail)
    with pytest.raises(SystemExit) as ended:
        main.main()
    assert ended.value.code == 1
    assert "rank 1 (cpu on here) failed" in capsys.readouterr().err
