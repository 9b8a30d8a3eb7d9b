"""Resume under `uneven run` and torchrun: all ranks go on from one checkpoint, and one of them says so."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from tests.api.starts import BIN, HEAD, assert_close, start
from tests.cli.documents import check_document
from uneven import Ddp, TrainedState, fit
from uneven.cli.main import app
from uneven.data.tensors import TensorData

SCRIPT = (
    HEAD
    + """
out, batch, epochs, progress = Path(sys.argv[1]), *map(int, sys.argv[2:4]), sys.argv[4]
settings = {"batch_size": batch, "epochs": epochs, "seed": 3, "save_every": "3 steps", "policy": "sync"}
settings |= {"resume": "auto", "progress": progress}
data = TensorData(X, Y)
state = fit(model=net, optimizer=sgd, step=loss_of, dataset=data, out=out / "fit", **settings)

model, seen = net(), []
ddp = Ddp.setup(model, sgd(model.parameters()), dataset=data, out=out / "loop", **settings)
count = ddp.register("count", {"batches": 0, "rank": ddp.rank})
for epoch in range(ddp.epochs):
    seen.append(0)
    for batch in ddp.batches(epoch):
        seen[-1] += 1
        count["batches"] += 1
        ddp.step(loss_of(ddp, batch))
ddp.finish()
result = {"seen": seen, "count": count, "slot": state.slot, "params": dict(model.named_parameters())}
torch.save(result, out / f"r{ddp.rank}")
"""
)


def test_two_ranks_go_on_under_another_launcher(tmp_path: Path) -> None:
    """Begun by `uneven run`, which ends after an epoch; resumed by torchrun: equal to one process without a break."""
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    out = tmp_path / "out"
    out.mkdir()
    done = start([BIN / "uneven", "run", script, out, "16", "1", "off", "--devices", "cpu,cpu"], tmp_path)
    assert done.returncode == 0, done.stderr
    assert {path.name for path in (out / "loop").glob("step-*")} == {"step-3", "step-5"}
    torchrun = [BIN / "torchrun", "--standalone", "--nproc-per-node", "2"]
    done = start([*torchrun, script, out, "16", "2", "lines"], tmp_path)
    assert done.returncode == 0, done.stderr
    for kind in ("fit", "loop"):
        assert done.stderr.count(f"resumes from {out}/{kind}/step-5: 5 steps are trained") == 1
    names: dict[str, Any] = {}
    exec(HEAD, names)
    given = {"model": names["net"], "optimizer": names["sgd"], "step": names["loss_of"]}
    data = TensorData(names["X"], names["Y"])
    expected = fit(**given, dataset=data, batch_size=32, epochs=2, seed=3, devices="cpu", progress="off")
    for rank in range(2):
        found = torch.load(out / f"r{rank}")
        assert (found["seen"], found["slot"]) == ([0, 5], 10)
        assert found["count"] == {"batches": 10, "rank": rank}
        for params in (found["params"], TrainedState.load(out / "fit").params):
            assert_close({name: param.detach() for name, param in params.items()}, expected.params)


def test_the_command_line_names_the_run_to_go_on_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("uneven.launch.context._contexts", [])
    monkeypatch.setattr(sys, "argv", ["uneven"])
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "train.py").write_text(
        HEAD
        + """
state = fit(
    model=net, optimizer=sgd, step=loss_of, dataset=TensorData(X, Y), batch_size=32, seed=3, save_every="3 steps"
)
"""
    )
    command = ["run", str(tmp_path / "train.py"), "--devices", "cpu"]
    run = str(tmp_path / "run")
    assert CliRunner().invoke(app, [*command, "--epochs", "1", "--out", run]).exit_code == 0
    done = CliRunner().invoke(app, [*command, "--epochs", "2", "--resume", run])
    assert done.exit_code == 0, done.output
    assert f"resumes from {run}/step-5" in done.output
    assert "trained 300 samples, 150 of them since it was resumed, in" in done.output
    state = TrainedState.load(run)
    assert (state.slot, state.finished) == (10, True)
    assert sorted(path.name for path in Path(run).glob("step-*")) == [
        *("step-10", "step-3", "step-5", "step-6", "step-9"),
    ]
    done = CliRunner().invoke(app, [*command, "--epochs", "2", "--resume", "auto", "--out", run])
    assert done.exit_code == 0, done.output
    assert f"{run} is finished: nothing to train" in done.output


def test_of_several_runs_of_a_script_only_the_named_one_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("uneven.launch.context._contexts", [])
    monkeypatch.setattr(sys, "argv", ["uneven"])
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "train.py").write_text(
        HEAD
        + f"""
for stage in ("pre", "fine"):
    out = Path({str(tmp_path)!r}) / stage
    fit(
        model=net, optimizer=sgd, step=loss_of, dataset=TensorData(X, Y), batch_size=32, seed=3, out=out,
        save_every="3 steps", resume="auto" if stage == "fine" else None
    )
"""
    )
    command = ["run", str(tmp_path / "train.py"), "--devices", "cpu", "--epochs"]
    pre, fine = tmp_path / "pre", tmp_path / "fine"
    assert CliRunner().invoke(app, [*command, "1"]).exit_code == 0
    for named, from_step in ((pre, 5), (pre / "step-3", 3)):
        capfd.readouterr()
        done = CliRunner().invoke(app, [*command, "2", "--resume", str(named)])
        assert done.exit_code == 0, done.output
        assert f"resumes from {pre}/step-{from_step}" in done.output
        assert f"--resume {named} is not the run of out={str(fine)!r}, which begins as without it" in done.output
    assert [TrainedState.load(out).slot for out in (pre, fine)] == [10, 10]
    done = CliRunner().invoke(app, [*command, "3", "--resume", str(fine)])  # its first run takes that up
    assert "--resume auto lets each of its runs go on from its own" in str(done.exception)
    assert [TrainedState.load(out).slot for out in (pre, fine)] == [15, 10]


def test_json_tells_a_run_that_is_finished_already(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("uneven.launch.context._contexts", [])
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "train.py").write_text(
        HEAD
        + """
settings = {"dataset": TensorData(X, Y), "batch_size": 32, "epochs": 1, "seed": 3, "resume": "auto"}
out = Path(__file__).parent
fit(model=net, optimizer=sgd, step=loss_of, out=out / "fit", **settings)
model = net()
with Ddp.setup(model, sgd(model.parameters()), out=out / "loop", **settings) as ddp:
    for batch in ddp.batches(0):
        ddp.step(loss_of(ddp, batch))
"""
    )
    documents = []
    for _ in range(2):
        done = CliRunner().invoke(app, ["run", str(tmp_path / "train.py"), "--devices", "cpu", "--json"])
        assert done.exit_code == 0, done.output
        check_document("run", document := json.loads(done.stdout))
        documents.append(document["runs"])
    nothing_trained = {"train_seconds": 0.0, "took_part": [], "samples_per_s": None, "disturbed": None}
    for first, again in zip(*documents, strict=True):
        assert again == {**first, **nothing_trained}
        assert (again["finished"], again["steps"]) == (True, 5)


def test_the_builder_has_a_method_for_each(tmp_path: Path) -> None:
    data = TensorData(torch.zeros(8, 1), torch.zeros(8, 1))

    def builder() -> Any:
        made = Ddp.builder(
            lambda: torch.nn.Linear(1, 1),
            lambda params: torch.optim.SGD(params, lr=0.1),
            lambda model, batch: model(batch[0]).square().mean(),
        )
        return made.dataset(data).batch_size(2).devices("cpu").progress("off").out(tmp_path)

    builder().epochs(1).save_every("3 steps").keep_last(1).run().join()
    state = builder().epochs(2).save_every("3 steps").resume("auto").run().join()
    assert (state.saves, state.samples) == ([3, 4, 6, 8], 16)
