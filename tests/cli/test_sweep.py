"""The verbs about many runs, as a user types them; what they compute is tested in tests/bench."""

from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from tests.bench.folders import make_run
from uneven.bench.orders import SweepOrder
from uneven.bench.single.process import Ended
from uneven.bench.sweep.plan import plan_sweep
from uneven.cli.main import app
from uneven.errors import InputError, RankError


def call(*words: object) -> Result:
    return CliRunner().invoke(app, ["bench", *map(str, words)])


def test_a_dry_run_lists_what_would_run_and_refuses_what_the_sweep_would(tmp_path: Path) -> None:
    (cell,), _ = plan_sweep(SweepOrder(models=("lenet",), modes=("solo-0",), seeds=1, out=tmp_path))
    make_run(tmp_path, "lenet", "solo-0", 0, 0.9, asked=cell.settings)
    words = ("sweep", "--models", "lenet", "--modes", "solo-0,cpu-async", "--seeds", 1, "--out", tmp_path, "--dry-run")
    done = call(*words)
    assert done.exit_code == 0, done.output
    assert done.output.splitlines() == ["kept  lenet solo-0 seed 0", "run   lenet cpu-async seed 0"]
    refused = call(*words, "--epochs", 7).exception
    assert isinstance(refused, InputError)
    assert "holds a run with epochs 5, this sweep has 7" in str(refused)


@pytest.mark.parametrize(
    ("words", "error", "message"),
    [
        (("sweep", "--models", "lenett", "--dry-run"), InputError, "unknown model"),
        (("report", "nowhere"), InputError, "there is no folder nowhere"),
        (("report", "nowhere", "--out", "report.pdf"), InputError, "a report is .md or .html"),
        (("check", "nowhere"), InputError, "there is no folder nowhere"),
        (("policies", "nowhere.py"), InputError, "there is no such file"),
        (("scaling", "--ranks", "two"), InputError, "must be numbers"),
        (("scaling", "--ranks", "2,4"), InputError, "with 1 among them"),
    ],
)
def test_what_is_wrong_is_told(words: tuple[object, ...], error: type[Exception], message: str) -> None:
    done = call(*words)
    assert isinstance(done.exception, error)
    assert message in str(done.exception)


def test_a_sweep_with_a_failed_run_ends_with_an_error_and_names_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended = Ended(3, "", "uneven: no space left")
    monkeypatch.setattr("uneven.bench.sweep.run.run_many", lambda commands, *_, **__: ((0, ended) for _ in commands))
    monkeypatch.setattr("uneven.bench.sweep.run.provide", lambda order, tell: None)
    done = call("sweep", "--models", "lenet", "--modes", "solo-0", "--seeds", 1, "--out", tmp_path)
    assert isinstance(done.exception, RankError)
    assert RankError.exit_code == 1
    assert "failed: lenet solo-0 seed 0: no space left" in done.output


def test_a_stopped_sweep_says_what_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(*_: object, **__: object) -> Iterator[tuple[int, Ended]]:
        raise KeyboardInterrupt

    monkeypatch.setattr("uneven.bench.sweep.run.run_many", stop)
    monkeypatch.setattr("uneven.bench.sweep.run.provide", lambda order, tell: None)
    done = call("sweep", "--models", "lenet", "--modes", "solo-0", "--seeds", 1, "--out", tmp_path)
    assert done.exit_code == 130
    assert f"stopped; finished runs are kept in {tmp_path}, the same command goes on" in done.output


def test_a_disturbed_run_of_a_sweep_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(commands: Iterable[list[str]], *_: object, **__: object) -> Iterator[tuple[int, Ended]]:
        for _ in commands:
            make_run(tmp_path, "lenet", "solo-0", 0, 0.9, is_disturbed=True)
            yield 0, Ended(0, "{}", "")

    monkeypatch.setattr("uneven.bench.sweep.run.run_many", run)
    monkeypatch.setattr("uneven.bench.sweep.run.provide", lambda order, tell: None)
    done = call("sweep", "--models", "lenet", "--modes", "solo-0", "--seeds", 1, "--out", tmp_path)
    assert done.exit_code == 0, done.output
    assert "disturbed by other programs, its speed is marked: lenet solo-0 seed 0" in done.output


@pytest.mark.parametrize(("code", "expected"), [(1, 1), (3, 1), (130, 130)])
def test_policies_end_as_their_runs_did(
    code: int, expected: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(arguments: list[str]) -> Ended:
        if code == 130:
            raise KeyboardInterrupt
        return Ended(code, "", "uneven: rank 1 failed")

    monkeypatch.setattr("uneven.bench.policies.run_uneven", run)
    (tmp_path / "train.py").write_text("import uneven")
    done = call("policies", tmp_path / "train.py", "--policies", "sync", "--out", tmp_path / "out")
    assert getattr(done.exception, "exit_code", done.exit_code) == expected


def test_policies_that_are_stopped_say_what_is_missing_and_print_no_empty_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(arguments: list[str]) -> Ended:
        if "sync" not in arguments:
            raise KeyboardInterrupt
        return Ended(1, "", "uneven: rank 1 failed")

    monkeypatch.setattr("uneven.bench.policies.run_uneven", run)
    (tmp_path / "train.py").write_text("import uneven")
    done = call("policies", tmp_path / "train.py", "--policies", "sync,cadence,async", "--out", tmp_path / "out")
    assert done.exit_code == 130
    assert done.stdout == ""
    assert done.stderr.splitlines()[-1] == "uneven: stopped; not finished: sync, cadence, async"
