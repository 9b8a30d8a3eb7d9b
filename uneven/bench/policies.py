"""`uneven bench policies train.py`: trains the user's own script under each policy and recommends one.

Every policy runs in a fresh process by `uneven run`, from the same seed. Efficiency needs no solo runs here: it is the
joint samples/s over the sum of each device's samples/s while it computes. A recommendation needs undisturbed runs, see
[Note: disturbed figures] in undisturbed.py.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from uneven.bench.orders import PoliciesOrder
from uneven.bench.single.folders import read_timeline
from uneven.bench.single.process import flags, run_uneven
from uneven.bench.undisturbed import measure_undisturbed, to_marks
from uneven.config import ENTRY_KEYS, POLICIES
from uneven.errors import InputError
from uneven.files import read_json
from uneven.hardware.device import parse_devices
from uneven.hardware.preflight import check_device
from uneven.launch.find_script import Script, refuse_no_file
from uneven.launch.script import refuse_plain_script
from uneven.timeline.timeline import Timeline

NEAR = 0.02  # a loss within this fraction of the lowest counts as equally good, since there is one run per policy


@dataclass(frozen=True)
class PolicyRow:
    """The results of one policy's run."""

    policy: str
    loss: float  # of training, in the last epoch
    train_s: float
    samples_per_s: float
    efficiency: float | None
    metrics: dict[str, float] = field(default_factory=dict)  # of the last evaluation, if the script evaluates
    is_disturbed: bool = False
    interference: dict[str, Any] | None = None


@dataclass(frozen=True)
class Recommended:
    """The policy to take, and the reason."""

    policy: str
    reason: str


@dataclass
class Trial:
    """The runs that are finished so far, and those that failed; what --json prints."""

    policies: list[PolicyRow] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)  # policy: why
    recommended: Recommended | None = None
    version: int = 1

    def add(self, row: PolicyRow) -> None:
        self.policies.append(row)
        self.recommended = recommend(self.policies)


def try_policies(script: Script, order: PoliciesOrder, trial: Trial, report: Callable[[str], None]) -> None:
    """Run the policies in turn and add them to `trial`, which is valid after an interrupt; `report` gets each name."""
    for policy in order.policies:
        if policy not in POLICIES:
            raise InputError(f"policy {policy!r} must be one of {', '.join(POLICIES)}")
    refuse_no_file(script.path)
    refuse_plain_script(script, len(order.policies), "policy")
    for device in () if order.devices == "auto" else parse_devices(order.devices):
        check_device(device)  # here, since each policy would fail with the same line
    for policy in order.policies:
        report(policy)
        out = order.out / policy
        settings = {"devices": order.devices, "policy": policy, "epochs": order.epochs, "seed": order.seed, "out": out}
        own = ["--", *script.args] if script.args else []
        arguments = ["run", *script.words, *flags({**settings, "progress": "off"}), *own]
        ended, interference = measure_undisturbed(partial(run_uneven, arguments))
        if ended.code:
            trial.failed[policy] = ended.message
            continue
        row = read_row(policy, out)
        if isinstance(row, str) and not (out / "state.json").exists():
            raise InputError(row)  # it ended well without a run of ours: so it would under the other policies
        if isinstance(row, str):
            trial.failed[policy] = row
        else:
            trial.add(replace(row, **to_marks(interference)))


def read_row(policy: str, out: Path) -> PolicyRow | str:
    """The row of a finished run, read from its folder; a message if the folder is not complete."""
    state, log = read_json(out / "state.json"), read_json(out / "log.json")
    timeline = read_timeline(out)
    if not isinstance(state, dict) or timeline is None:
        return f"the script left no state in {out}: it must train by fit, Ddp.builder or Ddp.setup, and to the end"
    if not state.get("history"):
        return "no epoch was finished"
    last = state["history"][-1]
    seconds = timeline.training_s
    metrics = {k: float(v) for k, v in last.items() if k not in ENTRY_KEYS and isinstance(v, int | float)}
    counts = [sum(part[2] for part in parts) for parts in log["ranks"]] if isinstance(log, dict) else []
    return PolicyRow(
        policy=policy,
        loss=float(last["train_loss"]),
        train_s=seconds,
        samples_per_s=state["samples"] / seconds,
        efficiency=busy_efficiency(timeline, counts),
        metrics=metrics,
    )


def busy_efficiency(timeline: Timeline, counts: Sequence[int]) -> float | None:
    """Joint speed over the sum of the devices' speeds while they compute; None if a device trained nothing."""
    busy = {account.rank: account.seconds["compute"] for account in timeline.accounts}
    if len(counts) < 2 or len(busy) != len(counts):
        return None
    if not all(busy[rank] and count for rank, count in enumerate(counts)):
        return None
    return sum(counts) / timeline.training_s / sum(count / busy[rank] for rank, count in enumerate(counts))


def recommend(rows: Sequence[PolicyRow]) -> Recommended | None:
    """The fastest policy with a loss near the lowest, and the reason; None for one row, or if any was disturbed."""
    if len(rows) < 2 or any(row.is_disturbed for row in rows):
        return None
    lowest = min(rows, key=lambda row: row.loss)
    good = [row for row in rows if row.loss <= lowest.loss + NEAR * abs(lowest.loss)]
    best = max(good, key=lambda row: row.samples_per_s)
    slowest = min(rows, key=lambda row: row.samples_per_s)
    loss = (
        "its loss is the lowest" if best is lowest else f"its loss is within {NEAR:.0%} of the lowest ({lowest.policy})"
    )
    speed = f"{best.samples_per_s / slowest.samples_per_s:.2f}x as fast as {slowest.policy}"
    faster = [row.policy for row in rows if row.samples_per_s > best.samples_per_s]
    other = f"; {' and '.join(faster)} would be faster, at a higher loss" if faster else ""
    speed = "nothing is slower" if best is slowest else speed
    return Recommended(best.policy, f"{speed}, {loss}{other}. One seed does not show chance: repeat it with --seed 1")
