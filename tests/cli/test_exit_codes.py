"""The exit code of every verb: 0 done, 1 failed, 2 bad input, 3 this machine cannot, 130 or 143 stopped.

All calls go through main(), as a user's do. First each kind of error in each verb, then real calls.
"""

import json
import re
import sys
from collections.abc import Callable
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

from tests.bench.folders import make_run
from tests.results.checkpoints import write_checkpoint
from uneven.cli import main as command_line
from uneven.cli.app import app
from uneven.cli.verbs import all_verbs
from uneven.errors import InputError, MachineError, RankError, Terminated

Call = Callable[..., tuple[int, str, str]]


def verbs_of(command: Any, before: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    """All that do something: `state` alone, which has sub-verbs, does not."""
    if not hasattr(command, "commands"):
        return [before]
    children = (verbs_of(child, (*before, name)) for name, child in command.commands.items())
    return [verb for found in children for verb in found]


VERBS = sorted(verbs_of(get_command(app)))


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Call:
    """Run the command line in an empty folder, on a machine without GPUs; (exit code, stdout, stderr)."""
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setitem(sys.modules, "pynvml", None)
    monkeypatch.setenv("PATH", "")
    monkeypatch.setenv("UNEVEN_DATA", str(tmp_path / "data"))
    monkeypatch.setenv("UNEVEN_HOME", str(tmp_path / "home"))
    monkeypatch.setattr("uneven.launch.context._contexts", [])
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.chdir(tmp_path)

    def run(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["uneven", *arguments])
        code: object = 0
        try:
            command_line.main()
        except SystemExit as ended:
            code = ended.code or 0
        out, err = capsys.readouterr()
        assert isinstance(code, int)
        return code, out, err

    return run


@pytest.mark.parametrize("verb", VERBS, ids=" ".join)
def test_every_error_of_every_verb_has_its_code(verb: tuple[str, ...], call: Call, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    replace = replacing(verb, monkeypatch)
    replace(_raising(MachineError("x")))
    assert call(*verb) == (3, "", "uneven: x\n")
    code, out, err = call(*verb, "--no-such-option")
    assert (code, out) == (2, "")
    assert "--no-such-option" in err
    if verb not in (("devices",), ("bench", "run")):  # all of them are met in one place: main()
        return
    for error, code in ((InputError("x"), 2), (RankError("x"), 1)):
        replace(_raising(error))
        assert call(*verb) == (code, "", "uneven: x\n")
    replace(_raising(KeyboardInterrupt()))
    assert call(*verb)[0] == 130
    replace(_raising(Terminated()))
    assert call(*verb)[0] == 143
    replace(lambda: None)
    assert call(*verb) == (0, "", "")


def replacing(verb: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], None]], None]:
    """Puts another function in the place of a verb's."""
    module, _, name = all_verbs()[verb[0]].place.partition(":")
    if len(verb) == 1:
        return lambda function: monkeypatch.setattr(import_module(module), name, function)
    commands = getattr(import_module(module), name).registered_commands
    (command,) = (command for command in commands if command.name == verb[1])
    return lambda function: monkeypatch.setattr(command, "callback", function)


def _raising(error: BaseException) -> Callable[[], None]:
    def fail() -> None:
        raise error

    return fail


@pytest.mark.parametrize("kind", ["EOFError", "BrokenPipeError"])
def test_an_error_of_the_script_that_typer_would_swallow_is_raised(kind: str, call: Call, tmp_path: Path) -> None:
    (tmp_path / "fails.py").write_text(f"import uneven\nraise {kind}(32, 'of the script')\n")
    with pytest.raises((EOFError, BrokenPipeError), match="of the script"):
        call("run", "--devices", "cpu", "fails.py")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Scripts and finished runs that the calls below name."""
    (tmp_path / "fine.py").write_text("print('fine')\n")
    (tmp_path / "stopped.py").write_text("raise KeyboardInterrupt\n")
    (tmp_path / "exits.py").write_text("raise SystemExit(7)\n")
    (tmp_path / "full.py").write_text("from uneven import MachineError\nraise MachineError('no space')\n")
    (tmp_path / "failed.py").write_text("from uneven import RankError\nraise RankError('rank 1 failed')\n")
    write_checkpoint(tmp_path / "saved" / "step-4")
    for seed in range(2):
        make_run(tmp_path / "good", "lenet", "solo-0", seed, 0.97)
        make_run(tmp_path / "bad", "lenet", "solo-0", seed, 0.97, epochs=5)  # less than was published
    return tmp_path


CALLS = [
    ("--version", 0),
    ("--help", 0),
    ("devices", 0),
    ("devices --json", 0),
    ("devices tpu", 2),
    ("devices tpu --json", 2),
    ("data list", 0),
    ("data get mnist-mini --json", 0),
    ("data get minst", 2),
    ("run --devices cpu fine.py", 0),
    ("run --devices cpu failed.py", 1),
    ("run --devices cpu exits.py", 7),
    ("run absent.py", 2),
    ("run fine.py --policy fast", 2),
    ("run fine.py --epochs many", 2),
    ("run fine.py --shares 5;2", 2),
    ("plan absent.py", 2),
    ("plan fine.py --json", 2),
    ("plan fine.py --policy sync", 2),
    ("plan fine.py --seconds many", 2),
    ("run --devices cpu full.py", 3),
    ("run --devices cpu stopped.py", 130),
    ("chaos fine.py", 2),
    ("chaos fine.py --kill 5", 2),
    ("chaos fine.py --kill 1/min --seed -1", 2),
    ("chaos fine.py --at 3s:kill:2 --devices cpu,cpu --json", 2),
    ("chaos fine.py --kill 1/min --devices cpu", 2),
    ("chaos fine.py --kill 1/min --policy fast", 2),
    ("chaos absent.py --kill 1/min --devices cpu,cpu", 2),
    ("demo --devices cpu", 2),
    ("state show saved", 0),
    ("state show saved --json", 0),
    ("state show good", 2),
    ("state diff saved saved --json", 0),
    ("state diff saved absent", 2),
    ("state export saved --to model.pt --json", 0),
    ("state export saved --to model.bin", 2),
    ("state export saved --to /proc/nowhere/model.pt", 3),
    ("torch list --json", 0),
    ("torch install gpu", 2),
    ("torch install cu126 --dry-run --json", 0),
    ("torch activate", 2),
    ("torch activate --none --json", 0),
    ("torch remove absent -y", 2),
    ("torch build --archs 6.1;12.0 --dry-run --json", 0),
    ("torch build --archs Pascal", 2),
    ("torch build --archs 6.1;12.0", 3),
    ("bench list", 0),
    ("bench list --json", 0),
    ("bench run --model none", 2),
    ("bench run --model logistic --data mnist", 3),
    ("bench run --model logistic --data mnist-mini --out /proc/nowhere", 3),
    ("bench efficiency --model lenet --devices cpu", 2),
    ("bench sweep --models lenet --modes solo-0 --seeds 1 --dry-run", 0),
    ("bench sweep --models none --dry-run", 2),
    ("bench report good", 0),
    ("bench report absent", 2),
    ("bench report good --out /proc/nowhere/report.md", 3),
    ("bench check good", 0),
    ("bench check absent", 2),
    ("bench policies absent.py", 2),
    ("bench scaling --model none", 2),
    ("bench strategies --only none", 2),
    ("setup --dry-run --json", 0),
    ("setup --dry-run --build none", 2),
]


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize(("line", "code"), CALLS, ids=[line for line, _ in CALLS])
def test_real_calls(line: str, code: int, call: Call) -> None:
    found, out, err = call(*line.split())
    assert found == code, err
    assert "Traceback" not in err
    if code in (1, 2, 3):
        assert out == ""
        assert err
    if code in (1, 3):
        assert err.splitlines()[-1].startswith("uneven: ")
    if "--json" in line and code == 0:
        json.loads(out)


def test_a_gate_that_fails_is_1_with_its_json_and_a_message(call: Call, folder: Path) -> None:
    code, out, err = call("bench", "check", "bad", "--json")
    assert code == 1
    assert json.loads(out)["faults"]
    assert err.startswith("uneven: does not hold")


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize("line", ["devices --measure", "run fine.py", "bench run --model logistic --data mnist-mini"])
def test_a_torch_that_is_too_old_is_a_machine_that_cannot(
    line: str, call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("uneven.hardware.preflight.installed_version", lambda: "2.5.0")
    code, out, err = call(*line.split())
    assert (code, out) == (3, "")
    assert err.startswith("uneven: torch 2.5.0 is too old")


@pytest.mark.usefixtures("folder")
def test_a_rank_whose_machine_cannot_is_3_too(call: Call) -> None:
    code, _, err = call("run", "--devices", "cpu,cpu", "full.py")
    assert code == 3, err
    last = err.splitlines()[-1]
    assert last.startswith("uneven: rank ")
    assert last.endswith(": no space")


def test_another_exception_of_the_script_keeps_its_traceback(call: Call, folder: Path) -> None:
    """Python itself then exits with 1."""
    (folder / "broken.py").write_text("1 / 0\n")
    with pytest.raises(ZeroDivisionError):
        call("run", "--devices", "cpu", "broken.py")


@pytest.mark.parametrize("line", ["--help", "--version", "devices", "devices --json", "bench list", "status --all"])
def test_a_full_disk_behind_the_output_is_a_machine_that_cannot(
    line: str, call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    with suppress(OSError), open("/dev/full", "w", buffering=1) as full:
        monkeypatch.setattr(sys, "stdout", full)
        code, _, err = call(*line.split())
    assert sys.stdout is not full, "nothing is left for the end of Python to flush"
    assert (code, err) == (3, "uneven: output: No space left on device\n")


@pytest.mark.parametrize("line", ["run {}.py", "plan {}.py", "bench report {}"])
def test_a_name_that_is_too_long_is_one_short_line(line: str, call: Call) -> None:
    code, out, err = call(*line.format("x" * 5000).split())
    assert (code, out) == (2, "")
    assert err.endswith(": File name too long\n")
    assert len(err) < 200


def test_a_disk_that_a_script_finds_full_keeps_the_traceback(call: Call, folder: Path) -> None:
    # By its descriptor: from Python 3.13 on a file object that cannot be flushed complains once more when it goes.
    (folder / "writes.py").write_text("import os\nos.write(os.open('/dev/full', os.O_WRONLY), b'x')\n")
    with pytest.raises(OSError, match="No space left"):
        call("run", "--devices", "cpu", "writes.py")


def test_the_codes_are_documented() -> None:
    page = (Path(__file__).parents[2] / "docs" / "cli.md").read_text()
    assert re.findall(r"^\| (\d+) \|", page, flags=re.MULTILINE) == ["0", "1", "2", "3", "130", "143"]
    assert all(f" {code} " in command_line.EXIT_CODES for code in (0, 1, 2, 3, 130, 143))
