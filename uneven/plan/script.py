"""A plan of a script: it runs up to its `fit`, its builder or its own loop, and what it was about to train is probed.

`plan_script` is `uneven plan`, in a process of its own. `uneven run --policy auto` has `choose_for_script` start such a
process (this module), since the script's ranks must not find what an earlier run of it has left in the interpreter.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from uneven.config import RunConfig, Task
from uneven.errors import STOPPED, InputError, MachineError, RankError
from uneven.launch.find_script import Script, uses_uneven
from uneven.launch.lifeline import LIFELINE, end_with_parent
from uneven.launch.results_file import stdout_to_stderr
from uneven.launch.script import check_script, visit_script
from uneven.plan.probe import NO_FILES, check_seconds, with_values

if TYPE_CHECKING:
    from uneven.plan.choose import Prober
    from uneven.plan.plan import Plan

END_S = 3.0  # for the process that plans, after Ctrl-C


def plan_script(script: Script, settings: Mapping[str, Any], seconds: float) -> "Plan":
    """The Plan of what the script was about to train, with these settings in place of its own; prints on stderr."""
    from uneven.launch.context import process_context
    from uneven.plan.choose import plan_for

    check_seconds(seconds)  # before the script does anything
    settings = {**settings, **NO_FILES}  # a plan has no folder of the run: checkpoints without one would be refused
    task, config = find_task(script, settings)
    devices = ",".join(str(device) for device in process_context().devices(config.devices))
    if task.is_own_loop and "," not in devices:
        raise InputError(
            f"{script} has a loop of its own, and {devices} is one device: there is nothing to choose; name "
            "several, as in --devices cuda:0,cpu"
        )
    config = with_values(config, devices=devices, out=None)
    plan, _ = plan_for(task, config, seconds, _prober(script, settings, task))
    return plan


def _prober(script: Script, settings: Mapping[str, Any], task: Task) -> "Prober | None":
    """The script itself measures a loop of its own."""
    if not task.is_own_loop:
        return None
    from uneven.plan.measure import probe_script

    own = {name: value for name, value in settings.items() if name not in ("policy", "devices")}
    return partial(probe_script, script, own)


def find_task(script: Script, settings: Mapping[str, Any]) -> tuple[Task, RunConfig]:
    """Run the script up to where it would train: what it was about to; InputError where it never does."""
    from uneven.launch.external.variables import read_launcher
    from uneven.launch.visitor import WRAPPED, RunVisitor

    check_script(script, settings)
    if read_launcher() is not None:
        raise InputError(
            "a plan probes the devices of one machine by processes of its own; start it without torchrun or srun"
        )
    if not uses_uneven(script):
        raise InputError(f"{script} never imports uneven to train with it: call fit or Ddp.setup in it")
    found = visit_script(script, settings, RunVisitor())
    if found == WRAPPED:
        raise InputError(
            f"{script} calls Ddp.wrap: a loop by hand cannot be planned, and a policy changes nothing in it; run it "
            "without policy auto"
        )
    if found is None:
        raise InputError(f"{script} ended without training: it calls neither fit nor Ddp.builder nor Ddp.setup")
    task, config = found
    return task, config


def choose_for_script(
    script: Script, settings: Mapping[str, Any]
) -> tuple[dict[str, Any], Mapping[str, Any] | None, list[str]]:
    """What `uneven run --policy auto` runs the script with: its settings, the plan, and lines to print."""
    check_script(script, settings)
    with tempfile.TemporaryDirectory(prefix="uneven-plan-") as folder:
        order, result = Path(folder) / "order.json", Path(folder) / "choice.json"
        plain = {name: list(value) if isinstance(value, tuple) else value for name, value in settings.items()}
        order.write_text(json.dumps({**script.to_json(), "settings": plain}, default=str))
        code = _run_child([sys.executable, "-m", "uneven.plan.script", str(order), str(result)])
        if code == STOPPED:
            raise KeyboardInterrupt
        if not result.exists():
            raise SystemExit(code or 1)  # it has said why
        choice = json.loads(result.read_text())
    return {**settings, **choice["settings"]}, choice["plan"], choice["notes"]


def _run_child(command: list[str]) -> int:
    """Its exit code; it ends with this process, whatever happens to that one."""
    child = subprocess.Popen(command, stdin=subprocess.PIPE, env={**os.environ, LIFELINE: "1"})
    try:
        return child.wait()
    except BaseException:
        child.send_signal(signal.SIGINT)
        try:
            child.wait(END_S)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()
        raise


def choose_here(script: Script, settings: Mapping[str, Any]) -> dict[str, Any]:
    """In the process that was started for it: the choice, as JSON."""
    from uneven.plan.choose import choose
    from uneven.plan.plan import PER_DEVICE

    with stdout_to_stderr():
        task, config = find_task(script, settings)
        choice = choose(task, with_values(config, policy="auto"), prober=_prober(script, settings, task))
    changed = {"policy": choice.config.policy, "devices": choice.config.devices}
    changed |= {name: getattr(choice.config, name) for name in PER_DEVICE if getattr(config, name) is not None}
    return {"settings": changed, "plan": choice.plan, "notes": list(choice.notes)}


def main() -> None:
    """`python -m uneven.plan.script ORDER RESULT`."""
    end_with_parent()
    order, result = Path(sys.argv[1]), Path(sys.argv[2])
    wanted = json.loads(order.read_text())
    try:
        choice = choose_here(Script.from_json(wanted), wanted["settings"])
    except (InputError, MachineError, RankError) as error:
        print(f"uneven: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        sys.exit(STOPPED)
    result.write_text(json.dumps(choice))


if __name__ == "__main__":
    main()
