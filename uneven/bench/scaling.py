"""`uneven bench scaling`: throughput of 1, 2, ... ranks on this machine, a fitted law, and the cost of compiling.

Called by cli/sweep.py. Every rank has the same number of cores (or one GPU) for any number of ranks, so only the number
of ranks changes. The law is Speedup = N / (1 + alpha (N - 1)): alpha 0 is perfect scaling, 1 is no gain. The prediction
for N ranks is fitted to the other points, because a law with one parameter always matches the point it is fitted to.
The numbers of ranks take turns within each repeat, so that drift of the machine favours none. Disturbed runs count only
if there are no others; the point is then marked and not fitted, see [Note: disturbed figures] in undisturbed.py.

A run's timeline tells alpha, too, without any other run: N ranks whose communication and waiting take r times as long
as their computation are N / (1 + r) times as fast as one, so alpha is r / (N - 1). Where the fitted alpha is larger,
more ranks cost something else than communication, such as memory bandwidth that they share.

A run over machines is started on each of them, by `uneven run --nodes` or another launcher, so this command cannot make
them itself: with `--runs` it reads the folders that they left under `out`, on the machine of rank 0.
"""

import json
import math
import statistics
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from uneven.bench import models
from uneven.bench.interval import interval
from uneven.bench.models.sets import WINDOW
from uneven.bench.single.folders import RunRecord, read_run, read_timeline, write_file
from uneven.bench.single.process import flags, run_uneven
from uneven.bench.single.shape import is_number
from uneven.config import RunConfig, settings_of
from uneven.errors import InputError, MachineError, RankError
from uneven.files import read_json
from uneven.hardware.cores import available_cores
from uneven.hardware.device import Device
from uneven.hardware.preflight import check_device
from uneven.timeline.record import Account


@dataclass(frozen=True, kw_only=True)
class ScalingOrder:
    model: str = "lenet"
    data: str | None = None
    device: str = "cpu"  # or cuda: one GPU per rank
    ranks: tuple[int, ...] = (1, 2)
    policy: str = "balanced"
    samples: int = 4096
    batch_size: int | None = None
    repeats: int = 3
    compiles: tuple[str, ...] = ()  # values of `compile` whose cold start is measured, on one rank


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
class ColdStart:
    """One value of `compile`: the time before the first step, that step, and the mean of all steps."""

    compile: str
    before_s: float  # set-up and compilation, which do not count as training time
    first_ms: float  # the first step
    step_ms: float  # a step on average
    break_even_steps: float | None  # until compiling has paid off against "off"; None if either was disturbed
    is_disturbed: bool = False


@dataclass(frozen=True)
class Scaling:
    unit: str  # "tokens" for text, else "samples"
    alpha: float | None
    points: list[Point]
    cold_starts: list[ColdStart]
    counted: str = "ranks"  # what `Point.ranks` counts: ranks of this machine, or nodes
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
    recipe = models.get(order.model)
    _check(order)
    tokens = WINDOW if recipe.data == "shakespeare" else 1
    runs: dict[int, list[RunRecord]] = {ranks: [] for ranks in order.ranks}
    with tempfile.TemporaryDirectory(prefix="uneven-scaling-") as home:
        for repeat in range(order.repeats):
            for ranks in order.ranks:
                report(f"{ranks} rank{'s' * (ranks > 1)}, run {repeat + 1} of {order.repeats}")
                runs[ranks].append(_run(order, ranks, "off", Path(home) / f"{ranks}-{repeat}"))
        cold = []
        for compile in order.compiles:
            report(f"cold start, compile {compile}")
            cold.append((compile, _run(order, 1, compile, Path(home) / f"compile-{compile}")))
        starts = _cold_starts(cold)
    measured = {ranks: [_measured(record) for record in records] for ranks, records in runs.items()}
    alpha, points = fitted(measured, tokens)
    return Scaling("samples" if tokens == 1 else "tokens", alpha, points, starts)


def scaling_of_nodes(runs: str, tokens: int = 1) -> Scaling:
    """The same of finished runs over machines: `runs` as in '1=one,2=two', `tokens` of a sample."""
    unit = "samples" if tokens == 1 else "tokens"
    measured = {n: [read_measured(folder, n) for folder in folders] for n, folders in parse_runs(runs).items()}
    alpha, points = fitted(measured, tokens)
    return Scaling(unit, alpha, points, [], counted="nodes")


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
    allowed = settings_of(RunConfig)["compile"].choices
    unknown = [compile for compile in order.compiles if compile not in allowed]
    if unknown:
        raise InputError(f"--compiles {unknown[0]!r} must be one of {', '.join(allowed)}")


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
    return Measured(record.summary["samples_per_s"], overhead, record.is_disturbed)


def overhead_of(accounts: Sequence[Account]) -> float | None:
    """Communication and waiting over computation, of all ranks together; None where nothing was computed."""
    computed = sum(account.seconds["compute"] for account in accounts)
    exchanged = sum(account.seconds["communication"] + account.seconds["wait"] for account in accounts)
    return exchanged / computed if computed else None


def parse_runs(text: str) -> dict[int, list[Path]]:
    """The folders of each number of nodes, from '1=one,2=two,2=two-again'."""
    found: dict[int, list[Path]] = {}
    for word in text.split(","):
        nodes, has_folder, folder = word.strip().partition("=")
        if not has_folder or not nodes.isdecimal() or not int(nodes) or not folder:
            raise InputError(
                f"--runs {text!r}: {word.strip()!r} must be a number of nodes and a folder, as in 2=runs/two"
            )
        if any(Path(folder).resolve() == one.resolve() for known in found.values() for one in known):
            raise InputError(f"--runs {text!r}: {folder} is there twice, and a run counts once")
        found.setdefault(int(nodes), []).append(Path(folder))
    if 1 not in found:
        raise InputError(f"--runs {text!r} must have a run of 1 node: speed-ups are against it")
    return dict(sorted(found.items()))


def read_measured(folder: Path, nodes: int) -> Measured:
    """What the run that was saved under `out` in this folder has measured.

    InputError where it has not ended well, or was not on so many machines as far as its timeline tells.
    """
    state, timeline = read_json(folder / "state.json"), read_timeline(folder)
    ends = state["history"][-1:] if isinstance(state, dict) and isinstance(state.get("history"), list) else []
    if not ends or not state.get("finished"):
        raise InputError(f"--runs: no finished run in {folder}: there must be a state.json, as fit(out=...) writes it")
    end = ends[0] if isinstance(ends[0], dict) else {}
    samples, seconds = end.get("samples", math.nan), end.get("train_seconds", math.nan)
    if not is_number(samples) or not is_number(seconds) or not seconds > 0.0:
        raise InputError(f"--runs: state.json in {folder} does not tell how many samples were trained in which time")
    if timeline is None:
        return Measured(samples / seconds, None)
    if timeline.machines and len(timeline.machines) != nodes:
        many = f"{len(timeline.machines)} machine{'s' * (len(timeline.machines) > 1)}"
        raise InputError(f"--runs {nodes}={folder}: that run was on {many}, as its timeline tells")
    return Measured(samples / seconds, overhead_of(timeline.accounts))


def _run(order: ScalingOrder, ranks: int, compile: str, out: Path) -> RunRecord:
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
        "compile": compile,
        "out": out,
    }
    cores = sorted(available_cores())
    own = cores[: ranks * (len(cores) // max(order.ranks))] if order.device == "cpu" else cores
    ended = run_uneven(["bench", "run", *flags(settings), "--json"], own)
    if ended.code:
        raise RankError(f"{ranks} ranks, compile {compile}: {ended.message}")
    record = read_run(out / order.model / mode / f"seed-{json.loads(ended.stdout)['seed']}")
    assert isinstance(record, RunRecord), "a run that ended well left its folder"
    return record


def _cold_starts(runs: Sequence[tuple[str, RunRecord]]) -> list[ColdStart]:
    rows: list[ColdStart] = []
    for compile, record in runs:
        timeline = read_timeline(record.folder)
        assert timeline is not None, "the run has just written it"
        seconds = timeline.accounts[0].seconds
        steps = -(-record.summary["samples"] // record.summary["batch_size"])
        step_ms = 1e3 * record.summary["train_seconds"] / steps
        before_s = seconds["setup"] + seconds["compile"]
        plain = next((row for row in rows if row.compile == "off"), None)
        is_marked = record.is_disturbed or (plain is not None and plain.is_disturbed)
        gain_ms = plain.step_ms - step_ms if plain and not is_marked else 0.0
        even = 1e3 * (before_s - plain.before_s) / gain_ms if plain and gain_ms > 0 else None
        first_ms = next(stop - start for state, start, stop in timeline.lanes[0].spans if state == "compute") / 1e6
        rows.append(ColdStart(compile, before_s, first_ms, step_ms, even, record.is_disturbed))
    return rows


def write_scaling_page(scaling: Scaling, title: str, path: Path) -> None:
    """Write one self-contained page; MachineError if bokeh is missing or the file cannot be written."""
    if find_spec("bokeh") is None:
        raise MachineError("a plot needs bokeh, which is not installed: pip install 'uneven[pages]'")
    from bokeh.embed import file_html
    from bokeh.models.annotations import Whisker
    from bokeh.models.sources import ColumnDataSource
    from bokeh.plotting import figure
    from bokeh.resources import INLINE

    alone = scaling.points[0].per_s
    ranks = [point.ranks for point in scaling.points]
    chart = figure(title=title, width=760, height=460, x_axis_label=scaling.counted, y_axis_label="speed-up")
    most = max(ranks)
    steps = [1 + place * (most - 1) / 60 for place in range(61)]
    chart.line(steps, steps, legend_label="perfect", color="#8C8C8C", line_dash="dashed")
    if scaling.alpha is not None:
        law = [predict(step, scaling.alpha) for step in steps]
        chart.line(steps, law, legend_label=f"N / (1 + {scaling.alpha:.3f} (N - 1))", color="#D55E00", line_width=2)
    halves = [0.0 if point.half_width == float("inf") else point.half_width / alone for point in scaling.points]
    bars = ColumnDataSource(
        {
            "ranks": ranks,
            "low": [point.speedup - half for point, half in zip(scaling.points, halves, strict=True)],
            "high": [point.speedup + half for point, half in zip(scaling.points, halves, strict=True)],
        }
    )
    chart.add_layout(Whisker(base="ranks", lower="low", upper="high", source=bars))
    chart.scatter(ranks, [point.speedup for point in scaling.points], size=9, legend_label="measured", color="#0072B2")
    chart.legend.location = "top_left"
    write_file(path, file_html(chart, INLINE, title))
