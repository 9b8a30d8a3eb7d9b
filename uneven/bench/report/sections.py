"""A report as sections of text and tables, and as Markdown; page.py makes an HTML page of the same sections.

Called by cli/bench_results.py. Invariant: a disturbed speed carries a mark wherever it is printed.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from uneven.bench.report.build import ModelReport, ModeReport, Report
from uneven.bench.report.model_runs import MARGIN
from uneven.bench.undisturbed import FOOTNOTE, MARK, mark
from uneven.timeline.verdict import Verdict

MOST_EPOCHS = 10  # rows of a table over epochs, evenly spread, with the first and the last
IMPOSSIBLE = 1.05  # an estimated efficiency above this cannot be real: runs differ by less than 5 % by chance
NOTES = (
    "Quality is the mean over seeds with its 95 % interval (Student's t), on the whole test set, of the saved state. "
    "Time is training alone: no start-up, no evaluation; seconds and samples/s are medians over seeds. Runs that other "
    "programs disturbed count for quality; figures of time are those of the other seeds, where there are any.",
    "Efficiency is joint samples/s over the sum of the devices' solo samples/s: by alternating pairs of segments where "
    "an interval stands beside it, where all devices train by themselves at the same time; else (~) an estimate from "
    "runs one after the other. Slices of one GPU share its memory, so that such an estimate is too low for them.",
    "At equal time: the quality when the best single device has finished. With a number of epochs it is that of runs "
    "made for it, whose epochs and schedule fit that time; else that of the last evaluation before, or of the end, "
    "over all seeds, where the mode had ended by then.",
    "Busy is the share of the training time in which a device computes (a time-weighted mean). Samples: each device's "
    "share of them, in percent. On CUDA devices PyTorch's DDP waits inside backward, which counts as computing.",
    "The verdict: what you own is the sum of the devices' speeds alone, what equal-batch DDP could give at most is the "
    "slowest of them times their number, and the rest is what the devices would have trained in the time that they "
    "spent otherwise; other includes steps that were slower than alone, absent is the time that a device did not train "
    "while another did. Where efficiency was measured by pairs, the speeds are those of the pairs.",
)
DISTURBED = f"{FOOTNOTE}. Repeat these runs on an idle machine: 'uneven bench sweep --force'."


@dataclass(frozen=True)
class Table:
    """Cells as text; `of` leaves out columns that are empty in every row."""

    head: list[str]
    rows: list[list[str]]

    @classmethod
    def of(cls, head: Sequence[str], rows: Sequence[Sequence[str]]) -> "Table":
        assert all(len(row) == len(head) for row in rows), "a cell for every column"
        filled = [place for place in range(len(head)) if place == 0 or any(row[place] for row in rows)]
        return cls([head[place] for place in filled], [[row[place] for place in filled] for row in rows])


Block: TypeAlias = str | Table | Verdict


@dataclass(frozen=True)
class Section:
    title: str
    blocks: list[Block] = field(default_factory=list)
    model: ModelReport | None = None  # set for the section of a model
    is_folded: bool = False  # definitions, which a page shows when asked to


def render_markdown(report: Report) -> str:
    first, *others = sections_of(report)
    parts = [f"# {first.title}", *map(_block, first.blocks)]
    for section in others:
        parts += [f"## {section.title}", *map(_block, section.blocks)]
    return "\n\n".join(parts) + "\n"


def _block(block: Block) -> str:
    if isinstance(block, Verdict):
        return f"**{_escape(block.sentence)}** {_escape(block.rest)}".rstrip()
    if isinstance(block, str):
        return f"`{block[2:]}`" if block.startswith("$ ") else _escape(block)
    lines = [block.head, ["---"] * len(block.head), *([_cell(cell) for cell in row] for row in block.rows)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _cell(text: str) -> str:
    """A cell is one line, and has no bar."""
    return " ".join(_escape(text).split()).replace("|", "\\|")


def _escape(text: str) -> str:
    """Escape the mark of disturbed figures, which would start emphasis in Markdown."""
    return text.replace(MARK, f"\\{MARK}")


def sections_of(report: Report) -> list[Section]:
    """All sections in order: results first, then what failed, and at the end how to read and repeat them."""
    verdicts = [model.verdict for model in report.models if model.verdict is not None]
    hardware = [f"{host.processor}, torch {host.torch}, uneven {host.uneven}" for host in report.hardware]
    repeat = [Section("How to make it again", [f"$ {command}" for command in report.commands])]
    return [
        Section("Benchmark report", [*verdicts, *hardware]),
        *(section for model in report.models for section in (_model(model), _details(model))),
        _failed(report),
        *(repeat if report.commands else []),
        Section("What the figures mean", [*NOTES], is_folded=True),
    ]


def _model(model: ModelReport) -> Section:
    settings = model.settings
    epochs = f"{settings['epochs']} epoch{'s' * (settings['epochs'] != 1)}"
    facts = f"{settings['data']}, {epochs}, {settings['precision']}, compile {settings['compile']}"
    if settings.get("eval_samples"):
        facts += f", evaluated on the first {settings['eval_samples']:,} test samples only"
    published = f" Published: {value(model.metric, model.published)} ({model.source})." if model.source else ""
    if published and settings["epochs"] != model.recipe_epochs:
        published += f" The recipe, which is held against it, has {model.recipe_epochs} epochs."
    solo = (
        f" Measured gap of the devices {model.gap:.2f}: equal batches could reach {model.sync_bound:.0%} at most."
        if model.gap and model.sync_bound
        else ""
    )
    blocks: list[Block] = [f"{facts}.{published}{solo}", _quality(model), _time(model), *_idle(model)]
    estimates = [row for row in model.rows if row.efficiency_half is None and not row.is_efficiency_disturbed]
    most = max((row.efficiency or 0.0 for row in estimates), default=0.0)
    if most > IMPOSSIBLE:
        blocks.append(
            f"Doubtful: an efficiency of ~{most:.2f} is impossible. Other programs may have used the cores "
            "during some runs; repeat them on an idle machine, or measure by pairs (--efficiency)."
        )
    batches = sorted({row.efficiency_batch for row in model.rows if row.efficiency_batch is not None})
    if batches:
        each = " or ".join(map(str, batches))
        blocks.append(f"Efficiency by pairs was measured with {each} samples per device and step.")
    too_long = [f"{row.mode} {value(model.metric, row.passed)}" for row in model.rows if row.passed is not None]
    if too_long:
        modes = ", ".join(too_long)
        blocks.append(f"Trained too long: on the way the {model.metric} was better than at the end ({modes}).")
    if any(row.is_disturbed or (row.efficiency and row.is_efficiency_disturbed) for row in model.rows):
        blocks.append(DISTURBED)
    if model.best is not None:
        margin = f"within {MARGIN[model.metric]:g} of solo's"
        blocks.append(f"Best: {model.best}, the fastest mode whose mean {model.metric} is {margin}.")
    return Section(f"{model.title} ({model.model})", blocks, model)


def _details(model: ModelReport) -> Section:
    """Folded on a page: every run, and how it went epoch by epoch."""
    found = {
        "Training loss and quality at the end of an epoch, mean over seeds:": trajectories(model),
        "Every run, and what other programs took meanwhile:": every_run(model),
    }
    blocks: list[Block] = [block for title, table in found.items() if table is not None for block in (title, table)]
    return Section(f"{model.model}: every run, epoch by epoch", blocks, is_folded=True)


def _quality(model: ModelReport) -> Table:
    target = f"s to {model.metric} {value(model.metric, model.target)}"
    head = ["mode", "seeds", "batch", model.metric, "vs published", "train s", "samples/s", "speed-up", "efficiency"]
    head += [target, "at equal time", "loss gap"]
    return Table.of(head, [_quality_row(model, row) for row in model.rows])


def _quality_row(model: ModelReport, row: ModeReport) -> list[str]:
    quality = value(model.metric, row.quality)
    quality += f" +- {value(model.metric, row.quality_half)}" if row.quality_half is not None else ""
    reached = "" if row.target_s is None else f"{'<= ' if row.target_is_bound else ''}{row.target_s:.1f}"
    if row.target_s is not None and row.target_seeds < row.target_of_seeds:
        reached += f" ({row.target_seeds} of {row.target_of_seeds} seeds)"
    was_watched = any(model.metric in entry for run in row.trajectories for entry in run)
    if was_watched and row.has_speed and model.target is not None and not row.target_seeds:
        reached = "not reached"
    return [
        row.mode,
        str(row.seeds),
        row.batch,
        "(for its speed only)" if row.is_for_speed else quality,
        "" if row.vs_published is None else signed(model.metric, row.vs_published),
        mark(number(row.train_s, ".1f"), row.is_disturbed) if row.has_speed else "(takes turns)",
        mark(number(row.samples_per_s, ",.0f"), row.is_disturbed),
        mark(number(row.speedup, ".2f", "x"), row.is_disturbed or model.is_solo_disturbed),
        mark(_efficiency(row), row.is_efficiency_disturbed),
        mark(reached, row.is_disturbed),
        mark(_equal_time(model, row), row.is_equal_time_disturbed),
        number(row.loss_gap, "+.6f" if model.metric == "mse" else "+.4f"),
    ]


def _equal_time(model: ModelReport, row: ModeReport) -> str:
    """Quality when the best single device has finished; of a single device it would be its own."""
    if row.equal_time is None or row.mode.startswith("solo-"):
        return ""
    how = " (ended)" if row.equal_time_is_end else ""
    if row.equal_time_epochs is not None:
        how = f" ({row.equal_time_epochs} epochs{'' if row.equal_time_is_end else ', not all ended'})"
    return f"{value(model.metric, row.equal_time)}{how}"


def _time(model: ModelReport) -> Table:
    head = ["mode", "busy", "samples", "rounds", "communication ms", "wait ms", "peak memory"]
    rows = [
        [
            row.mode,
            ", ".join(f"{share:.0%}" for share in row.utilisation.values()),
            ":".join(f"{share:.0%}"[:-1] for share in row.sample_shares),
            number(row.rounds, ","),
            number(row.transfer_ms, ".2f"),
            number(row.wait_ms, ".2f"),
            "" if row.peak_memory_bytes is None else f"{row.peak_memory_bytes / 1e6:,.0f} MB",
        ]
        for row in model.rows
    ]
    return Table.of(head, rows)


def _idle(model: ModelReport) -> list[Block]:
    """Idle seconds by cause, of all devices together; empty if no run has a timeline."""
    causes = sorted({cause for row in model.rows for cause in row.idle_s})
    if not causes:
        return []
    rows = [[row.mode, *(number(row.idle_s.get(cause), ".2f") for cause in causes)] for row in model.rows]
    return ["Idle, in seconds of all devices together, mean over seeds:", Table.of(["mode", *causes], rows)]


def _efficiency(row: ModeReport) -> str:
    if row.efficiency is None:
        return ""
    if row.efficiency_half is None:
        return f"~{row.efficiency:.2f}"
    return f"{row.efficiency:.3f} +- {row.efficiency_half:.3f} ({row.efficiency_pairs} pairs)"


def _failed(report: Report) -> Section:
    blocks: list[Block] = ["No run failed."]
    if report.failed:
        blocks = [Table.of(["run", "reason"], [[run["folder"], run["reason"]] for run in report.failed])]
    blocks += [f"Not run: {mode} ({reason})." for mode, reason in report.skipped.items()]
    return Section("What failed, and what could not be", blocks)


def trajectories(model: ModelReport) -> Table | None:
    """Training loss and quality of every mode, mean over seeds, at some epochs: those with an evaluation, if any."""
    modes = [row for row in model.rows if row.trajectories and row.trajectories[0]]
    entries = [entry for row in modes for entry in row.trajectories[0]]
    evaluated = {int(entry["epoch"]) for entry in entries if model.metric in entry}
    epochs = _evenly(sorted(evaluated if len(evaluated) > 1 else {int(entry["epoch"]) for entry in entries}))
    if len(epochs) < 2:
        return None
    rows = [[str(epoch), *(_at(model, row, epoch) for row in modes)] for epoch in epochs]
    return Table.of(["epoch", *(row.mode for row in modes)], rows)


def _at(model: ModelReport, row: ModeReport, epoch: int) -> str:
    entries = [entry for run in row.trajectories for entry in run if entry["epoch"] == epoch]
    losses = [float(entry["train_loss"]) for entry in entries if entry.get("train_loss") is not None]
    found = [float(entry[model.metric]) for entry in entries if model.metric in entry]
    loss = f"{sum(losses) / len(losses):.{6 if model.metric == 'mse' else 4}f}" if losses else ""
    return f"{loss}, {value(model.metric, sum(found) / len(found))}" if found else loss


def every_run(model: ModelReport) -> Table:
    """Each run's quality and seconds, and beside them what other programs took meanwhile."""
    has_several = any(run["runs_at_once"] > 1 for row in model.rows for run in row.runs)
    rows = []
    for row, run in ((mode, run) for mode in model.rows for run in mode.runs):
        taken = run["interference"] or {}
        cells = [
            row.mode,
            str(run["seed"]),
            number(run["epochs"], "d"),
            value(model.metric, run["quality"]),
            mark(number(run["train_s"], ".2f"), run["is_disturbed"]) if row.has_speed else "(takes turns)",
            number(taken.get("stolen_share"), ".1%"),
            number(taken.get("foreign_cores"), ".2f"),
            number(taken.get("pressure_share"), ".1%"),
        ]
        rows.append([*cells, str(run["runs_at_once"]) if has_several else ""])
    head = ["mode", "seed", "epochs", model.metric, "train s", "stolen", "others' cores", "pressure", "runs at once"]
    return Table.of(head, rows)


def _evenly(entries: Sequence[Any]) -> list[Any]:
    """At most MOST_EPOCHS of them, with the first and the last."""
    last = len(entries) - 1
    if last < MOST_EPOCHS:
        return list(entries)
    return [entries[round(place * last / (MOST_EPOCHS - 1))] for place in range(MOST_EPOCHS)]


def value(metric: str, quality: float | None) -> str:
    """A quality: an accuracy in percent."""
    if quality is None:
        return ""
    return f"{100 * quality:.2f} %" if metric == "accuracy" else f"{quality:.{6 if metric == 'mse' else 4}f}"


def signed(metric: str, difference: float) -> str:
    """A difference of two qualities."""
    return f"{100 * difference:+.2f} pp" if metric == "accuracy" else f"{difference:+.{6 if metric == 'mse' else 3}f}"


def number(found: float | None, form: str, unit: str = "") -> str:
    return "" if found is None else format(found, form) + unit
