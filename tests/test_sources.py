"""Where settings come from: default < script < run.toml < environment < flag; what is wrong is said with its place."""

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from tests.forked import run_forked
from uneven import InputError
from uneven.cli.main import app
from uneven.config import RunConfig, settings_of
from uneven.config.sources import find_run_file, from_outside, resolve_sources

ROOT = Path(__file__).parent.parent


@pytest.fixture
def run_file(tmp_path: Path) -> Path:
    return tmp_path / "run.toml"


def test_each_source_takes_precedence_over_the_one_before_and_is_named(run_file: Path) -> None:
    sources: list[dict[str, Any]] = [{}, {"script": {"epochs": 2, "seed": 2}}, {"file": run_file}]
    sources += [{"environ": {"UNEVEN_EPOCHS": "4"}}, {"flags": {"epochs": 5}}]
    run_file.write_text("epochs = 3\n")
    given: dict[str, Any] = {}
    found = []
    for source in sources:
        given |= source
        found.append(resolve_sources(**given).get("epochs"))
    assert found == [
        None,  # required
        (2, "script"),
        (3, str(run_file)),
        (4, "environment UNEVEN_EPOCHS"),
        (5, "flag --epochs"),
    ]
    resolved = resolve_sources(**given)
    assert resolved["seed"] == (2, "script")
    assert resolved["policy"] == ("balanced", "default")
    assert from_outside(resolved) == {"epochs": 5}
    assert list(resolved) == [name for name in settings_of(RunConfig) if name != "batch_size"]


def test_files_and_variables_have_the_types_of_the_settings(run_file: Path) -> None:
    run_file.write_text(
        'num_epochs = 3\nshares = [5, 2]\nmemory_cap = [64, 16]\nshuffle = false\nout = "a"\ndeadline = "none"\n'
    )
    texts = {"SHARES": "5,2", "MEMORY_CAP": "64,16", "SHUFFLE": "false", "OUT": "a", "DEADLINE": "none", "EPOCHS": "3"}
    by_file = from_outside(resolve_sources(file=run_file))
    by_variable = from_outside(resolve_sources(environ={f"UNEVEN_{name}": text for name, text in texts.items()}))
    assert by_file == {
        "epochs": 3,
        "shares": [5, 2],
        "memory_cap": [64, 16],
        "shuffle": False,
        "out": "a",
        "deadline": None,
    }
    assert {name: list(one) if isinstance(one, tuple) else one for name, one in by_variable.items()} == by_file
    assert (
        resolve_sources(environ={"UNEVEN_EPOCHS": ""}, flags={"deadline": 2.0})["deadline"].source == "flag --deadline"
    )


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("epoch = 3", ("unknown setting 'epoch'", "'epochs'")),
        ("lr = 0.1", ("unknown setting 'lr'", "optimizer")),
        ("epochs = 0", ("epochs=0", "at least 1")),
        ('epochs = "3"', ("epochs='3'", "whole number")),
        ('policy = "fast"', ("policy='fast'", "sync, balanced")),
        ("[run]\nepochs = 3", ("[run]", "table")),
        ("epochs = 3\nnum_epochs = 4", ("one setting under two names",)),
        ("policy = async", ("line 1",)),
        (None, ("No such file",)),
    ],
)
def test_what_is_wrong_in_a_file_is_said_with_file_key_and_fix(
    run_file: Path, content: str | None, words: tuple[str, ...]
) -> None:
    if content is not None:
        run_file.write_text(content)
    with pytest.raises(InputError) as raised:
        resolve_sources(file=run_file)
    assert str(raised.value).startswith(f"{run_file}: ")
    assert all(word in str(raised.value) for word in words), raised.value
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("variable", "text", "words"),
    [
        ("UNEVEN_EPOCHS", "many", ("UNEVEN_EPOCHS: epochs='many'", "whole number")),
        ("UNEVEN_SHUFFLE", "maybe", ("UNEVEN_SHUFFLE: shuffle='maybe'", "True or False")),
        ("UNEVEN_SHARES", "a,b", ("UNEVEN_SHARES 'a,b'", "5,2")),
        ("UNEVEN_BATCHSIZE", "8", ("UNEVEN_BATCHSIZE", "UNEVEN_BATCH_SIZE")),
    ],
)
def test_what_is_wrong_with_a_variable_is_said_with_its_name(variable: str, text: str, words: tuple[str, ...]) -> None:
    with pytest.raises(InputError) as raised:
        resolve_sources(environ={variable: text})
    assert all(word in str(raised.value) for word in words), raised.value


def test_the_other_variables_of_uneven_are_no_slips_of_settings() -> None:
    code = "".join(path.read_text() for path in sorted((ROOT / "uneven").rglob("*.py")))
    names = set(re.findall(r'"(UNEVEN_[A-Z_]+)"', code))
    assert {"UNEVEN_DATA", "UNEVEN_TOKEN"} <= names
    assert from_outside(resolve_sources(environ=dict.fromkeys(names, "1"))) == {}


def test_run_toml_is_found_beside_the_script_and_config_names_another(
    run_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script, other = tmp_path / "train.py", tmp_path / "long.toml"
    assert find_run_file(script) is None
    run_file.write_text('epochs = 3\npolicy = "async"\nseed = 1\n')
    other.write_text("epochs = 30\n")
    script.write_text("")
    seen: list[Any] = []
    monkeypatch.setattr("uneven.launch.script.run_script", lambda *order: seen.append(order[1]))
    monkeypatch.setenv("UNEVEN_SEED", "2")
    assert CliRunner().invoke(app, ["run", str(script), "--epochs", "4"]).exit_code == 0
    done = CliRunner().invoke(app, ["run", str(script), "--config", str(other)])
    assert seen == [{"epochs": 4, "policy": "async", "seed": 2}, {"epochs": 30, "seed": 2}]
    assert f"uneven: epochs=30 ({other}), seed=2 (environment UNEVEN_SEED)" in done.stderr


def test_the_file_reaches_the_ranks_in_place_of_the_scripts_own_settings(run_file: Path, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "import json, torch\nfrom torch import nn\nfrom uneven import Ddp, TensorData\n"
        "model = nn.Linear(2, 1)\n"
        "ddp = Ddp.setup(model, torch.optim.SGD(model.parameters(), lr=0.1), dataset=TensorData(torch.ones(8, 2)),"
        " batch_size=2, epochs=1)\n"
        "for _ in range(ddp.epochs):\n    for x in ddp:\n        ddp.step(ddp(x).mean())\n"
        "state = ddp.finish()\nprint(json.dumps(state.config))\n"
    )
    run_file.write_text(f'epochs = 2\nbatch_size = 4\ndevices = "cpu"\nout = "{tmp_path / "out"}"\n')
    done = run_forked([sys.executable, "-m", "uneven", "run", str(script)])
    assert done.returncode == 0, done.stderr
    config = json.loads(done.stdout.splitlines()[-1])
    assert (config["epochs"], config["batch_size"], config["out"]) == (2, 4, str(tmp_path / "out"))
