"""Steps that survive an interruption: what is done stays done, what failed is told with its log."""

import os
import signal
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from uneven.errors import Terminated
from uneven.install import steps as machinery
from uneven.install.steps import Step, StepError, done_steps, run_steps


def shell(name: str, script: str, **environment: str) -> Step:
    return Step(name, ("sh", "-c", script), environment)


class Work:
    """A folder with state and log; `done` are the names that the steps have written there."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.state, self.log = folder, folder / "state.json", folder / "build.log"
        self.said: list[str] = []

    def step(self, name: str, more: str = "true") -> Step:
        return shell(name, f"echo {name} >> {self.folder}/done; {more}")

    def run(self, *steps: Step) -> None:
        run_steps(steps, self.state, self.log, self.said.append)

    @property
    def done(self) -> list[str]:
        return (self.folder / "done").read_text().split()


@pytest.fixture
def work(tmp_path: Path) -> Work:
    return Work(tmp_path)


def test_a_failed_step_is_told_and_the_next_call_begins_with_it(work: Work) -> None:
    broken = work.step("two", f"echo the reason; test -e {work.folder}/mended")
    plan = (work.step("one"), broken, work.step("three"))
    with pytest.raises(StepError, match=r"(?s)step 'two' failed with exit code 1.*build.log.*the reason"):
        work.run(*plan)
    assert work.done == ["one", "two"]
    assert done_steps(plan, work.state) == 1
    (work.folder / "mended").touch()
    work.run(*plan)
    assert work.done == ["one", "two", "two", "three"]
    assert "goes on after 1 of 3 steps" in work.said
    assert work.said[-1].startswith("step 3 of 3: three done")
    work.run(*plan)
    assert work.done == ["one", "two", "two", "three"]
    log = work.log.read_text()
    assert log.count("$ sh -c") == 4  # every call is in the one log
    assert "the reason" in log


def test_a_step_that_changed_and_all_after_it_run_again(work: Work) -> None:
    work.run(work.step("one"), work.step("two"), work.step("three"))
    work.run(work.step("one"), work.step("changed"), work.step("three"))
    assert work.done == ["one", "two", "three", "changed", "three"]


def test_how_many_jobs_changes_no_result(work: Work) -> None:
    few = Step("wheel", ("true",), {"MAX_JOBS": "2", "ARCHS": "6.1"})
    many = Step("wheel", ("true",), {"MAX_JOBS": "8", "ARCHS": "6.1"})
    work.run(few)
    assert done_steps([many], work.state) == 1
    assert done_steps([Step("wheel", ("true",), {"MAX_JOBS": "2", "ARCHS": "7.0"})], work.state) == 0


def test_environment_and_path_reach_the_command_and_are_shown_as_typed(work: Work) -> None:
    (work.folder / "bin").mkdir()
    (work.folder / "bin" / "tool").write_text('#!/bin/sh\necho "archs $ARCHS"\n')
    (work.folder / "bin" / "tool").chmod(0o755)
    step = Step("wheel", ("tool", "a b"), {"ARCHS": "6.1;12.0"}, (str(work.folder / "bin"),))
    work.run(step)
    assert "archs 6.1;12.0" in work.log.read_text()
    assert step.line == f"PATH={work.folder}/bin:$PATH ARCHS='6.1;12.0' tool 'a b'"


def test_a_command_that_is_not_there_and_one_that_was_killed(work: Work) -> None:
    with pytest.raises(StepError, match="exit code 127"):
        work.run(Step("git", ("no-such-command-here",)))
    with pytest.raises(StepError, match=r"ended by signal 9.*out of memory"):
        work.run(shell("wheel", "kill -KILL $$"))


def test_a_long_step_tells_where_it_is(work: Work, monkeypatch: pytest.MonkeyPatch) -> None:
    """The step ends when its line has been told, so that no time is assumed."""
    monkeypatch.setattr(machinery, "_TELL_EVERY", 0.02)

    def say(line: str) -> None:
        work.said.append(line)
        if "[17/7000]" in line:
            (work.folder / "told").touch()

    step = shell("wheel", f"echo '[17/7000] nvcc'; while ! test -e {work.folder}/told; do sleep 0.01; done")
    run_steps([step], work.state, work.log, say)
    assert any(line.startswith("  wheel, 0 s: [17/7000]") for line in work.said)


@pytest.mark.parametrize(("number", "raised"), [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, Terminated)])
def test_stopped_it_ends_its_children_and_goes_on_later(
    work: Work, number: int, raised: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machinery, "_TELL_EVERY", 0.02)
    pid = work.folder / "pid"
    waits = shell("two", f"(trap '' TERM; exec sleep 600) & echo $! > {pid}.new; mv {pid}.new {pid}; wait")

    def say(line: str) -> None:
        if pid.exists():
            os.kill(os.getpid(), number)

    with pytest.raises(raised):
        run_steps([work.step("one"), waits], work.state, work.log, say)
    assert done_steps([work.step("one"), waits], work.state) == 1
    with suppress(psutil.NoSuchProcess):
        psutil.Process(int(pid.read_text())).wait(60)  # it ignores SIGTERM, and is ended none the less
