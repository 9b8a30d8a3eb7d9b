"""`uneven devices` through main(), as for a user: output, exit code, one line of error."""

import json
import subprocess
import sys

import pytest

from tests.cli.documents import check_document
from tests.hardware.fakes import make_pynvml
from uneven.cli.main import main


@pytest.fixture
def uneven(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):  # type: ignore[no-untyped-def]
    """Run the command line at 80 columns on a machine without GPUs; (exit code, stdout, stderr)."""
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setitem(sys.modules, "pynvml", None)
    monkeypatch.setenv("PATH", "")

    def run(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["uneven", *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
        out, err = capsys.readouterr()
        code = ended.value.code
        return code if isinstance(code, int) else 0, out, err

    return run


@pytest.fixture
def fake_speeds(monkeypatch: pytest.MonkeyPatch):  # type: ignore[no-untyped-def]
    """Replace the measuring itself by a table of speeds."""

    def put(*speeds: float) -> None:
        def measure(devices, seconds, is_shown):  # type: ignore[no-untyped-def]
            assert (len(devices), seconds, is_shown) == (len(speeds), 5.0, False)
            return list(speeds)

        monkeypatch.setattr("uneven.cli.devices._measure", measure)

    return put


def test_the_list_fits_eighty_columns(uneven) -> None:  # type: ignore[no-untyped-def]
    code, out, err = uneven("devices")
    assert (code, err) == (0, "")
    assert "cpu" in out
    assert "GiB" in out
    assert all(len(line) <= 80 for line in out.splitlines())


def test_json(uneven) -> None:  # type: ignore[no-untyped-def]
    code, out, err = uneven("devices", "cpu,cpu@0.4", "--json")
    found = json.loads(out)
    assert (code, err) == (0, "")
    assert [row["device"] for row in found["devices"]] == ["cpu", "cpu@0.4"]
    assert "measured" not in found


def test_more_ranks_than_cores_give_a_note(uneven, monkeypatch: pytest.MonkeyPatch) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setattr("uneven.cli.devices.available_cores", lambda: (0, 1))
    code, out, _ = uneven("devices", "cpu,cpu,cpu")
    assert code == 0
    assert "speeds mean nothing" in " ".join(out.split())


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["gpu"], ["'gpu'", "allowed is cpu, cuda", "uneven devices"]),
        ([""], ["''", "allowed is cpu, cuda", "uneven devices"]),
        (["cpu,,cpu"], ["'cpu,,cpu'", "allowed is cpu, cuda", "uneven devices"]),
        (["cpu@1.5"], ["'cpu@1.5'", "at most 1", "uneven devices"]),
        (["cuda:9"], ["'cuda:9'", "this machine has cpu", "uneven devices"]),
        (["cpu", "--measure", "--seconds", "0"], ["--seconds 0", "0.1 to 600", "uneven devices --measure"]),
    ],
)
def test_wrong_input_is_one_line_and_exit_code_two(uneven, arguments: list[str], parts: list[str]) -> None:  # type: ignore[no-untyped-def]
    torch = pytest.importorskip("torch")
    if arguments == ["cuda:9"] and torch.cuda.is_available():
        pytest.skip("the sentence is another one where CUDA is there")
    code, out, err = uneven("devices", *arguments)
    assert (code, out) == (2, "")
    assert err.startswith("uneven: ")
    assert err.count("\n") == 1
    for part in parts:
        assert part in err


def test_measured_speeds_become_a_sentence(uneven, fake_speeds) -> None:  # type: ignore[no-untyped-def]
    fake_speeds(2500.0, 1000.0)
    code, out, err = uneven("devices", "cpu,cpu@0.4", "--measure")
    text = " ".join(out.split())
    assert (code, err) == (0, "")
    assert "2,500" in text
    assert "Measured gap (fastest / slowest): 2.50" in text
    assert "not exact" in text
    assert (
        "Equal-batch DDP could reach at most 57 % of what you own (0.80x your fast device); "
        "everything together is 1.40x your fast device." in text
    )
    assert all(len(line) <= 80 for line in out.splitlines())


def test_one_device_has_nothing_to_share(uneven, fake_speeds) -> None:  # type: ignore[no-untyped-def]
    fake_speeds(2500.0)
    code, out, _ = uneven("devices", "--measure")
    assert code == 0
    assert "nothing to share" in out
    assert "uneven devices cpu,cpu@0.4 --measure" in out
    assert "DDP" not in out


def test_real_devices_side_by_side(uneven, monkeypatch: pytest.MonkeyPatch) -> None:  # type: ignore[no-untyped-def]
    pytest.importorskip("torch")
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    code, out, err = uneven("devices", "cpu,cpu@0.4", "--measure", "--seconds", "1", "--json")
    assert (code, err) == (0, "")
    found = json.loads(out)
    check_document("devices", found)
    for row in found["devices"]:
        assert row["samples_per_s"] > 0
    fast, slow = (row["samples_per_s"] for row in found["devices"])
    assert found["measured"]["gap"] == pytest.approx(max(fast, slow) / min(fast, slow))


def test_gpus_that_torch_cannot_use_are_listed_with_the_fix(  # type: ignore[no-untyped-def]
    uneven, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", make_pynvml())
    monkeypatch.setitem(sys.modules, "torch", None)
    code, out, _ = uneven("devices")
    text = " ".join(out.split())
    assert code == 0
    for part in ("cuda:0", "sm_120", "16.0 GiB", "cuda:1", "sm_61", "6.0 GiB"):
        assert part in text
    assert "cuda:1 cannot be used: torch is not installed; run 'uneven diagnose'" in text


def test_measuring_without_torch_names_the_command(uneven, monkeypatch: pytest.MonkeyPatch) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setitem(sys.modules, "torch", None)
    code, out, err = uneven("devices", "cpu", "--measure")
    assert (code, out) == (3, "")
    assert "torch is not installed" in err
    assert "`uneven setup` chooses and installs the build" in err


def test_three_devices_in_the_verdict(uneven, fake_speeds, monkeypatch: pytest.MonkeyPatch) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setattr("uneven.cli.devices.available_cores", lambda: (0, 1, 2))
    fake_speeds(3.0, 1.0, 1.0)
    _, out, _ = uneven("devices", "cpu,cpu@0.4,cpu@0.4", "--measure")
    text = " ".join(out.split())
    assert "at most 60 %" in text
    assert "(1.00x your fast device)" in text


def test_help_and_hardware_import_no_torch() -> None:
    code = """
import importlib, pkgutil, sys
import uneven.cli.main, uneven.hardware
for module in pkgutil.iter_modules(uneven.hardware.__path__):
    importlib.import_module(f"uneven.hardware.{module.name}")
heavy = {"torch", "numpy", "psutil", "pynvml"} & set(sys.modules)
assert not heavy, heavy
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=150, check=False)
    assert done.returncode == 0, done.stderr
