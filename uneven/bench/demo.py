"""The demo: one small model in every mode on mismatched devices, each with so many digits that all modes have time.

Called by cli/demo.py; the verdict and the page are in demo_page.py. Only `train_modes` and `fit_length` train; rows and
remarks are computed from the runs' summaries. Invariants: a figure that was not measured, or cannot be derived from
measurements, is None; nothing is concluded from a disturbed run ([Note: disturbed figures] in undisturbed.py); a mode
without a result is named with the reason.
"""

import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from uneven.bench.modes import PAIR, resolve_mode, run_folder
from uneven.bench.orders import DemoOrder, Order
from uneven.bench.undisturbed import FOOTNOTE, mark
from uneven.errors import InputError, MachineError, RankError, StoppedError
from uneven.format import format_count
from uneven.hardware.cores import assign_cores, available_cores
from uneven.hardware.device import parse_devices
from uneven.hardware.preflight import check_device

if TYPE_CHECKING:
    from uneven.bench.single.folders import Summary

MODEL = "lenet"
DATA = "mnist-mini"
DIGITS = 10_000  # in the package
METRIC = "accuracy"
REFERENCE = "torch-ddp"
# Every machine has these. What the demo is about comes first: where the time ends early, the last ones are missing.
OURS = ("cpu-async", "cpu-balanced", "cpu-cadence", "cpu-sync")
MODE_SHARE = 0.5  # the fraction of the remaining time that one mode may use, so that a slow one does not use all
TRIED = 640  # digits on each device, to see how fast it is
TRIED_SHARE = 0.1  # the part of the budget that one device may be tried for
LEAST = 1_280  # digits in each epoch: before there are fewer, there are fewer epochs
PLANNED = 0.8  # the part of the budget that is planned for: no estimate is exact, and a disturbed mode is repeated
RANKS = 1.3  # times the first try for a start of ranks: like that, they load torch, and also meet
MORE = "--minutes gives it more"

Train = Callable[[DemoOrder, str, float], "Summary"]  # order, mode, time limit in seconds


@dataclass(frozen=True)
class ModeRow:
    """One mode in the table. `efficiency` is an estimate, because its speeds come from runs at different times."""

    mode: str
    accuracy: float
    seconds: float  # of training, without start-up and evaluation
    samples_per_s: float
    speedup: float | None  # over the fast device alone
    efficiency: float | None  # over the sum of the devices' own speeds
    shares: tuple[float, ...]  # of the samples, per device
    is_disturbed: bool = False
    interference: dict[str, Any] | None = None


@dataclass
class Results:
    """The modes that are finished so far; complete or not, it can be printed."""

    devices: tuple[str, ...]
    modes: tuple[str, ...]
    summaries: dict[str, "Summary"] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)  # mode -> why
    skipped: dict[str, str] = field(default_factory=dict)  # mode -> why the budget did not allow it
    shortened: str | None = None  # why each mode trains fewer digits than were asked for

    @property
    def alone(self) -> tuple[float, ...] | None:
        """Each device's samples/s alone; None unless all were run, since any of them may be the fastest."""
        solos = [self.summaries.get(f"solo-{place}") for place in range(len(self.devices))]
        speeds = tuple(summary.samples_per_s for summary in solos if summary is not None)
        return speeds if len(speeds) == len(self.devices) else None

    @property
    def disturbed(self) -> list[str]:
        """Modes whose figures are marked."""
        return [mode for mode, summary in self.summaries.items() if summary.is_disturbed]

    @property
    def undisturbed_alone(self) -> tuple[float, ...] | None:
        """As `alone`, but None if the run of a device alone was disturbed; conclusions use this one."""
        return None if any(mode.startswith("solo-") for mode in self.disturbed) else self.alone

    @property
    def not_run(self) -> dict[str, str]:
        """Every mode without a result, and why."""
        why = {mode: f"failed: {text.splitlines()[0]}" for mode, text in self.failures.items()} | self.skipped
        missing = [mode for mode in self.modes if mode not in self.summaries]
        return {mode: why.get(mode, "the demo was ended before") for mode in missing}

    @property
    def rows(self) -> list[ModeRow]:
        alone, rows = self.alone, []
        for mode, summary in self.summaries.items():
            shares, speed = tuple(summary.sample_shares), summary.samples_per_s
            if mode.startswith("solo-"):
                shares = tuple(float(mode == f"solo-{place}") for place in range(len(self.devices)))
            rows.append(
                ModeRow(
                    mode=mode,
                    accuracy=summary.quality[METRIC],
                    seconds=summary.train_seconds,
                    samples_per_s=speed,
                    speedup=speed / max(alone) if alone else None,
                    efficiency=speed / sum(alone) if alone else None,
                    shares=shares,
                    is_disturbed=summary.is_disturbed,
                    interference=summary.interference,
                )
            )
        return rows

    def table(self) -> tuple[list[str], list[list[str]]]:
        """Headings and cells, of the terminal and of the page."""
        is_compared, is_marked = self.alone is not None, self.undisturbed_alone is None
        compared = ["speed-up", "efficiency"] if is_compared else []
        rows = []
        for row in self.rows:
            cells = [row.mode, f"{100 * row.accuracy:.2f} %", mark(f"{row.seconds:.1f} s", row.is_disturbed)]
            if row.speedup is not None and row.efficiency is not None:
                figures = (f"{row.speedup:.2f}x", f"~{100 * row.efficiency:.0f} %")
                cells += [mark(figure, row.is_disturbed or is_marked) for figure in figures]
            rows.append([*cells, f"{' : '.join(f'{100 * share:.0f}' for share in row.shares)} %"])
        return ["mode", METRIC, "time", *compared, f"share {' : '.join(self.devices)}"], rows

    def remarks(self) -> list[str]:
        """What the table means, and what is missing in it."""
        lines = [FOOTNOTE] if self.disturbed else []
        lines.append(
            "Time: of training alone. Speed-up: over the fast device alone. Efficiency: of the devices' speeds alone, "
            "added up; ~ because the runs came one after the other."
        )
        lines += [f"Not measured: {mode} ({why})." for mode, why in self.not_run.items()]
        return lines if self.shortened is None else [*lines, f"Shortened: {self.shortened}."]


def check(order: DemoOrder) -> Results:
    """InputError for devices or modes that the demo cannot use; otherwise empty results to be filled."""
    devices = parse_devices(order.devices)
    if len(devices) < 2:
        raise InputError(
            f"--devices {order.devices!r}: the demo needs at least two devices, as in {PAIR}; for one run "
            f"'uneven bench run --model {MODEL} --data {DATA} --devices {order.devices}'"
        )
    for device in dict.fromkeys(devices):
        check_device(device)
        if device.percent is not None:
            raise InputError(
                f"--devices {order.devices!r}: the demo takes whole devices, as in {PAIR} or cuda:0,cpu; on slices run "
                "'uneven bench efficiency'"
            )
    return Results(tuple(map(str, devices)), _chosen(order.modes, len(devices), order.devices))


def notes(order: DemoOrder) -> list[str]:
    """Lines to print before the figures: what limits their meaning on this machine."""
    devices = parse_devices(order.devices)
    plan = assign_cores(devices, available_cores())
    lines = [f"{plan.note}; the figures below mean little"] if plan.note else []
    if any(device.speed < 1 for device in devices):
        lines.append("a device with @ is simulated: it sleeps after each step, so its speed is not exact")
    return lines


def threads(order: DemoOrder) -> int:
    """How many threads each device has when it runs alone, for `limit_threads`; 0 if ranks are not pinned."""
    plan = assign_cores(parse_devices(order.devices), available_cores())
    return min(plan.threads) if plan.pinned else 0


def fit_length(
    order: DemoOrder,
    results: Results,
    train: Train | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> DemoOrder:
    """The order with as many digits as all modes have time for, and the time left; `results.shortened` says so.

    A few steps on each device alone tell its speed, and so about how long every mode takes. A demo without ours beside
    PyTorch's DDP shows nothing, while fewer digits show the same speeds.
    """
    train = train or _train
    digits = min(order.samples or DIGITS, DIGITS)
    if digits <= LEAST:
        return order
    began_s, budget_s = clock(), 60 * order.minutes
    speeds, around_s = [], []  # samples/s of each device, and the seconds around its training
    with tempfile.TemporaryDirectory(prefix="uneven-demo-") as folder:
        short = replace(order, samples=TRIED, epochs=1, out=Path(folder), progress="off")
        for place in range(len(results.devices)):
            before_s = clock()
            try:
                summary = train(short, f"solo-{place}", TRIED_SHARE * budget_s)
                speeds.append(summary.samples_per_s)
                around_s.append(max(0.0, clock() - before_s - summary.train_seconds))
            except StoppedError:
                speeds.append(TRIED / (TRIED_SHARE * budget_s))
                around_s.append(0.0)
            except (RankError, InputError, MachineError):
                return order  # its mode fails, too, and says why
    left_s = budget_s - (clock() - began_s)
    starts_s = sum(around_s[-1] if mode.startswith("solo-") else RANKS * around_s[0] for mode in results.modes)
    per_sample_s = sum(_seconds_per_sample(mode, speeds) for mode in results.modes)
    fitting = max(0, int((PLANNED * left_s - starts_s) / per_sample_s))
    order = replace(order, minutes=max(0.0, left_s / 60))
    if fitting >= order.epochs * digits:
        return order
    epochs = min(order.epochs, max(1, fitting // LEAST))
    samples = min(digits, max(LEAST, fitting // epochs // TRIED * TRIED))
    results.shortened = (
        f"this machine is slow or busy: {samples:,} of {digits:,} digits and {epochs} of "
        f"{format_count(order.epochs, 'epoch')} in each mode, so that all modes have time; --minutes gives them more"
    )
    return replace(order, samples=samples, epochs=epochs)


def _seconds_per_sample(mode: str, speeds: Sequence[float]) -> float:
    """Of one of all samples of a mode, by the speeds of the devices alone."""
    if mode.startswith("solo-"):
        return 1 / speeds[int(mode.removeprefix("solo-"))]
    if mode in (REFERENCE, "cpu-sync"):
        return 1 / (len(speeds) * min(speeds))
    return 1 / sum(speeds)


def train_modes(
    order: DemoOrder,
    results: Results,
    report: Callable[[str], None],
    train: Train | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> None:
    """Train the modes in turn within the budget, and add them to `results`; `report` gets lines of progress.

    A mode whose ranks fail goes to `results.failures`, one that does not fit the remaining time to `results.skipped`;
    any other error ends the demo.
    """
    train = train or _train
    end_s = clock() + 60 * order.minutes
    shortest_s = longest_s = 0.0
    for number, mode in enumerate(results.modes, 1):
        place, modes_left = f"{number}/{len(results.modes)} {mode}", len(results.modes) - number
        began_s = clock()
        left_s = end_s - began_s
        # A mode that takes up to twice as long as the longest so far may be merely slow: let it finish.
        limit_s = max(MODE_SHARE * left_s, min(left_s, 2 * longest_s)) if modes_left else left_s
        if left_s < shortest_s or left_s <= 0:
            results.skipped[mode] = f"the time of the demo is nearly spent; {MORE}"
            report(f"{place} skipped: {results.skipped[mode]}")
            continue
        try:
            summary = results.summaries[mode] = train(order, mode, limit_s)
            took_s = clock() - began_s
            if summary.is_disturbed and end_s - clock() >= (modes_left + 1) * took_s:
                report(f"{place} was disturbed by other programs: measured again")
                summary = results.summaries[mode] = train(order, mode, limit_s)
        except StoppedError:
            if mode not in results.summaries:
                results.skipped[mode] = f"not finished after {limit_s:.0f} s, its part of the demo's time; {MORE}"
                report(f"{place} given up: {results.skipped[mode]}")
                continue
        except RankError as error:
            results.failures[mode] = str(error)
            report(f"{place} failed: {str(error).splitlines()[0]}")
            continue
        shortest_s, longest_s = min(shortest_s or took_s, took_s), max(longest_s, took_s)
        accuracy, seconds = 100 * summary.quality[METRIC], mark(f"{summary.train_seconds:.1f} s", summary.is_disturbed)
        report(f"{place}: {accuracy:.2f} % right, {seconds} of training")


def folder_of(order: DemoOrder, mode: str) -> Path:
    return run_folder(order.out, MODEL, mode, 0)


def _train(order: DemoOrder, mode: str, time_limit_s: float) -> "Summary":
    from uneven.bench.single.run import run_single
    from uneven.results.progress import bars_only

    # The progress lines of seven runs would hide the table.
    with bars_only():
        return run_single(
            Order(
                model=MODEL,
                mode=mode,
                devices=order.devices,
                data=DATA,
                epochs=order.epochs,
                samples=order.samples,
                eval_every=order.epochs,
                out=order.out,
                repeat=False,
                progress=order.progress,
                time_limit_s=time_limit_s,
            )
        )


def _chosen(wanted: Sequence[str] | None, num_devices: int, devices: str) -> tuple[str, ...]:
    """The modes in the order asked for, each once; by default solo runs and PyTorch's DDP first, then ours."""
    allowed = (*(f"solo-{place}" for place in range(num_devices)), REFERENCE, *OURS)
    if wanted is None:
        return allowed
    for mode in wanted:
        if mode not in allowed:
            raise InputError(f"--modes: {mode!r} is none of {', '.join(allowed)} (on {devices})")
        resolve_mode(mode, devices)
    return tuple(dict.fromkeys(wanted))
