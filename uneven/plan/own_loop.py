"""Measures a script with a loop of its own: the step is the user's code, so the script itself runs for some seconds.

An instrument of plan/measure.py; choose.py calls `probe_script`. The script is started as `uneven run` starts it, once
with an exact and once with a local policy on all devices, and once on each CPU alone; each is stopped by a stop request
after some seconds of training, as Ctrl-C would stop it. What it saved goes to a folder of the probe's own, which is
removed. What the script itself prints or writes before and inside its loop, it prints and writes.
"""

import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from uneven.config import RunConfig, Task
from uneven.data.replay import LOG
from uneven.errors import InputError, StoppedError
from uneven.files import read_json
from uneven.hardware.device import Device, parse_devices
from uneven.launch.find_script import Script
from uneven.launch.launcher import run_ranks
from uneven.launch.script import script_order, unused_ranks
from uneven.plan.measure import NOT_LOCAL, ONE_DEVICE, PLAIN, Rows, Say, exact_of, job_of, measured
from uneven.plan.probe import Probe, allowed_policies
from uneven.policy.finish import Cost, fitted
from uneven.results.progress import Reporter
from uneven.timeline.timeline import Timeline
from uneven.train.requests import Requests

STATE_BYTES_PER_PARAM = 2  # of Adam: what the optimizer of a loop of one's own holds is not known
DIFFERENT = 0.1  # two sizes must differ so much that a line can be drawn through them
GRACE_S = 20.0


@dataclass(frozen=True)
class Stretch:
    """Some seconds of a script's training on some devices. Lists have one entry per rank."""

    seconds: float
    samples: list[int]
    steps: list[int]
    compute_s: list[float]
    rounds: list[dict[str, float]]  # of rank 0
    start_s: float = 0.0  # until it began

    def step_ms(self, rank: int) -> float:
        return 1e3 * self.compute_s[rank] / max(1, self.steps[rank])

    def size(self, rank: int) -> int:
        return round(self.samples[rank] / max(1, self.steps[rank]))


class _Timer(Reporter):
    """Asks the run to stop when it has trained for so long."""

    def __init__(self, requests: Requests, seconds: float) -> None:
        super().__init__("off")
        self._requests = requests
        self._seconds = seconds
        self.began_s: float | None = None

    def ranks(self, statuses: Sequence[dict[str, Any]], first: int = 0) -> None:
        del first
        if self.began_s is None and all(map(_has_trained, statuses)):
            self.began_s = time.monotonic()
        if self.began_s is not None and time.monotonic() - self.began_s >= self._seconds:
            self._requests.stop.set()


def _has_trained(status: Mapping[str, Any]) -> bool:
    """Whether a rank has taken a step; a short loop may be over before the first heartbeat inside it."""
    return bool(status.get("slot") or status.get("reached") or status.get("is_past"))


class ScriptRuns:
    """Measures by runs of the script itself; the settings are those that replace its own."""

    def __init__(self, script: Script, settings: Mapping[str, Any], task: Task, config: RunConfig, say: Say) -> None:
        self._script = script
        self._settings = settings
        self._task = task
        self._config = config
        self._say = say
        self._candidates = loop_policies(config)
        self._exact = exact_of(self._candidates)
        self._batch = config.batch_size * config.accumulate

    def together(self, devices: tuple[Device, ...], local: str | None, seconds: float) -> tuple[Rows, float]:
        joint = self._run(devices, self._exact, 0.5 * seconds)
        rounds = None if local is None else self._run(devices, local, 0.5 * seconds)
        rows = self._rows(devices, joint, rounds)
        if self._config.memory_cap is not None:  # in a loop of one's own nothing else finds it out
            for row, cap in zip(rows, self._config.caps(len(devices)), strict=True):
                row["cap"] = int(cap)
        return rows, joint.start_s

    def alone(self, device: Device, seconds: float) -> tuple[Rows, float]:
        found = self._run((device,), self._exact, seconds)
        return self._rows((device,), found, None), found.start_s

    def _run(self, devices: tuple[Device, ...], policy: str, seconds: float) -> Stretch:
        names = ",".join(map(str, devices))
        self._say(f"running {self._script.path.name} on {names} with {policy}, for {seconds:.0f} s")
        own = stretch_settings(self._settings, self._task, self._candidates, devices, policy)
        return run_stretch(self._script, own, devices, seconds)

    def _rows(self, devices: Sequence[Device], joint: Stretch, rounds: Stretch | None) -> Rows:
        params = [(param.nbytes, param.requires_grad) for param in self._task.make_model().parameters()]
        trained = sum(size for size, is_trained in params if is_trained)
        nbytes = {
            "param_bytes": sum(size for size, _ in params),
            "gradient_bytes": trained,
            "state_bytes": STATE_BYTES_PER_PARAM * trained,
        }
        return [{**row, **nbytes} for row in rows_of(devices, self._batch, joint, rounds)]


def probe_script(
    script: Script, settings: Mapping[str, Any], task: Task, config: RunConfig, seconds: float, say: Say
) -> Probe:
    """Run the script itself for some seconds in each way."""
    devices = parse_devices(config.devices)
    job = job_of(task, config, loop_policies(config), config.backend, len(devices))
    if config.memory_cap is not None:  # fewer devices may hold too little, and of one it would be ignored
        job = replace(job, min_ranks=len(devices))
    found = measured(job, devices, ScriptRuns(script, settings, task, config, say), seconds)
    return replace(found, notes=("a loop of its own: the script itself ran for some seconds in each way",))


def loop_policies(config: RunConfig) -> tuple[str, ...]:
    """The policies that go with the other settings; memory_cap of a loop of one's own with balanced alone.

    See check_loop in api/loop_inputs.py: it refuses what would be ignored.
    """
    allowed = allowed_policies(config)
    return allowed if config.memory_cap is None else tuple(policy for policy in allowed if policy == "balanced")


def stretch_settings(
    settings: Mapping[str, Any], task: Task, candidates: Sequence[str], devices: Sequence[Device], policy: str
) -> dict[str, Any]:
    """What replaces the script's own settings in a stretch: `settings`, and neutral values for what would be refused.

    An exact stretch is measured where the settings leave local policies alone, too, and so is one device where they
    need several.
    """
    own = {**settings, **PLAIN, "policy": policy, "devices": ",".join(map(str, devices))}
    if task.make_scheduler is None:
        own["monitor"] = None  # it was for keep_best
    if policy not in candidates:
        own |= NOT_LOCAL
    if len(devices) == 1:
        own |= ONE_DEVICE
    return own


def run_stretch(script: Script, settings: Mapping[str, Any], devices: tuple[Device, ...], seconds: float) -> Stretch:
    """The script on these devices, stopped after some seconds of training; what its timeline and its log tell."""
    with tempfile.TemporaryDirectory(prefix="uneven-plan-") as folder:
        out = Path(folder) / "run"
        requests = Requests(GRACE_S)
        timer = _Timer(requests, seconds)
        order = script_order(script, {**settings, "out": str(out)})
        began = time.monotonic()
        try:
            unused = run_ranks(None, devices, requests, timer, unused_ranks, script=order)
        except StoppedError:
            unused = 0
        ended = time.monotonic()
        is_told = timer.began_s is not None or (out / LOG).exists()
        found = read_stretch(out) if is_told and not unused else None
        if found is None or not any(found.samples):
            raise InputError(f"{script} ended without a step of its own loop: nothing could be measured")
        # A loop that was over before a heartbeat told of it took the time that its timeline tells.
        first_s = ended - found.seconds if timer.began_s is None else timer.began_s
        return replace(found, start_s=max(0.0, first_s - began))


def read_stretch(out: Path) -> Stretch:
    """From the folder that the run left; InputError where it left none."""
    log, record = read_json(out / LOG), read_json(out / "timeline.json")
    if not isinstance(log, dict) or not isinstance(record, dict):
        raise InputError(f"the script left no state in {out.name}: nothing could be measured")
    timeline = Timeline.from_json(record)
    parts = log["ranks"]
    accounts = sorted(timeline.accounts, key=lambda account: account.rank)
    names = ("compute", "data", "other")
    return Stretch(
        seconds=timeline.training_s,
        samples=[sum(samples for _, _, samples in own) for own in parts],
        steps=[sum(1 for _, _, samples in own if samples) for own in parts],
        compute_s=[sum(account.seconds.get(name, 0.0) for name in names) for account in accounts],
        rounds=[event.fields for event in timeline.events if event.kind == "round" and event.rank == 0],
    )


def rows_of(devices: Sequence[Device], batch: int, joint: Stretch, rounds: Stretch | None) -> Rows:
    """The figures of each rank that these stretches show."""
    costs = [_cost(rank, batch, joint, rounds) for rank in range(len(devices))]
    longest_ms = max(cost.time_ms(joint.size(rank)) for rank, cost in enumerate(costs))
    steps = max(1, max(joint.steps))
    rows = []
    for rank, (device, cost) in enumerate(zip(devices, costs, strict=True)):
        speed = 1e3 * batch / cost.time_ms(batch)
        exact = {
            "speed": joint.samples[rank] / joint.seconds,
            "steps": steps,
            "samples": joint.samples[rank],
            "factor": 1.0,  # the cost was measured in joint steps
            "longest_ms": longest_ms,
            "shares": [joint.size(other) for other in range(len(devices))],
        }
        row = {
            "device": str(device),
            "threads": 0,
            "fixed_ms": cost.fixed_ms,
            "sample_ms": cost.sample_ms,
            "jitter": 0.0,
            "at_once": speed,
            "alone": speed,
            "exact": exact,
            "sum_ms": max(0.0, 1e3 * joint.seconds / steps - longest_ms),
            "latency_ms": 0.0,
            "cap": None,
        }
        rows.append(row if rounds is None else {**row, "local": _local_row(rank, rounds)})
    return rows


def _cost(rank: int, batch: int, joint: Stretch, rounds: Stretch | None) -> Cost:
    """A line through a rank's steps of both kinds."""
    points = [(joint.size(rank), joint.step_ms(rank))] if joint.steps[rank] and joint.size(rank) else []
    is_new = not points or abs(points[0][0] - batch) > DIFFERENT * batch
    if is_new and rounds is not None and rounds.steps[rank]:
        points.append((batch, rounds.step_ms(rank)))
    return fitted(points) if points else Cost(0.0, 1.0)


def _local_row(rank: int, rounds: Stretch) -> dict[str, Any]:
    """The rounds are those of rank 0, whatever the rank."""
    averages = [max(0.0, one["latency_ms"] - one["wait_ms"]) for one in rounds.rounds]
    own = [one["transfer_ms"] - average_ms for one, average_ms in zip(rounds.rounds, averages, strict=True)]
    has_trained = rounds.steps[rank] > 0
    return {
        "speed": rounds.samples[rank] / rounds.seconds if rounds.seconds else 0.0,
        "slot_ms": rounds.step_ms(rank) if has_trained else 0.0,
        "round_ms": max(0.0, statistics.median(own)) if own and has_trained else 0.0,
        "average_ms": statistics.median(averages) if averages else 0.0,
        "anchor": None,
    }
