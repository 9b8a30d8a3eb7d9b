"""A report as sections of text and tables, and as Markdown; page.py makes an HTML page of the same sections.

Called by cli/sweep.py. Invariant: a disturbed speed carries a mark wherever it is printed.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from uneven.bench.report.build import MARGIN, ModelReport, ModeReport, Report
from uneven.bench.undisturbed import FOOTNOTE, MARK, mark
from uneven.timeline.verdict import Verdict

IMPOSSIBLE = 1.05  # an estimated efficiency above this cannot be real: runs differ by less than 5 % by chance
NOTES = (
    "Quality is the mean over seeds with its 95 % interval (Student's t), on the whole test set, of the saved state. "
    "Time is training alone: no start-up, no evaluation; seconds and samples/s are medians over seeds.",
    "Efficiency is joint samples/s over the sum of the devices' solo samples/s: by alternating pairs of segments where "
    "an interval stands beside it, else (~) an estimate from runs one after the other.",
    "Busy is the share of the training time in which a device computes (a time-weighted mean). Samples: each device's "
    "share of them, in percent. On CUDA devices PyTorch's DDP waits inside backward, which counts as computing.",
    "The verdict: what you own is the sum of the devices' speeds alone, what equal-batch DDP could give at most is the "
    "slowest of them times their number, and the rest is what the devices would have trained in the time that they "
    "spent otherwise; other includes steps that were slower than alone.",
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
        kept = [place for place in range(len(head)) if place == 0 or any(row[place] for row in rows)]
        return cls([head[place] for place in kept], [[row[place] for place in kept] for row in rows])


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
    lines = [block.head, ["---"] * len(block.head), *([_escape(cell) for cell in row] for row in block.rows)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _escape(text: str) -> str:
    """Escape the mark of disturbed figures, which would start emphasis in Markdown."""
    return text.replace(MARK, f"\\{MARK}")


def sections_of(report: Report) -> list[Section]:
    """All sections in order: results first, then what failed, and at the end how to read and repeat them."""
    verdicts = [model.verdict for model in report.models if model.verdict is not None]
    return [
        Section("Benchmark report", [*verdicts, *_hardware(report)]),
        *map(_model, report.models),
        _failed(report),
        *(
            [Section("How to make it again", [f"$ {command}" for command in report.commands])]
            if report.commands
            else []
        ),
        Section("What the figures mean", [*NOTES], is_folded=True),
    ]


def _hardware(report: Report) -> list[str]:
    return [
        f"{host.get('processor', 'unknown CPU')}, torch {host.get('torch', '?')}, uneven {host.get('uneven', '?')}"
        for host in report.hardware
    ]


def _model(model: ModelReport) -> Section:
    settings = model.settings
    facts = f"{settings['data']}, {settings['epochs']} epochs, {settings['precision']}, compile {settings['compile']}"
    if settings.get("eval_samples"):
        facts += f", evaluated on the first {settings['eval_samples']:,} test samples only"
    published = f" Published: {_value(model, model.published)} ({model.source})." if model.source else ""
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
            f"Doubtful: ~{most:.2f} of what the devices do alone cannot be. Other programs may have had the cores "
            "during some runs; repeat them on an idle machine, or measure by pairs (--efficiency)."
        )
    batches = sorted({row.efficiency_batch for row in model.rows if row.efficiency_batch is not None})
    if batches:
        each = " or ".join(map(str, batches))
        blocks.append(f"Efficiency by pairs was measured with {each} samples per device and step.")
    passed = [f"{row.mode} {_value(model, row.passed)}" for row in model.rows if row.passed is not None]
    if passed:
        modes = ", ".join(passed)
        blocks.append(f"Trained too long: on the way the {model.metric} was better than at the end ({modes}).")
    if any(row.is_disturbed or (row.efficiency and row.is_efficiency_disturbed) for row in model.rows):
        blocks.append(DISTURBED)
    if model.best is not None:
        margin = MARGIN.get(model.metric, 0.0)
        blocks.append(f"Best: {model.best}, the fastest mode whose mean {model.metric} is within {margin:g} of solo's.")
    return Section(f"{model.title} ({model.model})", blocks, model)


def _quality(model: ModelReport) -> Table:
    target = f"s to {model.metric} {_value(model, model.target)}"
    head = ["mode", "seeds", "batch", model.metric, "vs published", "train s", "samples/s", "speed-up", "efficiency"]
    head += [target, "loss gap"]
    return Table.of(head, [_quality_row(model, row) for row in model.rows])


def _quality_row(model: ModelReport, row: ModeReport) -> list[str]:
    if row.is_for_speed:
        quality = "(for its speed only)"
    else:
        quality = _value(model, row.quality)
        quality += f" +- {_value(model, row.quality_half)}" if row.quality_half is not None else ""
    reached = "" if row.target_s is None else f"{'<= ' if row.target_is_bound else ''}{row.target_s:.1f}"
    if row.target_s is not None and row.target_seeds < row.seeds:
        reached += f" ({row.target_seeds} of {row.seeds} seeds)"
    return [
        row.mode,
        str(row.seeds),
        row.batch,
        quality,
        "" if row.vs_published is None else _signed(model, row.vs_published),
        mark(_number(row.train_s, ".1f"), row.is_disturbed) if row.has_speed else "(takes turns)",
        mark(_number(row.samples_per_s, ",.0f"), row.is_disturbed),
        mark(_number(row.speedup, ".2f", "x"), row.is_disturbed or model.is_solo_disturbed),
        mark(_efficiency(row), row.is_efficiency_disturbed),
        mark(reached, row.is_disturbed),
        _number(row.loss_gap, "+.4f"),
    ]


def _time(model: ModelReport) -> Table:
    head = ["mode", "busy", "samples", "anchor", "rounds", "communication ms", "wait ms", "peak memory"]
    return Table.of(head, [_time_row(row) for row in model.rows])


def _time_row(row: ModeReport) -> list[str]:
    return [
        row.mode,
        ", ".join(f"{share:.0%}" for share in row.utilisation.values()),
        ":".join(f"{share:.0%}"[:-1] for share in row.sample_shares),
        _number(row.anchor, ".0f"),
        _number(row.rounds, ","),
        _number(row.transfer_ms, ".2f"),
        _number(row.wait_ms, ".2f"),
        "" if row.peak_memory_bytes is None else f"{row.peak_memory_bytes / 1e6:,.0f} MB",
    ]


def _idle(model: ModelReport) -> list[Block]:
    """Idle seconds by cause, of all devices together; empty if no run has a timeline."""
    causes = sorted({cause for row in model.rows for cause in row.idle_s})
    if not causes:
        return []
    rows = [[row.mode, *(_number(row.idle_s.get(cause), ".2f") for cause in causes)] for row in model.rows]
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


def _value(model: ModelReport, value: float | None) -> str:
    if value is None:
        return ""
    return f"{100 * value:.2f} %" if model.metric == "accuracy" else f"{value:.4f}"


def _signed(model: ModelReport, value: float) -> str:
    return f"{100 * value:+.2f} pp" if model.metric == "accuracy" else f"{value:+.3f}"


def _number(value: float | None, form: str, unit: str = "") -> str:
    return "" if value is None else format(value, form) + unit
