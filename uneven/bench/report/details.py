"""What a report tells of a model beside its results: every run, how it went epoch by epoch, and what the policy chose.

sections.py puts these tables below the results.
"""

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

from uneven.bench.report.build import ModelReport, ModeReport
from uneven.bench.report.table import Table, number, value
from uneven.bench.undisturbed import mark

MOST_EPOCHS = 10  # rows of a table over epochs, evenly spread, with the first and the last


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


def calibration(model: ModelReport) -> Table | None:
    """Anchor, shares of the samples and the factor on the learning rate, in the first seed, at some epochs.

    Epochs in a row with the same figures are one row.
    """
    modes = [row for row in model.rows if any(len(entry) > 1 for entry in row.calibration)]
    if not modes:
        return None
    rows = []
    for row in modes:
        spans = [(figures, list(entries)) for figures, entries in groupby(row.calibration, key=_figures)]
        rows += [[row.mode, _span(entries), *figures] for figures, entries in _evenly(spans)]
    return Table.of(["mode", "epoch", "anchor", "shares", "lr scale"], rows)


def _span(entries: Sequence[Mapping[str, Any]]) -> str:
    first, last = ("end" if entries[at]["epoch"] is None else str(entries[at]["epoch"]) for at in (0, -1))
    return first if first == last else f"{first} to {last}"


def _figures(entry: Mapping[str, Any]) -> list[str]:
    shares = entry.get("shares") or []
    whole = sum(shares) or 1.0
    return [
        number(entry.get("anchor"), ".1f"),
        ":".join(f"{100 * share / whole:.0f}" for share in shares),
        number(entry.get("lr_scale"), ".2f"),
    ]


def gpus(model: ModelReport) -> Table | None:
    """What NVML saw of the GPUs while a mode trained; None without any."""
    names = list(dict.fromkeys(name for row in model.rows for name in row.gpus))
    if not names:
        return None
    head = ["mode", *(f"{name} {what}" for name in names for what in ("%", "idle s"))]
    rows = []
    for row in model.rows:
        cells = [row.gpus.get(name) for name in names]
        rows.append([row.mode, *(f"{cell[at]:.1f}" if cell else "" for cell in cells for at in (0, 1))])
    return Table.of(head, rows)


def every_run(model: ModelReport) -> Table:
    """Each run's quality and seconds, and beside them what other programs took meanwhile."""
    has_several = any(run["runs_at_once"] > 1 for row in model.rows for run in row.runs)
    rows = [
        [
            row.mode,
            str(run["seed"]),
            number(run["epochs"], "d"),
            value(model.metric, run["quality"]),
            mark(number(run["train_s"], ".2f"), run["is_disturbed"]) if row.has_speed else "(takes turns)",
            *_interference(run["interference"] or {}),
            *([str(run["runs_at_once"])] if has_several else []),
        ]
        for row in model.rows
        for run in row.runs
    ]
    head = ["mode", "seed", "epochs", model.metric, "train s", "stolen", "others' cores", "pressure"]
    return Table.of([*head, *(["runs at once"] if has_several else [])], rows)


def _interference(found: Mapping[str, Any]) -> list[str]:
    stolen, foreign, pressure = (found.get(name) for name in ("stolen_share", "foreign_cores", "pressure_share"))
    return [number(stolen, ".1%"), number(foreign, ".2f"), number(pressure, ".1%")]


def _evenly(entries: Sequence[Any]) -> list[Any]:
    """At most MOST_EPOCHS of them, with the first and the last."""
    last = len(entries) - 1
    if last < MOST_EPOCHS:
        return list(entries)
    return [entries[round(place * last / (MOST_EPOCHS - 1))] for place in range(MOST_EPOCHS)]
