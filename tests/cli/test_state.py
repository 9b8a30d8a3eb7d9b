"""`uneven state`: what users see of their checkpoints, and what scripts read."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import nn
from typer.testing import CliRunner, Result

from tests.cli.documents import check_document
from tests.results.checkpoints import flip_byte, make_whole, write_checkpoint
from uneven import InputError, TrainedState
from uneven.cli.main import app


def call(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, ["state", *map(str, arguments)])


def called(*arguments: str | Path, code: int = 0) -> Any:
    """The JSON document of a call."""
    result = call(*arguments, "--json")
    assert result.exit_code == code, result.output
    return json.loads(result.stdout)


def result_state(slot: int = 12, **changes: Any) -> TrainedState:
    whole = make_whole(slot)
    return TrainedState(
        **{
            "params": {name: whole.tensors[name] for name in ("layer.weight", "layer.bias")},
            "buffers": {"norm.mean": whole.tensors["norm.mean"]},
            "tied": {"head.weight": "layer.weight"},
            "optimizer": {"layer.weight.exp_avg": torch.zeros(2, 3), "layer.weight.step": torch.tensor(4.0)},
            "param_groups": whole.record["param_groups"],
            "history": [{"epoch": 1, "loss": 0.25, "accuracy": 0.75}],
            "config": whole.record["config"],
            "slot": slot,
            "samples": 32,
            "dataset_samples": 64,
            **changes,
        }
    )


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Three checkpoints, the newest damaged, what a killed run left, and no result."""
    for slot in (4, 8, 12):
        write_checkpoint(tmp_path / "run" / f"step-{slot}", slot, samples=8 * slot)
    write_checkpoint(tmp_path / "run" / ".step-16.partial-word_3", 16)
    flip_byte(tmp_path / "run" / "step-12" / "rank-1.safetensors", -1)
    return tmp_path / "run"


def test_show_tells_what_is_whole_and_why_not(run: Path) -> None:
    document = called("show", run)
    assert document["newest_whole"] == str(run / "step-8")
    states = document["states"]
    assert [(s["name"], s["whole"]) for s in states] == [
        *(("step-4", True), ("step-8", True), ("step-12", False), (".step-16.partial-word_3", False)),
    ]
    assert states[2]["fault"].startswith(f"checkpoint {run / 'step-12'}: rank-1.safetensors is damaged: its crc32 is")
    first = states[0]
    assert (first["slot"], first["samples"], first["epochs"], first["params"]) == (4, 32, 0.5, 8)
    assert first["metrics"] == {"loss": 0.5}
    assert first["devices"] == ["cpu", "cpu@0.4"]
    assert (first["policy"], first["ranks"], first["kind"]) == ("balanced", 2, "checkpoint")
    assert first["versions"]["torch"] == torch.__version__
    assert first["bytes"] == sum(path.stat().st_size for path in (run / "step-4").iterdir())
    text = call("show", run).stdout
    for words in ("step-8", "0.50", "loss 0.5", "NO", "policy balanced", "newest whole: step-8, not finished"):
        assert words in text
    assert "not whole: step-12: checkpoint" in text
    assert "left by a killed run" in text


def test_show_reads_results_and_single_checkpoints(run: Path) -> None:
    write_checkpoint(run / "step-16", 16)
    result_state(slot=16).save(run)
    document = called("show", run)
    last = next(state for state in document["states"] if state["name"] == "result")
    assert (last["whole"], last["kind"], last["metrics"]) == (True, "result", {"loss": 0.25, "accuracy": 0.75})
    assert document["newest_whole"] == str(run)
    assert [state["name"] for state in called("show", run / "step-4")["states"]] == ["step-4"]
    (run / "step-4" / "state.json").unlink()
    (alone,) = called("show", run / "step-4")["states"]
    assert (alone["whole"], alone["kind"]) == (False, "checkpoint")
    assert "state.json is missing" in alone["fault"]


def test_a_metric_that_is_no_number_is_null(tmp_path: Path) -> None:
    """JSON has no NaN and no infinity, and what reads it refuses them or takes them for 1.8e308."""
    result_state(history=[{"epoch": 1, "perplexity": float("inf"), "odd": float("nan"), "loss": 1.5}]).save(tmp_path)
    text = call("show", tmp_path, "--json").stdout
    document = json.loads(text, parse_constant=lambda word: pytest.fail(f"{word} is no JSON"))
    assert document["states"][0]["metrics"] == {"perplexity": None, "odd": None, "loss": 1.5}
    check_document("state show", document)


def test_a_result_whose_record_was_edited_is_told(tmp_path: Path) -> None:
    result_state().save(tmp_path)
    path = tmp_path / "state.json"
    record = {key: entry for key, entry in json.loads(path.read_text()).items() if key != "crc32"}
    for text in (json.dumps(record), "[" * 100_000):
        path.write_text(text)
        (state,) = called("show", tmp_path)["states"]
        assert (state["whole"], "state.json is damaged" in state["fault"]) == (False, True)
    assert "NO" in call("show", tmp_path).stdout


def test_a_folder_without_a_state_is_refused(tmp_path: Path) -> None:
    for arguments in (("show", tmp_path), ("diff", tmp_path, tmp_path), ("export", tmp_path, "--to", "model.pt")):
        with pytest.raises(InputError, match="holds no state of a run"):
            raise call(*arguments).exception or AssertionError
    with pytest.raises(InputError, match="absent does not exist"):
        raise call("show", tmp_path / "absent").exception or AssertionError


TOLD_WITHOUT_TORCH = """
import sys
from typer.testing import CliRunner
from uneven.cli.main import app
for folder in ("absent", "a file", "no run"):
    for verb in ("state show", "state diff whole", "run train.py --devices cpu,cpu --resume"):
        print(repr(CliRunner().invoke(app, [*verb.split(), folder]).exception), "torch" in sys.modules)
"""


def test_a_mistyped_folder_is_told_before_torch_is_loaded_which_takes_seconds(tmp_path: Path) -> None:
    for name in ("no run", "whole/step-1"):
        (tmp_path / name).mkdir(parents=True)
    for name in ("a file", "no run/notes.txt"):
        (tmp_path / name).touch()
    (tmp_path / "train.py").write_text("import uneven")
    command = [sys.executable, "-c", TOLD_WITHOUT_TORCH]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=tmp_path, env=environment)
    lines = done.stdout.splitlines()
    assert len(lines) == 9
    for place, line in enumerate(lines):
        assert line.startswith("InputError("), line
        assert ("absent", "a file", "no run")[place // 3] in line
        assert line.endswith(" False"), line


def test_diff_of_equal_states_is_0(run: Path, tmp_path: Path) -> None:
    torch.manual_seed(3)  # other random states, which do not count
    config = {**make_whole().record["config"], "out": "elsewhere", "global_batch_size": 16}  # as it follows from 2 x 8
    write_checkpoint(tmp_path / "twin", 8, samples=64, config=config)
    document = called("diff", run, tmp_path / "twin")  # the newest whole one of the run
    assert (document["equal"], document["settings"], document["position"]) == (True, {}, {})
    groups = {"model", *(f"{what}rank {rank}" for what in ("", "random states of ") for rank in range(2))}
    assert {row["group"] for row in document["tensors"]} == groups
    result = call("diff", run, tmp_path / "twin")
    assert result.stdout.splitlines()[-1] == "equal bit by bit"
    assert "passed over checkpoint" in result.stderr
    result_state(slot=8, samples=64).save(tmp_path / "result")
    assert called("diff", run / "step-8", tmp_path / "result")["equal"]  # optimizer of rank 0 too, random states not


def test_diff_names_what_differs(run: Path, tmp_path: Path) -> None:
    document = called("diff", run / "step-4", run / "step-8", code=1)
    assert document["position"] == {"slot": [4, 8], "samples": [32, 64]}
    rows = {row["name"]: row for row in document["tensors"] if row["group"] == "model"}
    assert rows["layer.bias"]["equal"]
    assert (rows["layer.weight"]["max_abs"], rows["layer.weight"]["max_rel"]) == (4.0, 0.5)
    params = {
        "layer.weight": torch.zeros(3, 3),
        "layer.bias": torch.tensor([1.0, float("nan")]),
        "norm.mean": torch.tensor([0.0, -0.0]),
    }
    changed = result_state(slot=8, samples=64, params=params, buffers={"more": torch.zeros(1)})
    changed.param_groups[0]["lr"] = 0.2
    changed.save(tmp_path / "b")
    result = call("diff", run / "step-8", tmp_path / "b")
    assert result.exit_code == 1
    for line in (
        "param_groups[0].lr: 0.1 | 0.2",
        "  layer.weight: shape (2, 3) | (3, 3)",
        "  layer.bias: largest difference 0, relative 0, 1 not finite",
        "  norm.mean: largest difference 0, relative 0",  # the sign of zero
        "  more: only in B",
    ):
        assert line in result.stdout.splitlines()
    assert result.stdout.splitlines()[-1] == "different"


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)
        self.head = nn.Linear(3, 2, bias=False)
        self.head.weight = self.layer.weight
        self.norm = nn.Module()
        self.norm.register_buffer("mean", torch.ones(2))


def test_an_export_loads_into_the_model(run: Path, tmp_path: Path) -> None:
    expected = make_whole(8).tensors
    document = called("export", run, "--to", tmp_path / "new" / "model.pt")
    assert (document["from"], document["slot"]) == (str(run / "step-8"), 8)
    whole = torch.load(tmp_path / "new" / "model.pt", weights_only=True)
    assert whole["head.weight"].data_ptr() == whole["layer.weight"].data_ptr()
    model = Tied()
    model.load_state_dict(whole)
    assert torch.equal(model.layer.weight, expected["layer.weight"])
    call("export", run, "--to", tmp_path / "model.safetensors")
    model = Tied()
    assert safetensors.torch.load_model(model, tmp_path / "model.safetensors") == (set(), [])
    assert torch.equal(model.head.weight, expected["layer.weight"])
    assert sorted(safetensors.torch.load_file(tmp_path / "model.safetensors")) == sorted(expected)
    result_state(slot=12).save(run)
    assert called("export", run, "--to", tmp_path / "model.pth")["kind"] == "result"


def test_an_export_never_replaces_a_file_unasked_or_in_part(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    to = tmp_path / "model.safetensors"
    to.write_text("mine")
    assert "exists; add --overwrite" in str(call("export", run, "--to", to).exception)

    def fail(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", fail)
    assert "no space left" in str(call("export", run, "--to", to, "--overwrite").exception)
    assert to.read_text() == "mine"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model.safetensors", "run"]
    monkeypatch.undo()
    assert call("export", run, "--to", to, "--overwrite").exit_code == 0
    assert "must end in .safetensors or .pt" in str(call("export", run, "--to", "model.onnx").exception)
    assert "is a folder" in str(call("export", run, "--to", _folder(tmp_path / "out.pt")).exception)


def _folder(path: Path) -> Path:
    path.mkdir()
    return path
