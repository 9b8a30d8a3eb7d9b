"""A probe of a script with a loop of its own: the step is the user's code, so the script itself runs for some seconds.

Called by script.py. The script is started as `uneven run` starts it, once with an exact and once with a local policy on
all devices, and once on each CPU alone; each is stopped by a stop request after some seconds of training, as Ctrl-C
would stop it. What it saved goes to a folder of the probe's own, which is removed. What the script itself prints or
writes before and inside its loop, it prints and writes.
"""

import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from uneven.config import LOCAL_POLICIES, RunConfig, Task
from uneven.data.epoch_order import make_axis, make_order
from uneven.data.replay import LOG
from uneven.errors import InputError, StoppedError
from uneven.files import read_json
from uneven.hardware.device import Device, parse_devices
from uneven.hardware.interference import measure_interference
from uneven.launch.find_script import Script
from uneven.launch.launcher import run_ranks
from uneven.launch.requests import Requests
from uneven.launch.script import script_order, unused_ranks
from uneven.plan.measure import NOT_LOCAL, ONE_DEVICE, PLAIN, Say, check_min_ranks, exact_of, memory_of
from uneven.plan.probe import ExactProbe, JobProbe, LocalProbe, Probe, RankProbe, SoloProbe, allowed_policies
from uneven.policy.finish import Cost, fitted
from uneven.policy.stream_axis import StreamAxis
from uneven.results.progress import Reporter
from uneven.timeline.timeline import Timeline

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

    @property
    def speed(self) -> float:
        return sum(self.samples) / self.seconds if self.seconds else 0.0

    def step_ms(self, rank: int) -> float:
        return 1e3 * self.compute_s[rank] / max(1, self.steps[rank])

    def size(self, rank: int) -> int:
        return round(self.samples[rank] / max(1, self.steps[rank]))


class _Timer(Reporter):
    """Asks the run to stop when it has trained for so long."""

    def __init__(self, requests: Requests, seconds: float) -> None:
        super().__init__("off")
        self._requests, self._seconds = requests, seconds
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


def probe_script(
    script: Script,
    settings: Mapping[str, Any],
    task: Task,
    config: RunConfig,
    seconds: float,
    say: Say,
) -> Probe:
    """Run the script itself for some seconds in each way."""
    devices, candidates = parse_devices(config.devices), loop_policies(config)
    check_min_ranks(config, devices)
    exact = exact_of(candidates)
    local = next((policy for policy in LOCAL_POLICIES if policy in candidates), None)
    axis = make_axis(make_order(task, config), config, len(devices))
    if isinstance(axis, StreamAxis):
        raise InputError("a stream without length has no epoch whose time could be predicted; give it a __len__")
    began = time.perf_counter()

    def run(names: tuple[Device, ...], policy: str, share: float) -> Stretch:
        say(f"running {script.path.name} on {','.join(map(str, names))} with {policy}, for {share * seconds:.0f} s")
        own = stretch_settings(settings, task, candidates, names, policy)
        return run_stretch(script, own, names, share * seconds)

    with measure_interference() as span:
        joint = run(devices, exact, 0.5)
        rounds = None if local is None else run(devices, local, 0.5)
        solos = {
            str(device): run((device,), exact, 0.3)
            for device in dict.fromkeys(replace(device, speed=1.0) for device in devices if device.kind == "cpu")
        }
    params = sum(param.numel() * param.element_size() for param in task.make_model().parameters())
    nbytes = {"param_bytes": params, "gradient_bytes": params, "state_bytes": STATE_BYTES_PER_PARAM * params}
    job = JobProbe.of(config, axis.epoch_samples, candidates, config.backend, **nbytes)
    if config.memory_cap is not None:  # fewer devices may hold too little, and of one it would be ignored
        job = replace(job, min_ranks=len(devices))
    found = with_caps(assemble(job, devices, joint, exact, rounds, local, solos), config)
    return found.with_time(time.perf_counter() - began, span.interference.is_disturbed)


def with_caps(found: Probe, config: RunConfig) -> Probe:
    """The probe with what memory_cap allows each rank: in a loop of one's own nothing finds it out."""
    if config.memory_cap is None:
        return found
    caps = config.caps(len(found.ranks))
    return replace(found, ranks=tuple(replace(rank, cap=int(cap)) for rank, cap in zip(found.ranks, caps, strict=True)))


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


def assemble(
    job: JobProbe,
    devices: Sequence[Device],
    joint: Stretch,
    exact: str,
    rounds: Stretch | None,
    local: str | None,
    solos: Mapping[str, Stretch],
) -> Probe:
    """The probe that these stretches make; a rank's cost is a line through its steps of both kinds."""
    ranks = tuple(
        _rank(str(device), rank, job.batch_size, joint, rounds, memory_of(device))
        for rank, device in enumerate(devices)
    )
    longest_ms = max(rank.cost.time_ms(joint.size(place)) for place, rank in enumerate(ranks))
    step_ms = 1e3 * joint.seconds / max(1, max(joint.steps))
    known = {device: found.speed for device, found in solos.items()}
    alone = tuple(
        SoloProbe(device=str(device), threads=0, speed=known[device.torch_name] * device.speed)
        for device in dict.fromkeys(devices)
        if device.torch_name in known
    )
    averages = [max(0.0, one["latency_ms"] - one["wait_ms"]) for one in (rounds.rounds if rounds else [])]
    measured = None
    if rounds is not None and local is not None:
        average_ms = statistics.median(averages) if averages else 0.0
        measured = LocalProbe(policy=local, speed=rounds.speed, average_ms=average_ms)
    shares = tuple(joint.size(rank) for rank in range(len(devices)))
    overhead_ms = max(0.0, step_ms - longest_ms)
    return Probe(
        job=job,
        ranks=ranks,
        solos=alone,
        exact=ExactProbe(policy=exact, speed=joint.speed, overhead_ms=overhead_ms, shares=shares),
        local=measured,
        sum_ms=overhead_ms,
        start_s=joint.start_s,
        notes=("a loop of its own: the script itself ran for some seconds in each way",),
    )


def _rank(
    device: str, rank: int, batch: int, joint: Stretch, rounds: Stretch | None, memory_bytes: int | None
) -> RankProbe:
    points = [(joint.size(rank), joint.step_ms(rank))] if joint.steps[rank] and joint.size(rank) else []
    slot_ms = round_ms = 0.0
    if rounds is not None and rounds.steps[rank]:
        slot_ms = rounds.step_ms(rank)
        if not points or abs(points[0][0] - batch) > DIFFERENT * batch:
            points.append((batch, slot_ms))
        own = [one["transfer_ms"] - max(0.0, one["latency_ms"] - one["wait_ms"]) for one in rounds.rounds]
        round_ms = max(0.0, statistics.median(own)) if own else 0.0
    cost = fitted(points) if points else Cost(0.0, 1.0)
    speed = 1e3 * batch / cost.time_ms(batch)
    return RankProbe(
        device=device,
        threads=0,
        fixed_ms=cost.fixed_ms,
        sample_ms=cost.sample_ms,
        jitter=0.0,
        at_once=speed,
        alone=speed,
        slot_ms=slot_ms,
        round_ms=round_ms,
        memory_bytes=memory_bytes,
    )
