"""`uneven preflight` on one machine; tests/network has several."""

import json
import sys
from pathlib import Path

import pytest

from uneven.cli import main as command_line
from uneven.config.text import SKIPPABLE


def call(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["uneven", "preflight", *arguments])
    try:
        command_line.main()
    except SystemExit as ended:
        return ended.code if isinstance(ended.code, int) else 0
    return 0


@pytest.fixture
def script(tmp_path: Path) -> str:
    path = tmp_path / "train.py"
    path.write_text("import uneven\nimport model\n")
    (tmp_path / "model.py").write_text("")
    return str(path)


def test_this_machine_as_a_table_or_json(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], script: str
) -> None:
    assert call(monkeypatch, script, "--devices", "cpu,cpu@0.5") == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("  ")[0] for line in lines[:3]] == ["machine", "system", "python"]
    assert "code     train.py and 1 more" in lines
    assert lines[-1] == "All is well."
    assert call(monkeypatch, script, "--devices", "cpu", "--json") == 0
    (found,) = json.loads(capsys.readouterr().out)["machines"]
    assert list(found["code"]) == ["train.py", "model.py"]
    assert found["devices"][0]["device"] == "cpu"
    Path(script).with_name("run.toml").write_text('devices = "cpu,cpu@0.5"\n')  # as the run will read it
    assert call(monkeypatch, script, "--json") == 0
    (found,) = json.loads(capsys.readouterr().out)["machines"]
    assert [one["device"] for one in found["devices"]] == ["cpu", "cpu@0.5"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["missing.py"], "script 'missing.py': there is no such file"),
        (["--devices", "tpu"], "device 'tpu': allowed is cpu"),
        (["--skip", "model"], f"skip='model' must be one or more of {', '.join(SKIPPABLE)}"),
        (["--nodes", "2"], "preflight --nodes needs the script"),
        (["--bind", "127.0.0.1"], "--bind is for several machines"),
    ],
)
def test_bad_input_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: list[str], words: str
) -> None:
    assert call(monkeypatch, *arguments) == 2
    shown = capsys.readouterr()
    assert words in shown.err
    assert (shown.out, shown.err.count("\n")) == ("", 1)


def test_a_script_that_never_calls_uneven_is_refused_on_several_devices(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "plain.py").write_text("import torch\n")
    assert call(monkeypatch, str(tmp_path / "plain.py"), "--devices", "cpu,cpu") == 2
    assert "never imports uneven" in capsys.readouterr().err
