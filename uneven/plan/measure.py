"""Some seconds of probing: short runs of what is to be trained, and what their timelines and logs tell.

Called by choose.py. All devices train together with an exact and with a local policy, then each CPU and each slice of a
GPU alone. What `fit` or the builder was given is trained in rank processes; a script with a loop of its own is started
as `uneven run` starts it, since its step is the user's code. Each run is asked to stop after some seconds of training,
as Ctrl-C would. When `probe` returns or raises, no process and no file of it is left; what a script itself prints or
writes before and inside its loop, it prints and writes.
"""

import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from uneven.config import LOCAL_POLICIES, RunConfig, Task, is_stream
from uneven.data.epoch_order import make_axis, make_order
from uneven.data.replay import LOG
from uneven.errors import InputError, StoppedError
from uneven.hardware.cores import assign_cores, available_cores
from uneven.hardware.device import Device
from uneven.hardware.interference import measure_interference
from uneven.hardware.system import read_system
from uneven.launch.checks.preflight import prepare
from uneven.launch.context import process_context
from uneven.launch.find_script import Script
from uneven.launch.instances import rebuild_instances
from uneven.launch.launcher import run_ranks, train_on_ranks
from uneven.launch.script import script_order, unused_ranks
from uneven.launch.training import read_state
from uneven.plan.probe import (
    NO_FILES,
    ExactProbe,
    JobProbe,
    LocalProbe,
    Probe,
    RankProbe,
    SoloProbe,
    allowed_policies,
    check_seconds,
    with_values,
)
from uneven.policy.finish import Cost, fitted
from uneven.policy.stream_axis import StreamAxis
from uneven.results.progress import Reporter
from uneven.results.state import TrainedState
from uneven.train.requests import Requests

PARTS = {"exact": 0.5, "local": 0.5, "alone": 0.3}  # of the seconds, each kind of run
GRACE_S = 20.0
DIFFERENT = 0.1  # two sizes must differ so much that a line can be drawn through them
ANCHOR = 4  # of the windows that are timed, where the user has none of his own ...
WINDOW_MS = 60.0  # ... and more where steps are short: what a round costs beside its sum must not count as slots
# What a probe sets in place of settings that read or write a run's files, count its ranks, or rule what follows a loss.
PLAIN: Mapping[str, Any] = {**NO_FILES, "min_ranks": 1, "restarts": 0, "progress": "off"}
# A task is trained until it is stopped, and not evaluated.
ENDLESS: Mapping[str, Any] = {"epochs": 10**6, "max_steps": None, "out": None, "monitor": None, "eval_every": None}
# Of the local policies alone: exact steps go without them.
NOT_LOCAL: Mapping[str, Any] = {
    "anchor": None,
    "max_anchor": None,
    "overhead_target": None,
    "divergence_threshold": None,
    "max_staleness": None,
    "optimizer_state": None,
    "verify": False,
}
# Of several devices alone: a device by itself goes without them.
ONE_DEVICE: Mapping[str, Any] = {
    "strategy": None,
    "redundancy": 0,
    "memory_shares": None,
    "memory_cap": None,
    "shares": None,
}

Say = Callable[[str], None]


class Timer(Reporter):
    """Asks the run to stop when all of its ranks have trained for so long."""

    def __init__(self, seconds: float) -> None:
        super().__init__("off")
        self.requests = Requests(GRACE_S)
        self._seconds = seconds
        self.began_s: float | None = None

    def ranks(self, statuses: Sequence[dict[str, Any]], first: int = 0) -> None:
        del first
        # A short loop may be over before the first heartbeat inside it.
        if self.began_s is None and all(any(map(one.get, ("slot", "reached", "is_past"))) for one in statuses):
            self.began_s = time.monotonic()
        if self.began_s is not None and time.monotonic() - self.began_s >= self._seconds:
            self.requests.stop.set()


# Trains with these settings in place of the user's own; None: no step was made.
Trains = Callable[[Mapping[str, Any], tuple[Device, ...], Timer], TrainedState | None]


@dataclass(frozen=True)
class Stretch:
    """Some seconds of training on some devices. Lists have one entry per rank."""

    seconds: float
    samples: list[int]
    steps: list[int]
    compute_s: list[float]
    rounds: list[dict[str, float]]  # of rank 0
    start_s: float = 0.0  # until it began
    param_bytes: int = 0
    state_bytes: int = 0  # of the optimizer

    @classmethod
    def of(cls, state: TrainedState) -> "Stretch":
        timeline = state.timeline
        assert timeline is not None, "read with it"
        accounts = sorted(timeline.accounts, key=lambda account: account.rank)
        names = ("compute", "data", "other")
        return cls(
            seconds=timeline.training_s,
            samples=[sum(samples for _, _, samples in own) for own in state.log],
            steps=[sum(1 for _, _, samples in own if samples) for own in state.log],
            compute_s=[sum(account.seconds.get(name, 0.0) for name in names) for account in accounts],
            rounds=[event.fields for event in timeline.events if event.kind == "round" and event.rank == 0],
            param_bytes=_bytes(state.params.values()),
            state_bytes=_bytes(one for name, one in state.optimizer.items() if not name.startswith("random.")),
        )

    def step_ms(self, rank: int) -> float:
        return 1e3 * self.compute_s[rank] / max(1, self.steps[rank])

    def size(self, rank: int) -> int:
        return round(self.samples[rank] / max(1, self.steps[rank]))


def _bytes(tensors: Any) -> int:
    return sum(one.numel() * one.element_size() for one in tensors if isinstance(one, Tensor))


def probe(task: Task, config: RunConfig, seconds: float, say: Say) -> Probe:
    """Measure the devices of `config` with this task; `say` is told what is going on."""
    _refuse(task, config, seconds)
    bare = replace(rebuild_instances(task)[0], make_scheduler=None, evaluation=None, callbacks=())
    job = job_of(task, config, allowed_policies(config))

    def train(own: Mapping[str, Any], devices: tuple[Device, ...], timer: Timer) -> TrainedState:
        prepared = prepare(bare, with_values(config, **{**own, **ENDLESS}), process_context(), "plan")
        made = replace(bare, made=prepared.made)
        with tempfile.TemporaryDirectory(prefix="uneven-plan-") as folder:  # a run that is stopped saves
            trained = with_values(prepared.config, out=Path(folder) / "run")
            return train_on_ranks(made, trained, devices, timer.requests, timer)

    return measured(Stretches(train, job, config, say), seconds)


def probe_script(
    script: Script, settings: Mapping[str, Any], task: Task, config: RunConfig, seconds: float, say: Say
) -> Probe:
    """The same of a script with a loop of its own; `settings` are those that replace its own."""
    check_seconds(seconds)
    candidates = allowed_policies(config)
    least = config.min_ranks
    if config.memory_cap is not None:  # as check_loop in api/loop_inputs.py: it refuses what would be ignored
        candidates, least = ("balanced",), len(config.devices.split(","))
    job = job_of(task, config, candidates)
    monitor = {} if task.make_scheduler is not None else {"monitor": None}  # it was for keep_best

    def train(own: Mapping[str, Any], devices: tuple[Device, ...], timer: Timer) -> TrainedState | None:
        return run_script_for_a_while(script, {**settings, **own, **monitor}, devices, timer)

    found = measured(Stretches(train, replace(job, min_ranks=max(job.min_ranks, least)), config, say), seconds)
    return replace(found, notes=("a loop of its own: the script itself ran for some seconds in each way",))


def run_script_for_a_while(
    script: Script, settings: Mapping[str, Any], devices: tuple[Device, ...], timer: Timer
) -> TrainedState | None:
    """What the script has trained when it was stopped; InputError where it has not made a step of its own loop."""
    with tempfile.TemporaryDirectory(prefix="uneven-plan-") as folder:
        out = Path(folder) / "run"
        order, unused = script_order(script, {**settings, "out": str(out)}), 0
        with suppress(StoppedError):
            unused = run_ranks(None, devices, timer.requests, timer, unused_ranks, script=order)
        state = read_state(out) if (out / LOG).exists() and not unused else None
        if state is None or not any(state.rank_samples):
            raise InputError(f"{script} ended without a step of its own loop: nothing could be measured")
        return state


def _refuse(task: Task, config: RunConfig, seconds: float) -> None:
    check_seconds(seconds)
    if not config.is_replicated:
        raise InputError(
            f"strategy={config.strategy!r}: a plan is made for devices that each hold the whole model, and shows the "
            "memory of the other strategies beside it; leave strategy out"
        )
    if is_stream(task.dataset) and not hasattr(task.dataset, "__len__"):
        raise InputError(_stream(task))


def _stream(task: Task) -> str:
    return (
        f"dataset {type(task.dataset).__name__} is a stream without length, so its epochs have no known length; "
        "give it a __len__, or compare policies on a part of it: uneven bench policies train.py"
    )


def job_of(task: Task, config: RunConfig, candidates: tuple[str, ...]) -> JobProbe:
    """From the settings; InputError where no length is known, or not even all devices are enough."""
    ranks = len(process_context().devices(config.devices))
    if config.min_ranks > ranks:  # a probe itself counts none
        raise InputError(f"min_ranks={config.min_ranks} is above the number of devices, {ranks}: {config.devices}")
    axis = make_axis(make_order(task, config), config, ranks)
    if isinstance(axis, StreamAxis):
        raise InputError(_stream(task))
    trained = (param for param in task.make_model().parameters() if param.requires_grad)
    return replace(JobProbe.of(config, axis.epoch_samples, candidates), gradient_bytes=_bytes(trained))


class Stretches:
    """Short runs of one job, each with what replaces the user's settings on its devices and with its policy."""

    def __init__(self, train: Trains, job: JobProbe, config: RunConfig, say: Say) -> None:
        self._train = train
        self._say = say
        self.job = job
        self.config = config
        self.devices = process_context().devices(config.devices)

    def run(self, devices: tuple[Device, ...], policy: str, seconds: float, **more: Any) -> Stretch:
        names = ",".join(map(str, devices))
        self._say(f"training on {names} with {policy}, for {seconds:.0f} s")
        own = {**PLAIN, "policy": policy, "devices": names, **more}
        own |= {} if policy in self.job.candidates else NOT_LOCAL
        own |= ONE_DEVICE if len(devices) == 1 else {}
        timer, began_s = Timer(seconds), time.monotonic()
        state = self._train(own, devices, timer)
        ended_s = time.monotonic()
        if state is None or not any(state.rank_samples):
            raise InputError(f"no step was made on {names} with {policy}: nothing could be measured")
        found = Stretch.of(state)
        # Of what was over before a heartbeat told of it the timeline tells how long it took.
        first_s = ended_s - found.seconds if timer.began_s is None else timer.began_s
        return replace(found, start_s=max(0.0, first_s - began_s))


def measured(stretches: Stretches, seconds: float) -> Probe:
    """All devices together, then each alone."""
    began = time.perf_counter()
    devices, job = stretches.devices, stretches.job
    exact = "sync" if "sync" in job.candidates and "balanced" not in job.candidates else "balanced"
    local = next((policy for policy in LOCAL_POLICIES if policy in job.candidates), None)
    joint = rounds = anchor = None
    with measure_interference() as span:
        if len(devices) > 1:
            joint = stretches.run(devices, exact, PARTS["exact"] * seconds)
            if local is not None:
                slot_ms = max(1e-3, *(joint.step_ms(rank) for rank in range(len(devices))))
                anchor = job.anchor or min(job.max_anchor or 200, max(ANCHOR, int(WINDOW_MS / slot_ms)))
                own = {"anchor": anchor, "max_anchor": anchor}
                rounds = stretches.run(devices, local, PARTS["local"] * seconds, **own)
        alone, solos = _alone(stretches, exact, joint, PARTS["alone"] * seconds)
    first = joint or alone
    assert first is not None, "one device was measured alone"
    job = replace(job, param_bytes=first.param_bytes, state_bytes=first.state_bytes)
    found = Probe(job=job, ranks=(), solos=solos, start_s=first.start_s)
    if joint is None:
        ranks: tuple[RankProbe, ...] = (_only(solos[0], devices[0]),)
    else:
        ranks = _ranks(stretches, joint, rounds)
        found = replace(found, exact=_exact(exact, joint, ranks), local=_local(local, rounds, anchor))
    is_disturbed = span.interference.is_disturbed
    return replace(found, ranks=ranks, seconds=time.perf_counter() - began, is_disturbed=is_disturbed)


def _alone(
    stretches: Stretches, policy: str, joint: Stretch | None, seconds: float
) -> tuple[Stretch | None, tuple[SoloProbe, ...]]:
    """Each device alone, and the last run. A CPU has more cores then, and a slice the GPU's memory; a whole GPU is as
    fast as among others."""
    found: dict[Device, SoloProbe] = {}
    run = None
    for device in dict.fromkeys(stretches.devices):
        threads = assign_cores((device,), available_cores()).threads[0]
        kin = next((one for one in found if one.torch_name == device.torch_name and device.percent is None), None)
        if kin is not None:  # a simulated device sleeps in proportion to its work
            speed = found[kin].speed / kin.speed * device.speed
        elif device.kind == "cuda" and device.percent is None and joint is not None:
            continue
        else:
            run = stretches.run((device,), policy, seconds)
            speed = run.samples[0] / run.compute_s[0]
        found[device] = SoloProbe(device=str(device), threads=threads, speed=speed)
    return run, tuple(found.values())


def _only(solo: SoloProbe, device: Device) -> RankProbe:
    """A device alone is its own only rank."""
    return RankProbe(
        device=solo.device,
        threads=solo.threads,
        fixed_ms=0.0,
        sample_ms=1e3 / solo.speed,
        at_once=solo.speed,
        memory_bytes=memory_of(device),
    )


def _ranks(stretches: Stretches, joint: Stretch, rounds: Stretch | None) -> tuple[RankProbe, ...]:
    """The figures of each rank that these stretches show."""
    devices, config = stretches.devices, stretches.config
    batch = stretches.job.batch_size
    caps = [None] * len(devices) if config.memory_cap is None else [int(cap) for cap in config.caps(len(devices))]
    threads = assign_cores(devices, available_cores()).threads
    found = []
    for rank, device in enumerate(devices):
        cost = _cost(rank, batch, joint, rounds)
        slot_ms = round_ms = 0.0
        if rounds is not None and rounds.steps[rank]:
            slot_ms = rounds.step_ms(rank)
            own = [one["transfer_ms"] - _average_ms(one) for one in rounds.rounds]  # of rank 0, whatever the rank
            round_ms = max(0.0, statistics.median(own)) if own else 0.0
        found.append(
            RankProbe(
                device=str(device),
                threads=threads[rank],
                fixed_ms=cost.fixed_ms,
                sample_ms=cost.sample_ms,
                at_once=1e3 * batch / cost.time_ms(batch),
                slot_ms=slot_ms,
                round_ms=round_ms,
                cap=caps[rank],
                memory_bytes=memory_of(device),
            )
        )
    return tuple(found)


def _cost(rank: int, batch: int, joint: Stretch, rounds: Stretch | None) -> Cost:
    """A line through a rank's steps of both kinds."""
    points = [(joint.size(rank), joint.step_ms(rank))] if joint.steps[rank] and joint.size(rank) else []
    is_new = not points or abs(points[0][0] - batch) > DIFFERENT * batch
    if is_new and rounds is not None and rounds.steps[rank]:
        points.append((batch, rounds.step_ms(rank)))
    return fitted(points)


def _exact(policy: str, joint: Stretch, ranks: Sequence[RankProbe]) -> ExactProbe:
    shares = tuple(joint.size(rank) for rank in range(len(ranks)))
    longest_ms = max(one.cost.time_ms(share) for one, share in zip(ranks, shares, strict=True))
    overhead_ms = max(0.0, 1e3 * joint.seconds / max(1, *joint.steps) - longest_ms)
    return ExactProbe(policy=policy, speed=sum(joint.samples) / joint.seconds, overhead_ms=overhead_ms, shares=shares)


def _local(policy: str | None, rounds: Stretch | None, anchor: int | None) -> LocalProbe | None:
    if policy is None or rounds is None:
        return None
    averages = [_average_ms(one) for one in rounds.rounds]
    average_ms = statistics.median(averages) if averages else 0.0
    speed = sum(rounds.samples) / rounds.seconds if rounds.seconds else 0.0
    return LocalProbe(policy=policy, speed=speed, average_ms=average_ms, anchor=anchor)


def _average_ms(one: Mapping[str, float]) -> float:
    return max(0.0, one["latency_ms"] - one["wait_ms"])


def memory_of(device: Device) -> int | None:
    """Bytes of a device's memory, where that can be read."""
    if device.kind == "cuda":
        import torch

        total = int(torch.cuda.get_device_properties(device.index or 0).total_memory)
        return total if device.percent is None else total * device.percent // 100
    return read_system().memory_bytes
