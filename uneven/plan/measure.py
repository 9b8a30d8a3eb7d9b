"""Some seconds of probing: rank processes on all devices, and each CPU alone, with the user's own task.

Called by choose.py with a task that `fit` or the builder was given. A script with a loop of its own is measured by
another instrument (plan/own_loop.py), and its rows become a probe in the same way. When `probe` returns or raises, no
process and no file of it is left.
"""

import json
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from uneven.config import EXACT_POLICIES, LOCAL_POLICIES, RunConfig, Task, is_stream
from uneven.data.epoch_order import make_axis, make_order
from uneven.errors import InputError
from uneven.hardware.cgroup import memory_limit
from uneven.hardware.device import Device
from uneven.hardware.interference import measure_interference
from uneven.launch.checks.preflight import prepare
from uneven.launch.context import process_context
from uneven.launch.instances import rebuild_instances
from uneven.launch.launcher import run_ranks
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
from uneven.plan.ranks import ProbeOrder, probe_rank
from uneven.policy.stream_axis import StreamAxis
from uneven.results.progress import Reporter
from uneven.train.requests import Requests

FOREVER = 10**6  # epochs: a probe ends by the clock
SOLO_SHARE = 0.3  # of the seconds, for a device alone
# What a probe sets in place of settings that read or write a run's files, count its ranks, or rule what follows a loss.
PLAIN: Mapping[str, Any] = {**NO_FILES, "min_ranks": 1, "restarts": 0, "progress": "off"}
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
Rows = list[dict[str, Any]]  # a row of figures per rank


class Instrument(Protocol):
    """What measures: a row of figures per rank, as plan/ranks.py has them, and the seconds until the ranks began."""

    def together(self, devices: tuple[Device, ...], local: str | None, seconds: float) -> tuple[Rows, float]:
        """All devices as ranks: exact steps, and the rounds of one local policy where there is one."""
        ...

    def alone(self, device: Device, seconds: float) -> tuple[Rows, float]: ...


class RankPrograms:
    """Measures by plan/ranks.py in every rank, with the settings of endless exact steps."""

    def __init__(self, task: Task, config: RunConfig, say: Say) -> None:
        self._task = task
        self._config = config
        self._say = say

    def together(self, devices: tuple[Device, ...], local: str | None, seconds: float) -> tuple[Rows, float]:
        self._say(f"measuring {len(devices)} devices together, for {seconds:.0f} s")
        return self._run(self._config, devices, ProbeOrder(seconds, local=local))

    def alone(self, device: Device, seconds: float) -> tuple[Rows, float]:
        self._say(f"measuring {device} alone")
        return self._run(solo_config(self._config, str(device)), (device,), ProbeOrder(seconds))

    def _run(self, config: RunConfig, devices: tuple[Device, ...], order: ProbeOrder) -> tuple[Rows, float]:
        began = time.time()
        inputs = (self._task, config, partial(probe_rank, order))
        rows = run_ranks(inputs, devices, Requests(), Reporter("off"), _read)
        return rows, max(row["began"] for row in rows) - began


def probe(task: Task, config: RunConfig, seconds: float, say: Say) -> Probe:
    """Measure the devices of `config` with this task; `say` is told what is going on."""
    check_seconds(seconds)
    _refuse(task, config)
    candidates = allowed_policies(config)
    task, _ = rebuild_instances(task)
    first = next((policy for policy in ("balanced", *EXACT_POLICIES) if policy in candidates), "balanced")
    plain = probe_config(config, first if first in candidates else candidates[0])
    prepared = prepare(task, plain, process_context(), "plan")
    devices = prepared.devices
    config = with_values(config, policy=plain.policy, devices=",".join(map(str, devices)))
    job = job_of(task, config, candidates, prepared.config.backend, len(devices))
    bare = replace(task, make_scheduler=None, evaluation=None, callbacks=(), before_step=task.before_step)
    return measured(job, devices, RankPrograms(bare, exact_config(prepared.config, candidates), say), seconds)


def job_of(task: Task, config: RunConfig, candidates: tuple[str, ...], backend: str, ranks: int) -> JobProbe:
    """From the settings; InputError where no length is known, or not even all devices are enough."""
    if config.min_ranks > ranks:  # a probe itself counts none
        raise InputError(f"min_ranks={config.min_ranks} is above the number of devices, {ranks}: {config.devices}")
    axis = make_axis(make_order(task, config), config, ranks)
    if isinstance(axis, StreamAxis):
        raise InputError(_stream(task))
    return JobProbe.of(config, axis.epoch_samples, candidates, backend)


def measured(job: JobProbe, devices: tuple[Device, ...], instrument: Instrument, seconds: float) -> Probe:
    """All devices together, then each alone."""
    began = time.perf_counter()
    local = next((policy for policy in LOCAL_POLICIES if policy in job.candidates), None)
    rows: Rows = []
    start_s = 0.0
    with measure_interference() as span:
        if len(devices) > 1:
            rows, start_s = instrument.together(devices, local, seconds)
        solos = _probe_solos(instrument, devices, rows, SOLO_SHARE * seconds)
    first = rows[0] if rows else solos[0][1]
    nbytes = {name: first[name] for name in ("param_bytes", "gradient_bytes", "state_bytes")}
    return assemble(replace(job, **nbytes), rows, [solo for solo, _ in solos], devices, start_s).with_time(
        time.perf_counter() - began, span.interference.is_disturbed
    )


def probe_config(config: RunConfig, policy: str) -> RunConfig:
    """The user's settings without those that read or write a run's files."""
    return with_values(config, policy=policy, out=None, monitor=None, eval_every=None, **PLAIN)


def exact_config(config: RunConfig, candidates: Sequence[str]) -> RunConfig:
    """Of endless joint steps; where settings of the local policies leave no exact one, they go without those."""
    exact = exact_of(candidates)
    left_out: Mapping[str, Any] = {} if exact in candidates else NOT_LOCAL
    return with_values(config, policy=exact, epochs=FOREVER, max_steps=None, **left_out)


def solo_config(config: RunConfig, device: str) -> RunConfig:
    """The settings for this device by itself, without those that need several."""
    return with_values(config, devices=device, policy="balanced", **ONE_DEVICE)


def _refuse(task: Task, config: RunConfig) -> None:
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


def exact_of(candidates: Sequence[str]) -> str:
    return "sync" if "sync" in candidates and "balanced" not in candidates else "balanced"


def _read(folder: Path) -> Rows:
    rows: Rows = json.loads((folder / "result-0" / "probe.json").read_text())
    return rows


def _probe_solos(
    instrument: Instrument, devices: tuple[Device, ...], rows: Rows, seconds: float
) -> list[tuple[SoloProbe, dict[str, Any]]]:
    """Each device alone. A CPU has more cores then; another device is as fast as it was with the others idle."""
    found: dict[str, tuple[SoloProbe, dict[str, Any]]] = {}
    for device in dict.fromkeys(devices):
        name = str(device)
        if device.kind == "cuda" and rows:
            row = rows[devices.index(device)]
            found[name] = SoloProbe(device=name, threads=row["threads"], speed=row["alone"]), row
            continue
        kin = next(
            (other for other in found if other.split("@")[0] == device.torch_name and device.percent is None), None
        )
        if kin is not None:  # a simulated device sleeps in proportion to its work
            before, row = found[kin]
            whole = before.speed / next(other.speed for other in devices if str(other) == kin)
            found[name] = replace(before, device=name, speed=whole * device.speed), row
            continue
        (row,), start_s = instrument.alone(device, seconds)
        solo = SoloProbe(device=name, threads=row["threads"], speed=row["exact"]["speed"], start_s=start_s)
        found[name] = solo, row
    return list(found.values())


def assemble(job: JobProbe, rows: Rows, solos: list[SoloProbe], devices: tuple[Device, ...], start_s: float) -> Probe:
    """All figures in one record; a device alone is its own only rank."""
    if not rows:
        (solo,) = solos
        ms = 1e3 * job.batch_size / solo.speed
        only = RankProbe(
            device=solo.device,
            threads=solo.threads,
            fixed_ms=0.0,
            sample_ms=ms / job.batch_size,
            jitter=0.0,
            at_once=solo.speed,
            alone=solo.speed,
            memory_bytes=memory_of(devices[0]),
        )
        return Probe(job=job, ranks=(only,), solos=tuple(solos), start_s=solo.start_s)
    known = [factor for row in rows if (factor := row["exact"]["factor"]) is not None]
    typical = statistics.median(known) if known else 1.0  # for a rank that had no share of the joint steps
    ranks = tuple(_rank(row, memory_of(device), typical) for row, device in zip(rows, devices, strict=True))
    return Probe(
        job=job,
        ranks=ranks,
        solos=tuple(solos),
        exact=_exact(rows, job),
        local=_local(rows, job),
        sum_ms=rows[0]["sum_ms"],
        latency_ms=max(row["latency_ms"] for row in rows),
        start_s=start_s,
    )


def _rank(row: dict[str, Any], memory_bytes: int | None, typical_factor: float) -> RankProbe:
    local, factor = row.get("local", {}), row["exact"]["factor"]
    return RankProbe(
        **{name: row[name] for name in ("device", "threads", "fixed_ms", "sample_ms", "jitter", "at_once", "alone")},
        exact_factor=typical_factor if factor is None else factor,
        slot_ms=local.get("slot_ms", 0.0),
        round_ms=local.get("round_ms", 0.0),
        cap=row["cap"],
        memory_bytes=memory_bytes,
    )


def _exact(rows: Rows, job: JobProbe) -> ExactProbe:
    found = [row["exact"] for row in rows]
    speed, samples = sum(one["speed"] for one in found), sum(one["samples"] for one in found)
    step_ms = 1e3 * samples / speed / found[0]["steps"]
    policy = exact_of(job.candidates)
    overhead_ms = max(0.0, step_ms - found[0]["longest_ms"])
    return ExactProbe(policy=policy, speed=speed, overhead_ms=overhead_ms, shares=tuple(found[0]["shares"]))


def _local(rows: Rows, job: JobProbe) -> LocalProbe | None:
    found = [row["local"] for row in rows if "local" in row]
    if not found:
        return None
    policy = next(policy for policy in LOCAL_POLICIES if policy in job.candidates)
    average_ms = min(one["average_ms"] for one in found)
    return LocalProbe(
        policy=policy, speed=sum(one["speed"] for one in found), average_ms=average_ms, anchor=found[0]["anchor"]
    )


def memory_of(device: Device) -> int | None:
    """Bytes of a device's memory, where that can be read."""
    if device.kind == "cuda":
        import torch

        total = int(torch.cuda.get_device_properties(device.index or 0).total_memory)
        return total if device.percent is None else total * device.percent // 100
    limit, _ = memory_limit()
    for line in Path("/proc/meminfo").read_text().splitlines() if Path("/proc/meminfo").exists() else ():
        if line.startswith("MemTotal:"):
            total = int(line.split()[1]) * 1024
            return total if limit is None else min(limit, total)
    return limit
