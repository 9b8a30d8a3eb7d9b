"""`uneven bench strategies`: memory, bytes sent and step time of every strategy, ours and PyTorch's.

Called by cli/strategies.py. Every strategy trains in fresh processes (rank.py); launch/launcher.py is not used: its
ranks make a Worker with a model, an optimizer and a feed of its own, and here every byte of a rank is compared with the
strategy's formula. The first row trains the model in one process;
the others are compared with its result. A disturbed time is marked, see [Note: disturbed figures] in undisturbed.py;
bytes do not depend on other programs.
"""

import itertools
import json
import math
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from uneven.bench.interval import interval
from uneven.bench.models import gpt
from uneven.bench.orders import StrategiesOrder
from uneven.bench.single.process import Child, Ended
from uneven.bench.strategies.memory import SHARDED_BY_LAYER, SHARDED_CATEGORIES, Held
from uneven.bench.strategies.task import ALONE, BATCH, DENSE, MUON, MUON_ALONE, ROWS, StrategyTask, reference_of
from uneven.bench.undisturbed import mark, measure_undisturbed, to_marks
from uneven.comm.store import open_store
from uneven.errors import InputError, RankError
from uneven.hardware.cores import assign_cores, available_cores
from uneven.hardware.device import parse_device, parse_devices
from uneven.hardware.interference import Interference
from uneven.hardware.preflight import check_device
from uneven.policy.apportion import check_shares

LEAST_STEPS = 3  # two of them are warm-up
MUONS = {MUON, MUON_ALONE}  # in bf16 a step takes seconds on an old CPU: few steps, and none in a quick run
# Muon orthogonalises in bf16: one process that only splits its batch into four parts drifts by 1.1e-2.
MOST_DRIFT = {DENSE: 1e-4, MUON_ALONE: 5e-2}
PAIRS = (("ddp-bucketed", "torch-ddp"), ("zero1", "torch-zero1"), ("fsdp", "torch-fsdp"))
POLL_S = 0.05
GRACE_S = 5.0  # for the other ranks to notice that one has failed
AS_FAST = 0.97  # the lower end of the interval of "at least as fast"


@dataclass
class StrategyRow:
    """One strategy; `ranks` has each rank's measurements, or `cause` says why there are none."""

    name: str
    ranks: list[dict[str, Any]] = field(default_factory=list)
    cause: str | None = None
    loss_difference: float = math.nan
    is_disturbed: bool = False
    interference: dict[str, Any] | None = None
    is_good: bool = field(init=False)

    def __post_init__(self) -> None:
        self.is_good = self.cause is None and self.is_in_sync

    @property
    def largest(self) -> dict[str, Any]:
        """The measurements of the rank that holds most."""
        return max(self.ranks, key=lambda rank: Held(**rank["held"]).total)

    @property
    def is_in_sync(self) -> bool:
        """Replicated params are bit-equal on all ranks, and the model is within MOST_DRIFT of one rank's."""
        drift: float = self.ranks[0]["drift"]
        return not any(rank["unequal"] for rank in self.ranks) and drift <= MOST_DRIFT[reference_of(self.name)]

    @property
    def summary(self) -> str:
        held, slowest = Held(**self.largest["held"]).total, max(rank["seconds"] for rank in self.ranks)
        step_ms = mark(f"{1e3 * slowest:.0f}", self.is_disturbed)
        return f"{held / 1e6:.1f} MB held, {step_ms} ms a step, {'' if self.is_in_sync else 'NOT '}in sync"

    @property
    def is_sharded(self) -> bool:
        return self.name in SHARDED_CATEGORIES or self.name in SHARDED_BY_LAYER

    def parts(self) -> list[float]:
        """Each rank's part of the bytes that the strategy shards; `uncut` are the replicated ones."""
        sharded = [Held(**{**rank["held"], "other": 0}).total - rank["uncut"] for rank in self.ranks]
        return [own / sum(sharded) for own in sharded]


@dataclass
class Paired:
    """Seconds per step of two strategies in alternating segments; a ratio above 1 means that ours is faster."""

    ours: str
    theirs: str
    our_s: list[float]
    their_s: list[float]
    is_disturbed: bool = False
    interference: dict[str, Any] | None = None
    interval: tuple[float, float] = field(init=False)
    is_as_fast: bool | None = field(init=False)  # null if the pairs were disturbed

    def __post_init__(self) -> None:
        self.interval = interval([b / a for a, b in zip(self.our_s, self.their_s, strict=True)])
        mean, half = self.interval
        self.is_as_fast = None if self.is_disturbed else mean - half > AS_FAST


@dataclass(frozen=True)
class RowsDocument:
    """What --json prints."""

    order: StrategiesOrder
    rows: list[StrategyRow]
    version: int = 1


@dataclass(frozen=True)
class PairsDocument:
    """What --paired --json prints."""

    order: StrategiesOrder
    pairs: list[Paired]
    version: int = 1


def resolved(order: StrategiesOrder) -> StrategiesOrder:
    """With the defaults that depend on the rest; InputError for what does not go together."""
    quick, paired = order.is_quick, order.is_paired
    shares = order.shares
    if shares is not None and order.ranks not in (None, len(shares)):
        raise InputError(f"--nproc {order.ranks} with --shares {shares}: give one share per rank, or leave --nproc out")
    if paired and shares is not None:
        raise InputError("--paired with --shares: PyTorch's strategies have equal shares only; leave --shares out")
    if paired and order.redundancy:
        raise InputError("--paired with --redundancy: PyTorch's strategies keep no copies; leave --redundancy out")
    return replace(
        order,
        model=order.model or ("gpt-small" if quick else "gpt-medium" if paired else "gpt"),
        ranks=order.ranks or (len(shares) if shares else 2 if quick or paired else 4),
        steps=order.steps or (3 if paired else 4 if quick else 6),
    )


def measure_strategies(order: StrategiesOrder, report: Callable[[str], None]) -> list[StrategyRow]:
    """All rows in turn; `report` gets lines of progress. A row that fails has its `cause`, and the others still run."""
    order = _checked(order)
    rows: list[StrategyRow] = []
    with tempfile.TemporaryDirectory(prefix="uneven-strategies-") as home:
        names = _rows(order)
        for number, name in enumerate(names, 1):
            report(f"row {number} of {len(names)}: {name}")
            try:
                ranks, interference = _run_undisturbed(_task(order, name, Path(home)), Path(home) / name)
            except RankError as error:
                rows.append(StrategyRow(name, cause=str(error)))
                report(f"  failed: {error}")
                continue
            alone = next((row for row in rows if row.name == reference_of(name) and row.cause is None), None)
            expected = ranks[0]["losses"][-1] if alone is None else alone.ranks[0]["losses"][-1]
            difference = ranks[0]["losses"][-1] - expected
            rows.append(StrategyRow(name, ranks, loss_difference=difference, **to_marks(interference)))
            report(f"  {rows[-1].summary}")
    return rows


def measure_pairs(order: StrategiesOrder, report: Callable[[str], None]) -> list[Paired]:
    """Our strategies against PyTorch's in alternating segments; RankError if one cannot be trained."""
    order = _checked(order)
    pairs = []
    with tempfile.TemporaryDirectory(prefix="uneven-strategies-") as home:
        for ours, theirs in PAIRS:
            if order.only is not None and not {ours, theirs} & set(order.only):
                continue
            report(f"{ours} and {theirs} in turn")
            task = _task(order, ours, Path(home), against=theirs)
            (first, *_), interference = _run_undisturbed(task, Path(home) / ours)
            pairs.append(Paired(ours, theirs, first["ours"], first["theirs"], **to_marks(interference)))
    return pairs


def _run_undisturbed(task: StrategyTask, folder: Path) -> tuple[list[dict[str, Any]], Interference]:
    """The ranks' measurements, and the interference while they ran; every attempt gets its own folder."""
    attempts = itertools.count(1)
    return measure_undisturbed(lambda: run_ranks(task, folder / f"{next(attempts)}"))


def _rows(order: StrategiesOrder) -> list[str]:
    """The rows to run, in the order of ROWS; each brings the row that it is compared with."""
    chosen = set(ROWS if order.only is None else order.only)
    if order.only is None and order.is_quick:
        chosen -= MUONS
    chosen |= {reference_of(name) for name in chosen}
    return [name for name in ROWS if name in chosen]


def _task(order: StrategiesOrder, name: str, home: Path, against: str | None = None) -> StrategyTask:
    ranks = 1 if name in ALONE else order.ranks or 1
    # Cores as for CPU ranks; ranks that share a GPU need them too, since Gloo sums on the host.
    plan = assign_cores(parse_devices(["cpu"] * ranks), available_cores())
    return StrategyTask(
        row=name,
        model=order.model or "",
        ranks=ranks,
        shares=None if order.shares is None or name in ALONE else list(order.shares),
        steps=LEAST_STEPS if name in MUONS else order.steps or LEAST_STEPS,
        device=order.device,
        cores=[list(cores) for cores in plan.cores],
        threads=list(plan.threads),
        home=str(home),
        against=against,
        pairs=order.pairs,
        redundancy=order.redundancy,
    )


def _checked(order: StrategiesOrder) -> StrategiesOrder:
    order = resolved(order)
    gpt.size_of(order.model or "")
    if not 1 < (order.ranks or 0) <= BATCH:
        raise InputError(f"--nproc {order.ranks} must be from 2 to {BATCH}, the samples of a batch")
    if (order.steps or 0) < LEAST_STEPS:
        raise InputError(f"--steps {order.steps} must be at least {LEAST_STEPS}: the first two are warm-up")
    if order.shares is not None:
        try:
            check_shares(order.shares)
        except ValueError as error:
            raise InputError(f"--shares: {error}") from None
    unknown = [name for name in order.only or () if name not in ROWS]
    if unknown:
        raise InputError(f"--only {unknown[0]!r} must be one of {', '.join(ROWS)}")
    device = parse_device(order.device)
    if device.speed != 1.0 or device.percent is not None:
        raise InputError(f"--device {order.device!r} must be cpu or a whole GPU, as in cuda:0")
    check_device(device)
    return order


def run_ranks(task: StrategyTask, folder: Path) -> list[dict[str, Any]]:
    """Every rank's results, in rank order; RankError with the cause if one failed. This process hosts the store."""
    folder.mkdir(parents=True)
    (folder / "task.json").write_text(json.dumps(asdict(task)))
    store, port = open_store()
    ranks: list[Child] = []
    try:
        for rank in range(task.ranks):
            words = ["uneven.bench.strategies.rank", str(folder), str(rank), str(port)]
            with open(folder / f"rank-{rank}.log", "wb") as log:
                ranks.append(Child(words, {"OMP_NUM_THREADS": str(task.threads[rank])}, stdout=log, stderr=log))
        codes = _wait([rank.process for rank in ranks])
    finally:
        for started in ranks:
            started.end()
        del store
    return _results(codes, folder)


def _wait(running: Sequence["subprocess.Popen[bytes]"]) -> list[int | None]:
    """Exit codes, once all processes have ended or GRACE_S after the first failure; None for one that still runs."""
    deadline = math.inf
    while True:
        codes = [process.poll() for process in running]
        now = time.monotonic()
        if None not in codes or now > deadline:
            return codes
        if any(codes):
            deadline = min(deadline, now + GRACE_S)
        time.sleep(POLL_S)


def _results(codes: Sequence[int | None], folder: Path) -> list[dict[str, Any]]:
    """RankError with the cause: the last line of a rank that was killed, or the error of the rank that failed first."""
    files = [folder / f"rank-{rank}.json" for rank in range(len(codes))]
    results = [json.loads(file.read_text()) if file.exists() else None for file in files]
    for rank, (code, result) in enumerate(zip(codes, results, strict=True)):
        if code is not None and result is None:
            log = (folder / f"rank-{rank}.log").read_text(errors="replace")
            raise RankError(f"rank {rank}: {Ended(code, '', log).message}")
    failed = [
        (result["failed_at"], rank, result["cause"])
        for rank, result in enumerate(results)
        if result is not None and "cause" in result
    ]
    if failed:
        _, rank, cause = min(failed)
        raise RankError(f"rank {rank}: {cause}")
    return [result for result in results if result is not None]
