"""`uneven demo`: what it prints and its exit codes; one tiny real run, the whole one under -m soak."""

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.bench.demo_results import SPEEDS, summary
from tests.cli.documents import check_document
from uneven.bench import demo
from uneven.bench.orders import DemoOrder
from uneven.bench.single.folders import Summary
from uneven.cli.main import main
from uneven.comm import gloo
from uneven.errors import MachineError, RankError


def fake_train(order: DemoOrder, mode: str, limit_s: float, **changes: Any) -> Summary:
    speed = {**SPEEDS, "cpu-cadence": 3380.0}[mode]
    return summary(mode, speed, quality={"accuracy": 0.9712}, **changes)


@pytest.fixture
def uneven(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path):  # type: ignore[no-untyped-def]
    """Run the command line at 80 columns, training nothing; (exit code, stdout, stderr).

    In a folder of its own: in the checkout the page of a demo that was really run was replaced by these figures."""
    monkeypatch.chdir(tmp_path)
    for name, value in (("COLUMNS", "80"), ("OMP_NUM_THREADS", "1"), ("MKL_NUM_THREADS", "1")):
        monkeypatch.setenv(name, value)  # the last two the demo sets itself; so they are set back afterwards
    monkeypatch.setattr(demo, "_train", fake_train)

    def run(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["uneven", "demo", *arguments])
        code: Any = 0
        try:
            main()
        except SystemExit as ended:
            code = ended.code
        out, err = capsys.readouterr()
        return code or 0, out, err

    return run


def test_the_table_the_sentence_and_where_everything_is(uneven) -> None:  # type: ignore[no-untyped-def]
    code, out, err = uneven("--out", "some/where")
    assert code == 0
    lines = [" ".join(line.split()) for line in out.splitlines()]
    assert lines[0] == "mode accuracy time speed-up efficiency share cpu : cpu@0.4"
    assert "solo-1 97.12 % 30.0 s 0.40x ~29 % 0 : 100 %" in lines
    assert "torch-ddp 97.12 % 15.6 s 0.77x ~55 % 72 : 28 %" in lines
    assert "cpu-async 97.12 % 8.7 s 1.37x ~98 % 72 : 28 %" in lines
    assert any("cpu-async gave 3,430 of the 3,500 samples/s that you own (98 %)" in line for line in lines)
    assert lines[-2] == "trained states, metrics and timelines: some/where"
    table = out[: out.index("cpu-async gave")]
    assert all(len(line) <= 80 for line in table.splitlines())
    assert err.splitlines()[0] == "LeNet on the digits inside the package, 7 modes on cpu,cpu@0.4"
    assert err.splitlines()[-1] == "7/7 cpu-sync: 97.12 % right, 15.4 s of training"


def test_disturbed_figures_are_marked_and_nothing_is_concluded_from_them(  # type: ignore[no-untyped-def]
    uneven, monkeypatch: pytest.MonkeyPatch
) -> None:
    def train(order: DemoOrder, mode: str, limit_s: float) -> Summary:
        found = {"stolen_share": 0.27, "foreign_share": 0.0}
        return fake_train(order, mode, limit_s, is_disturbed=mode in ("torch-ddp", "solo-1"), interference=found)

    monkeypatch.setattr(demo, "_train", train)
    code, out, err = uneven("--modes", "solo-0,torch-ddp,cpu-async")
    assert code == 0
    assert "15.6 s*" in out
    assert "* disturbed: other programs" in out
    assert "disturbed torch-ddp" in out
    assert "2/3 torch-ddp was disturbed by other programs: measured again" in err
    code, out, _ = uneven()
    assert code == 0
    assert "1.37x*" in out, "what is divided by a disturbed figure is disturbed"
    assert "samples/s that you own" not in out
    found = json.loads(uneven("--json")[1])
    check_document("demo", found)
    assert found["sentence"].startswith("No verdict")
    assert found["disturbed"] == ["solo-1", "torch-ddp"]
    assert [row["is_disturbed"] for row in found["modes"]] == [False, True, True, False, False, False, False]


def test_without_the_solos_nothing_is_compared(uneven) -> None:  # type: ignore[no-untyped-def]
    code, out, _ = uneven("--modes", "solo-0, cpu-async")
    assert code == 0
    assert "how fast each device is alone is not known" in out
    assert "speed-up" not in out


def test_ctrl_c_shows_what_is_finished_and_exits_with_130(  # type: ignore[no-untyped-def]
    uneven, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def train(order: DemoOrder, mode: str, limit_s: float) -> Summary:
        if mode == "torch-ddp":
            raise KeyboardInterrupt
        return fake_train(order, mode, limit_s)

    monkeypatch.setattr(demo, "_train", train)
    code, out, err = uneven("--out", str(tmp_path), "--modes", "solo-0,solo-1,torch-ddp,cpu-async")
    assert code == 130
    assert "solo-1" in out
    assert "Not measured: torch-ddp (the demo was ended before)" in out
    assert "Not measured: cpu-async" in out
    assert "Traceback" not in err


def test_ctrl_c_after_the_last_mode_loses_nothing(uneven, monkeypatch: pytest.MonkeyPatch) -> None:  # type: ignore[no-untyped-def]
    train_modes = demo.train_modes

    def interrupted(*given: Any) -> None:
        train_modes(*given)
        raise KeyboardInterrupt

    monkeypatch.setattr(demo, "train_modes", interrupted)
    code, out, _ = uneven("--modes", "cpu-async")
    assert code == 130
    assert "cpu-async" in out
    assert "Not measured" not in out


def test_ctrl_c_leaves_one_json_object_too(uneven, monkeypatch: pytest.MonkeyPatch) -> None:  # type: ignore[no-untyped-def]
    def train(order: DemoOrder, mode: str, limit_s: float) -> Summary:
        raise KeyboardInterrupt

    monkeypatch.setattr(demo, "_train", train)
    code, out, err = uneven("--json", "--modes", "solo-0")
    assert (code, err) == (130, "")
    found = json.loads(out)
    check_document("demo", found)
    assert found["interrupted"]
    assert found["missing"] == ["solo-0"]


def test_a_failed_mode_does_not_take_the_others_along(uneven, monkeypatch: pytest.MonkeyPatch) -> None:  # type: ignore[no-untyped-def]
    def train(order: DemoOrder, mode: str, limit_s: float) -> Summary:
        if mode == "torch-ddp":
            raise RankError("rank 1 (cpu@0.4 on here) was killed")
        return fake_train(order, mode, limit_s)

    monkeypatch.setattr(demo, "_train", train)
    code, out, err = uneven()
    assert code == 1
    assert "cpu-async gave 3,430" in out
    assert err.splitlines()[-1] == "uneven: torch-ddp: rank 1 (cpu@0.4 on here) was killed"


def test_a_full_disk_ends_it_with_the_table_of_what_is_there(uneven, monkeypatch: pytest.MonkeyPatch) -> None:  # type: ignore[no-untyped-def]
    def train(order: DemoOrder, mode: str, limit_s: float) -> Summary:
        if mode == "solo-1":
            raise MachineError("cannot write to there: no space left")
        return fake_train(order, mode, limit_s)

    monkeypatch.setattr(demo, "_train", train)
    code, out, err = uneven()
    assert code == 3
    assert "solo-0" in out
    assert err.splitlines()[-1] == "uneven: cannot write to there: no space left"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--devices", "cpu"), ("'cpu'", "at least two", "uneven bench run")),
        (("--samples", "0"), ("--samples",)),
        (("--device", "cpu"), ("--devices",)),
    ],
)
def test_wrong_input_is_refused_with_exit_code_two(uneven, arguments: tuple[str, ...], words: tuple[str, ...]) -> None:  # type: ignore[no-untyped-def]
    code, out, err = uneven(*arguments)
    assert (code, out) == (2, "")
    assert "Traceback" not in err
    assert all(word in err for word in words), err


def test_help_names_the_options_and_an_example(uneven) -> None:  # type: ignore[no-untyped-def]
    code, out, _ = uneven("--help")
    assert code == 0
    for word in ("--devices", "--modes", "--samples", "--minutes", "--out", "--json"):
        assert word in out


def _really(*arguments: str, cwd: Path) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "uneven", "demo", *arguments]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=230, check=False)


def test_a_tiny_real_demo_is_one_json_object_and_nothing_else(tmp_path: Path) -> None:
    done = _really("--samples", "640", "--modes", "solo-0,cpu-async", "--json", cwd=tmp_path)
    assert done.returncode == 0
    assert done.stderr == "" or gloo.WRITES
    found = json.loads(done.stdout)
    solo, joint = found["modes"]
    assert (solo["mode"], joint["mode"]) == ("solo-0", "cpu-async")
    assert solo["shares"] == [1.0, 0.0]
    assert sum(joint["shares"]) == pytest.approx(1)
    assert all(row["seconds"] > 0 and row["speedup"] is None for row in found["modes"])
    assert not found["interrupted"]
    assert (tmp_path / "runs" / "demo" / "lenet" / "cpu-async" / "seed-0" / "summary.json").exists()


@pytest.mark.soak
def test_the_whole_demo_is_done_in_three_minutes_and_is_worth_it(tmp_path: Path) -> None:
    """On two cores with nothing else to do."""
    began = time.monotonic()
    done = _really("--json", cwd=tmp_path)
    assert done.returncode == 0
    assert done.stderr == "" or gloo.WRITES
    assert time.monotonic() - began < 180
    found = json.loads(done.stdout)
    rows = {row["mode"]: row for row in found["modes"]}
    assert len(rows) == 7
    assert all(row["accuracy"] > 0.9 for row in rows.values())
    assert found["sentence"].startswith("cpu-async gave ")
    for mode in ("cpu-balanced", "cpu-cadence", "cpu-async"):
        assert rows[mode]["speedup"] > 1.0 > rows["torch-ddp"]["speedup"], mode
