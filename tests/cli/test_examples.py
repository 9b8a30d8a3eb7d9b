"""Every example in the help of every verb is taken from the app itself, parsed by the verb's own parser, and run.

A line is run as main() runs it, in a folder with a small script, finished runs and files of the names that examples
use; options that make it small are added. What cannot be run here is in PARSED, with the reason; what takes seconds
runs as soak. A verb that is added is picked up; where its examples cannot be run as they are it needs a row below.
"""

import re
import shlex
import shutil
import sys
from collections.abc import Callable
from inspect import cleandoc
from pathlib import Path
from typing import Any

import pytest

from tests.bench.folders import make_run
from tests.cli.examples import COMMANDS, SCRIPT, Verb
from tests.results.checkpoints import write_checkpoint
from uneven.cli import main as command_line

ROOT = Path(__file__).parents[2]
# Lines that are parsed only: the beginning of the line, or a word anywhere in it, and why.
PARSED = {
    "srun ": "needs Slurm",
    "--nodes": "waits for a second machine",
    "--hosts": "starts other machines over ssh",
    "uneven join": "needs a leader on another machine; tests/launch/nodes/test_join.py has both ends",
    "UNEVEN_DATA=": "a download",
    "uneven data get cifar10": "a download",
    "cuda:": "needs GPUs",
    "cuda ": "needs GPUs",
    "-y": "installs",
    "uneven torch install": "asks the package index",
    "uneven torch activate": "changes this user's builds",
    "uneven torch remove": "changes this user's builds",
    "uneven torch build": "needs the sources of torch",
    "uneven stop": "would stop a run of this user",
    "uneven logs": "needs a run of this user",
    "uneven status last": "needs a run of this user",
    "uneven status k": "needs a run of this user",
    "uneven bench efficiency --model lenet --policy torch-ddp": "the first example measures the same way",
    "uneven bench strategies --nproc": "minutes",
    "uneven bench strategies --shares": "minutes",
    "uneven bench strategies --paired": "minutes",
    "uneven bench scaling --model gpt-nano": "a download",
    "uneven bench run --model resnet-graph": "a download",
}
# What is added to a line of this verb, so that it takes no longer than it must.
ADDED: dict[str, str] = {
    "run": "--devices cpu --epochs 1 --progress off",
    "demo": "--samples 64 --modes solo-0 --json",
    "devices --measure": "--seconds 0.1",
    "devices cpu,cpu@0.4 --measure": "--seconds 0.1",
    "chaos": "--devices cpu,cpu",
    "bench run": "--samples 64 --eval-samples 64 --epochs 1 --no-repeat",
    "bench efficiency": "--pairs 2 --most-pairs 2 --seconds 0.05",
    "bench sweep": "--dry-run --out sweep",
    "bench policies": "--devices cpu --policies sync --epochs 1",
    "bench scaling": "--samples 64 --repeats 1",
    "plan": "--seconds 2",
}
SOAK = (
    *("demo", "chaos", "devices --measure", "devices cpu,cpu@0.4 --measure", "bench run", "bench efficiency"),
    *("bench policies", "bench scaling", "bench strategies", "bench report runs --out", "plan", "simulate"),
)
# What the line ends with here, where that is not 0.
CODES = {"leave": (1,), "diagnose": (0, 3)}


def example_lines(command: Any) -> list[str]:
    """The examples of a command's help: what is typed, without the remark after three spaces."""
    found = []
    for text in (command.help or "", command.epilog or ""):
        for line in cleandoc(text).splitlines():
            words = re.sub(r"^.*Examples?: ", "", line.strip())
            if re.match(r"(srun |[A-Z_]+=\S+ )?uneven [a-z]", words) and not re.match(r"uneven [a-z]+[ ,:]*$", line):
                found += [part.strip() for part in re.split(r"\s{3,}", words)[0].split(" && ")]
    return found


LINES = {line: name for name, command in COMMANDS.items() for line in example_lines(command)}


def reason_not_to_run(line: str) -> str | None:
    for mark, reason in PARSED.items():
        if line.startswith(mark) or f" {mark}" in line:
            return reason
    return None


def verb_and_words(line: str) -> tuple[Verb, list[str]]:
    words = shlex.split(line[line.index("uneven ") :])[1:]
    verb: Verb = ()
    while words and (*verb, words[0]) in COMMANDS:
        verb = (*verb, words.pop(0))
    return verb, words


@pytest.mark.parametrize("name", COMMANDS, ids=" ".join)
def test_every_verb_has_an_example_and_one_that_is_run(name: Verb) -> None:
    lines = example_lines(COMMANDS[name])
    assert lines, f"the help of 'uneven {' '.join(name)}' has no example"
    cannot = {"join", "stop", "logs"} & set(name) or name[0] == "torch"
    assert cannot or any(reason_not_to_run(line) is None for line in lines), "no example of it is run"


@pytest.mark.parametrize("line", LINES)
def test_it_is_parsed(line: str) -> None:
    """By the verb's own parser: every option exists, every value has its type, no argument is missing."""
    verb, words = verb_and_words(line)
    assert verb, line
    COMMANDS[verb].make_context(verb[-1], words).close()


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("examples")
    (folder / "train.py").write_text(SCRIPT)
    (folder / "package").mkdir()
    (folder / "package" / "train.py").write_text(SCRIPT)
    (folder / "run.toml").write_text("epochs = 1\n")
    write_checkpoint(folder / "runs" / "my-run" / "step-500")
    for name in ("a", "b"):
        write_checkpoint(folder / "runs" / name / "step-500")
    write_checkpoint(folder / "runs" / "a" / "step-1000")
    for name in ("runs/before", "runs/after", "runs"):
        for mode in ("cpu-async", "cpu-cadence"):
            make_run(folder / name, "lenet", mode, 0, 0.97)
    return folder


@pytest.fixture
def call(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> Callable[[list[str]], tuple[int, str]]:
    shutil.copytree(home, tmp_path / "work")
    (tmp_path / "work" / "examples").symlink_to(ROOT / "examples")
    monkeypatch.chdir(tmp_path / "work")
    monkeypatch.setattr("uneven.launch.context._contexts", [])
    monkeypatch.setattr("uneven.launch.control.ask.live_runs", list)  # those of this user are none of our business
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setenv("UNEVEN_DATA", str(tmp_path / "data"))
    monkeypatch.setenv("UNEVEN_HOME", str(tmp_path / "home"))

    def run(words: list[str]) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", ["uneven", *words])
        try:
            command_line.main()
        except SystemExit as ended:
            return (ended.code if isinstance(ended.code, int) else 0), capfd.readouterr().err
        return 0, capfd.readouterr().err

    return run


def is_soak(line: str) -> bool:
    return any(line.startswith(f"uneven {verb}") for verb in SOAK)


RUN = [
    pytest.param(line, marks=[pytest.mark.soak] if is_soak(line) else [], id=line)
    for line in LINES
    if reason_not_to_run(line) is None
]


@pytest.mark.parametrize("line", RUN)
def test_it_runs(line: str, call: Callable[[list[str]], tuple[int, str]]) -> None:
    words = shlex.split(line)[1:]
    place = words.index("--") if "--" in words else len(words)
    verbs = sorted((verb for verb in ADDED if line.startswith(f"uneven {verb}")), key=len)
    words[place:place] = shlex.split(ADDED[verbs[-1]]) if verbs else []
    code, err = call(words)
    assert code in next((codes for verb, codes in CODES.items() if line.startswith(f"uneven {verb}")), (0,)), err
