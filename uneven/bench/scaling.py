"""`uneven bench scaling`: throughput of 1, 2, ... ranks on this machine, and a fitted law.

Called by cli/bench.py. Every rank has the same number of cores (or one GPU) for any number of ranks, so only their
number changes. The law is Speedup = N / (1 + alpha (N - 1)): alpha 0 is perfect scaling, 1 is no gain. The prediction
for N ranks is fitted to the other points, because a law with one parameter always matches the point it is fitted to.
The numbers of ranks take turns within each repeat, so that drift of the machine favours none. Disturbed runs count only
if there are no others; the point is then marked and not fitted, see [Note: disturbed figures] in undisturbed.py.

A run's timeline tells alpha, too, without any other run: N ranks whose communication and waiting take r times as long
as their computation are N / (1 + r) times as fast as one, so alpha is r / (N - 1). Where the fitted alpha is larger,
more ranks cost something else than communication, such as memory bandwidth that they share.
"""

import json
import statistics
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from uneven.bench import models
from uneven.bench.interval import interval
from uneven.bench.models.sets import KINDS, WINDOWS
from uneven.bench.orders import ScalingOrder
from uneven.bench.single.folders import RunRecord, read_run, read_timeline
from uneven.bench.single.process import flags, run_uneven
from uneven.errors import InputError, MachineError, RankError
from uneven.hardware.cores import available_cores
from uneven.hardware.device import Device
from uneven.hardware.preflight import check_device
from uneven.timeline.record import Account


@dataclass(frozen=True)
class Measured:
    """One run: its speed, and communication and waiting over computation where its timeline tells."""

    samples_per_s: float
    overhead: float | None
    is_disturbed: bool = False


@dataclass(frozen=True)
class Point:
    """The throughput of one number of ranks: measured over the repeats, and predicted from the other points."""

    ranks: int
    per_s: float  # samples or tokens, see Scaling.unit
    half_width: float  # infinite of one run
    speedup: float
    predicted: float | None  # None without other points
    is_disturbed: bool = False  # all of its runs, or those of one rank
    overhead: float | None = None  # communication and waiting over computation, of the timelines
    alpha: float | None = None  # that the timelines tell
    by_timeline: float | None = None  # the speed-up that follows from it


@dataclass(frozen=True)
class Scaling:
    unit: str  # "tokens" for text, else "samples"
    alpha: float | None
    points: list[Point]
    version: int = 1


def fit_alpha(speedups: Sequence[tuple[int, float]]) -> float | None:
    """The least-squares alpha of N / Speedup = 1 + alpha (N - 1); None without a point of more than one rank."""
    squares = sum((ranks - 1) ** 2 for ranks, _ in speedups)
    if not squares:
        return None
    return sum((ranks / speedup - 1.0) * (ranks - 1) for ranks, speedup in speedups) / squares


def predict(ranks: float, alpha: float) -> float:
    return ranks / (1.0 + alpha * (ranks - 1))


def measure_scaling(order: ScalingOrder, report: Callable[[str], None]) -> Scaling:
    """Make all runs; `report` gets lines of progress. RankError with the run's message if one fails."""
    recipe, order = models.get(order.model), replace(order, ranks=tuple(sorted(set(order.ranks))))
    _check(order)
    tokens = WINDOWS.get(KINDS[recipe.data], 1)
    runs: dict[int, list[RunRecord]] = {ranks: [] for ranks in order.ranks}
    with tempfile.TemporaryDirectory(prefix="uneven-scaling-") as home:
        for repeat in range(order.repeats):
            for ranks in order.ranks:
                report(f"{ranks} rank{'s' * (ranks > 1)}, run {repeat + 1} of {order.repeats}")
                runs[ranks].append(_run(order, ranks, Path(home) / f"{ranks}-{repeat}"))
        measured = {ranks: [_measured(record) for record in records] for ranks, records in runs.items()}
    alpha, points = fitted(measured, tokens)
    return Scaling("samples" if tokens == 1 else "tokens", alpha, points)


def _check(order: ScalingOrder) -> None:
    if 1 not in order.ranks or min(order.ranks) < 1:
        raise InputError(f"--ranks {','.join(map(str, order.ranks))} must be numbers from 1 on, with 1 among them")
    if order.device not in ("cpu", "cuda"):
        raise InputError(f"--device {order.device!r} must be cpu or cuda")
    cores = len(available_cores())
    if order.device == "cpu" and max(order.ranks) > cores:
        raise MachineError(f"--ranks {max(order.ranks)} on {cores} cores: every rank needs a core of its own")
    for index in range(max(order.ranks) if order.device == "cuda" else 0):
        check_device(Device("cuda", index))


def fitted(runs: Mapping[int, Sequence[Measured]], tokens: int) -> tuple[float | None, list[Point]]:
    """The law's alpha, which needs two undisturbed points, and all points."""
    means: dict[int, tuple[float, float]] = {}
    counted: dict[int, Sequence[Measured]] = {}
    disturbed: set[int] = set()
    for ranks, measured in runs.items():
        clean = [one for one in measured if not one.is_disturbed]
        if not clean:
            disturbed.add(ranks)
        counted[ranks] = clean or measured
        means[ranks] = interval([tokens * one.samples_per_s for one in counted[ranks]])
    alone = means[1][0]
    speedups = [(ranks, mean / alone) for ranks, (mean, _) in means.items()]
    fits = [] if 1 in disturbed else [(ranks, speedup) for ranks, speedup in speedups if ranks not in disturbed]
    points = []
    for ranks, (mean, half) in means.items():
        others = fit_alpha([point for point in fits if point[0] != ranks])
        predicted = None if others is None else predict(ranks, others)
        overheads = [one.overhead for one in counted[ranks] if one.overhead is not None]
        overhead = statistics.fmean(overheads) if overheads and ranks > 1 else None
        points.append(
            Point(
                ranks=ranks,
                per_s=mean,
                half_width=half,
                speedup=mean / alone,
                predicted=predicted if ranks > 1 else 1.0,
                is_disturbed=ranks in disturbed or 1 in disturbed,
                overhead=overhead,
                alpha=None if overhead is None else overhead / (ranks - 1),
                by_timeline=None if overhead is None else ranks / (1.0 + overhead),
            )
        )
    return fit_alpha(fits), points


def _measured(record: RunRecord) -> Measured:
    timeline = read_timeline(record.folder)
    overhead = None if timeline is None else overhead_of(timeline.accounts)
    return Measured(record.summary.samples_per_s, overhead, record.is_disturbed)


def overhead_of(accounts: Sequence[Account]) -> float | None:
    """Communication and waiting over computation, of all ranks together; None where nothing was computed."""
    computed = sum(account.seconds["compute"] for account in accounts)
    exchanged = sum(account.seconds["communication"] + account.seconds["wait"] for account in accounts)
    return exchanged / computed if computed else None


def _run(order: ScalingOrder, ranks: int, out: Path) -> RunRecord:
    """One run in a fresh process, on the cores of so many ranks."""
    mode = "solo-0" if ranks == 1 else f"cpu-{order.policy}"
    names = ["cpu"] * ranks if order.device == "cpu" else [f"cuda:{place}" for place in range(ranks)]
    settings = {
        "model": order.model,
        "mode": mode,
        "devices": ",".join(names),
        "data": order.data,
        "samples": order.samples,
        "batch_size": order.batch_size,
        "epochs": 1,
        "out": out,
    }
    cores = sorted(available_cores())
    own = cores[: ranks * (len(cores) // max(order.ranks))] if order.device == "cpu" else cores
    ended = run_uneven(["bench", "run", *flags(settings), "--json"], own)
    if ended.code:
        raise RankError(f"{ranks} ranks: {ended.message}")
    record = read_run(out / order.model / mode / f"seed-{json.loads(ended.stdout)['seed']}")
    assert isinstance(record, RunRecord), "a run that ended well left its folder"
    return record
