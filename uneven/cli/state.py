"""`uneven state`: what a run's folder holds, how two states differ, and a model's params as a file of their own.

None of them runs the user's script or reads a pickle.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from uneven.cli.output import Json, new_console, new_table, print_json, say
from uneven.errors import InputError
from uneven.files import NO_STATE, may_hold_states

if TYPE_CHECKING:
    from uneven.results.comparison import Comparison, TensorRow
    from uneven.results.saved_state import Entry

app = typer.Typer(
    no_args_is_help=True,
    help="Look into results and checkpoints, compare them, export the model.",
    epilog="Example: uneven state show runs/my-run",
)

Run = Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a run, or one checkpoint in it.")]
ROWS = 20  # differing tensors that are printed; --json has all


@dataclass(frozen=True)
class Exported:
    """What export --json prints."""

    file: str
    from_: str
    kind: str
    slot: int | None
    tensors: int
    bytes: int


@app.command("show")
def show(run: Run, as_json: Json = False) -> None:
    """Show a run's result and checkpoints: position, quality, size, and whether each is whole. Every file is read and
    its checksum compared.

    Exit codes: 0 shown, also if something is damaged; 2 no state there. Examples:

      uneven state show runs/my-run

      uneven state show runs/my-run/step-500 --json
    """
    _check_folders(run)
    from uneven.results.saved_state import run_contents

    found = run_contents(run)
    if as_json:
        print_json(found)
    else:
        _print_contents(run, found["states"])


def _check_folders(*folders: Path) -> None:
    """Before torch is loaded, which takes seconds: a mistyped name is told at once."""
    for folder in folders:
        if not folder.is_dir():
            what = "is a file" if folder.exists() else "does not exist"
            raise InputError(f"{folder} {what}; name the folder of a run, or one checkpoint in it")
        if not may_hold_states(folder):
            raise InputError(f"{folder} {NO_STATE}")


def _print_contents(run: Path, entries: "list[Entry]") -> None:
    console = new_console(120)
    headings = ("state", "slot", "epochs", "samples", "last metrics", "MB", "saved (UTC)", "whole")
    table = new_table(*headings, left=("state", "last metrics", "saved (UTC)", "whole"), padding=(0, 2, 0, 0))
    for entry in entries:
        metrics = ", ".join(f"{name} {value:.4g}" for name, value in entry.get("metrics", {}).items())
        date = (entry.get("date") or "-").replace("T", " ").removesuffix("+00:00")
        table.add_row(
            entry["name"],
            *(_number(number) for number in (entry.get("slot"), entry.get("epochs"), entry.get("samples"))),
            metrics or "-",
            f"{entry['bytes'] / 1e6:,.2f}",
            date,
            "yes" if entry["whole"] else "NO",
        )
    console.print(f"{run}\n")
    console.print(table)
    console.print()
    for name, value in _facts(entries).items():
        console.print(f"{name}: {value}", soft_wrap=True)
    for entry in entries:
        if not entry["whole"]:
            console.print(f"not whole: {entry['name']}: {entry['fault']}", soft_wrap=True)


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:,.2f}" if isinstance(value, float) else f"{value:,}"


def _facts(entries: "list[Entry]") -> dict[str, str]:
    """What the newest whole state says about the run."""
    from uneven.results.saved_state import newest_whole

    last = newest_whole(entries)
    if last is None:
        return {"newest whole": "none"}
    devices = last["devices"] if isinstance(last["devices"], str) else ", ".join(last["devices"] or ())
    ended = "finished" if last["finished"] else f"not finished{': ' + last['stopped'] if last['stopped'] else ''}"
    gaps = (last["ledger"] or {}).get("gaps") or []
    left = sum(stop - first for first, stop in gaps)
    return {
        "newest whole": f"{last['name']}, {ended}" + (f", {left} slots before its end not trained yet" if left else ""),
        "model": f"{last['params']:,} params in {last['tensors']} tensors",
        "devices": f"{devices or '-'}, policy {last['policy'] or '-'}",
        "written by": ", ".join(f"{name} {version}" for name, version in last["versions"].items()) or "unknown",
    }


@app.command("diff")
def diff(
    a: Annotated[Path, typer.Argument(metavar="A", help="The folder of a run, or one checkpoint.")],
    b: Annotated[Path, typer.Argument(metavar="B", help="Another one.")],
    as_json: Json = False,
) -> None:
    """Compare two states: settings, slots, names and shapes, and every tensor's largest difference.

    Of a run's folder the newest whole state is taken. Settings about folders and progress, and random states, are not
    compared.

    Exit codes, as those of diff: 0 equal bit by bit, 1 different, 2 bad input. Examples:

      uneven state diff runs/a runs/b

      uneven state diff runs/a/step-500 runs/a/step-1000 --json
    """
    _check_folders(a, b)
    from uneven.results.comparison import compare_states
    from uneven.results.saved_state import newest_state

    states = []
    for folder in (a, b):
        state, faults = newest_state(folder)
        for fault in faults:
            say(f"passed over {fault}")
        states.append(state)
    found = compare_states(*states)
    if as_json:
        print_json(found)
    else:
        print(f"A: {states[0].title}\nB: {states[1].title}")
        print("\n".join(_difference_lines(found)))
    raise typer.Exit(0 if found["equal"] else 1)


def _difference_lines(found: "Comparison") -> list[str]:
    lines = [f"{name}: {x!r} | {y!r}" for name, (x, y) in (found["settings"] | found["position"]).items()]
    for group in dict.fromkeys(row["group"] for row in found["tensors"]):
        rows = [row for row in found["tensors"] if row["group"] == group]
        unequal = [row for row in rows if not row["equal"]]
        what = {"model": "params and buffers"}.get(group, f"tensors of {group}" if group.startswith("rank") else group)
        equal = len(rows) - len(unequal)
        if group.startswith("random"):
            lines.append(f"{what}: {equal} of {len(rows)} equal; they do not count")
            continue
        lines.append(f"{what}: {equal} of {len(rows)} equal bit by bit" + (", different are" if unequal else ""))
        lines += [f"  {row['name']}: {_row_text(row)}" for row in unequal[:ROWS]]
        if len(unequal) > ROWS:
            lines.append(f"  and {len(unequal) - ROWS} more; --json lists all")
    return [*lines, "equal bit by bit" if found["equal"] else "different"]


def _row_text(row: "TensorRow") -> str:
    if "only_in" in row:
        return f"only in {row['only_in'].upper()}"
    if "shapes" in row:
        return f"shape {tuple(row['shapes'][0])} | {tuple(row['shapes'][1])}"
    types = f"{row['dtypes'][0]} | {row['dtypes'][1]}, " if "dtypes" in row else ""
    odd = f", {row['not_finite']} not finite" if row["not_finite"] else ""
    return f"{types}largest difference {row['max_abs']:.3g}, relative {row['max_rel']:.3g}{odd}"


@app.command("export")
def export(
    run: Run,
    to: Annotated[Path, typer.Option("--to", help="model.safetensors or model.pt.")],
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the file if it exists.")] = False,
    as_json: Json = False,
) -> None:
    """Write the params and buffers of a run's result, or of its newest whole checkpoint, to one file.

    A .pt file is a state_dict for torch.load(..., weights_only=True), tied names included. A .safetensors file holds
    every tensor once, for safetensors.torch.load_model.

    Exit codes: 0 written, 2 bad input, 3 it cannot be written there. Examples:

      uneven state export runs/my-run --to model.safetensors

      uneven state export runs/my-run/step-500 --to model.pt --overwrite
    """
    _check_folders(run)
    from uneven.results.saved_state import export_model, newest_state

    state, faults = newest_state(run)
    for fault in faults:
        say(f"passed over {fault}")
    size = export_model(state, to, overwrite)
    if as_json:
        slot = state.record.get("slot")
        print_json(Exported(str(to), str(state.folder), state.kind, slot, len(state.tensors), size))
    else:
        print(f"{to}: {len(state.tensors)} tensors, {size / 1e6:,.2f} MB, of {state.title}")
