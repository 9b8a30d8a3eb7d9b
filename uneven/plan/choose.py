"""policy="auto": which policy and devices a run takes. Called by api/ for every run, before anything starts.

A run that is resumed or replayed takes what its folder has recorded, and nothing is measured again. A fresh plan in the
run's folder is taken, too. Otherwise the devices are probed. Where ranks are running already nothing can be probed, and
the rule is `balanced`: exact, and samples follow the speeds.
"""

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from uneven.config import RunConfig, Task
from uneven.errors import InputError
from uneven.launch.context import process_context
from uneven.launch.predicted import take_handed
from uneven.plan.advise import DISTURBED
from uneven.plan.plan import PER_DEVICE, SECONDS, Plan, asked_for, chosen_config, plan_from, read_plan, restored
from uneven.plan.probe import Probe, allowed_policies, with_values
from uneven.results.checkpoint_folders import find_checkpoints
from uneven.results.record import read_record

AUTO = "auto"
Prober = Callable[[Task, RunConfig, float, Callable[[str], None]], Probe]  # as `probe` in plan/measure.py


@dataclass(frozen=True)
class Choice:
    """The settings of a run, the plan that they follow where there is one, and lines to print."""

    config: RunConfig
    plan: Mapping[str, Any] | None = None
    notes: tuple[str, ...] = ()


def choose(task: Task, config: RunConfig, prober: Prober | None = None) -> Choice:
    """What this run takes for policy='auto'; settings without it stay as they are."""
    context = process_context()
    context.visitor.see_run(task, config)
    handed = take_handed()
    if config.policy != AUTO:
        return Choice(config, handed or _plan_beside(config))
    if not context.is_alone:
        why = f"the ranks of {context.environment.launcher} are running already, and cannot be probed first"
        hint = "; 'uneven run --policy auto' probes before it starts them" if context.environment.launcher else ""
        return _by_rule(config, f"{why}{hint}")
    if (known := recorded(config)) is not None:
        return known
    devices = context.devices(config.devices)
    if task.is_own_loop and config.devices == AUTO:
        devices = devices[:1]
    if len(devices) == 1:
        return Choice(_with_policy(config))
    named = with_values(config, devices=",".join(str(device) for device in devices))
    try:
        plan, is_found = plan_for(task, named, SECONDS, prober)
    except InputError as error:
        if not _is_unmeasurable(task, config):
            raise
        return _by_rule(config, str(error).split(":")[0])
    return Choice(chosen_config(config, plan), plan.to_json(), (describe_choice(plan, is_found),))


def plan_for(task: Task, config: RunConfig, seconds: float, prober: Prober | None = None) -> tuple[Plan, bool]:
    """A fresh plan of the same in the run's folder (True), or one that is made now."""
    asked = asked_for(config)
    found = read_plan(config.out, asked)
    plan = None if found is None else restored(found)
    if plan is not None:
        return plan, True
    from uneven.plan.measure import probe  # loads what only ranks need

    def tell(line: str) -> None:
        if config.progress != "off":
            print(f"uneven: {line}", file=sys.stderr, flush=True)

    return plan_from((prober or probe)(task, config, seconds, tell), asked), False


def describe_choice(plan: Plan, is_found: bool = False) -> str:
    """The one line about it."""
    advice, where = plan.advice, " (from its plan.json)" if is_found else ""
    what = "one device" if advice.is_one_device else advice.policy
    note = f"; {DISTURBED}" if plan.probe.is_disturbed else ""
    return f"  policy auto -> {what} on {','.join(advice.devices)}{where}: {advice.reason}{note}"


def _with_policy(config: RunConfig) -> RunConfig:
    allowed = allowed_policies(config)
    return with_values(config, policy="balanced" if "balanced" in allowed else allowed[0])


def _by_rule(config: RunConfig, why: str) -> Choice:
    chosen = _with_policy(config)
    return Choice(chosen, None, (f"  policy auto -> {chosen.policy}, by rule: {why}",))


def _is_unmeasurable(task: Task, config: RunConfig) -> bool:
    """Whether no plan can be made of it, whatever the devices: a stream without length, or a sharded model."""
    return not config.is_replicated or not hasattr(task.dataset, "__len__")


def _plan_beside(config: RunConfig) -> Mapping[str, Any] | None:
    """The plan in the run's folder, where it predicted this very policy and devices: the run is compared with it."""
    found = read_plan(config.out)
    if found is None or config.resume is not None or config.replay is not None:
        return None
    plan = restored(found)
    devices = config.devices if config.devices != AUTO else ",".join(() if plan is None else plan.probe.devices)
    chosen = None if plan is None else plan.prediction(config.policy, devices.split(","))
    return None if plan is None or chosen is None else plan.to_json(chosen)


def recorded(config: RunConfig) -> Choice | None:
    """What the run that is resumed or replayed had; None for a new run."""
    run = config.replay or (config.out if config.resumes_newest else config.resume)
    if run is None:
        return None
    record = _record_of(run)
    if record is None:
        return None
    policy = record["config"]["policy"]
    plan = next((found for folder in (run, run.parent) if (found := read_plan(folder)) is not None), None)
    is_same = plan is not None and plan["asked"].get("devices") in (config.devices, record["config"]["devices"])
    devices = record["config"]["devices"] if is_same or config.devices == AUTO else config.devices
    chosen = with_values(config, policy=policy, devices=devices, **_per_device(config, record["config"], devices))
    line = f"  policy auto -> {policy} on {devices}, as recorded in {run}"
    return Choice(chosen, plan if devices == record["config"]["devices"] else None, (line,))


def _per_device(config: RunConfig, had: Mapping[str, Any], devices: str) -> dict[str, Any]:
    """Settings with one entry per device, where these are of other devices than the run takes: as it had them.

    They are given for the devices that were asked for, and the plan chose some of those.
    """
    values = {name: getattr(config, name) for name in PER_DEVICE}
    if devices != had["devices"]:
        return values
    for name, given in values.items():
        if isinstance(given, tuple) and len(given) != len(devices.split(",")):
            kept = had.get(name)
            values[name] = tuple(kept) if isinstance(kept, list) else kept
    return values


def _record_of(run: Path) -> dict[str, Any] | None:
    """The record of a run: of its result, or of its newest checkpoint that can be read."""
    for folder in (run, *find_checkpoints(run)):
        try:
            return read_record(folder)
        except InputError:  # noqa: PERF203, a few folders
            continue
    return None
