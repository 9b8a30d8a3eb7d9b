"""`uneven bench report`, `compare`, `pack` and `check`: what finished runs say. cli/sweep.py makes them."""

import sys
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from uneven.cli.output import Json, new_console, new_table, print_json, print_whole
from uneven.errors import InputError, RankError
from uneven.files import ABSENT

if TYPE_CHECKING:
    from uneven.bench.report.check import Judged


@dataclass(frozen=True)
class Packed:
    """What pack --json prints."""

    files: list[str]
    bytes: int


@dataclass(frozen=True)
class Checked:
    """What check --json prints."""

    faults: list[str]
    rows: list["Judged"] | None = field(default=None, metadata=ABSENT)  # without --baseline
    baseline: str | None = field(default=None, metadata=ABSENT)  # the file that --save has written


def report(
    runs: Annotated[Path, typer.Argument(help="A folder of runs, or of several sweeps.")] = Path("runs"),
    out: Annotated[
        Path | None,
        typer.Option(help="report.md or report.html, or a folder for a page of each sweep; default: on the screen."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Quality over seeds, speed, efficiency and where the time went, per model and mode.

    Of a folder that holds several sweeps there is one report each. Examples:

      uneven bench report runs

      uneven bench report runs --out report.html
    """
    from uneven.bench.report.build import build_report
    from uneven.bench.report.sections import render_markdown
    from uneven.bench.single.folders import sweeps_in, write_file

    places = sweeps_in(runs)
    pages = {}
    if out is not None and out.is_dir():
        pages = {out / f"{place.resolve().name}.md": place for place in places}  # of ".", too
    elif out is not None and out.suffix not in (".md", ".html"):
        raise InputError(f"--out {out}: a report is .md or .html, and {out} is no folder")
    elif out is not None and len(places) > 1:
        names = ", ".join(place.name for place in places)
        raise InputError(f"--out {out}: there are several sweeps in {runs} ({names}); name one, or a folder for all")
    elif out is not None:
        pages = {out: places[0]}
    found = {place: build_report(place) for place in places}
    if as_json:
        documents = [*found.values()]
        print_json(documents if len(documents) > 1 else documents[0])
    elif out is None:
        titles = {place: f"# {place}\n\n" if len(places) > 1 else "" for place in places}
        print("\n".join(titles[place] + render_markdown(one) for place, one in found.items()), end="")
    for path, place in pages.items():
        text = render_markdown(found[place])
        if path.suffix == ".html":
            from uneven.bench.report.page import render_page

            text = render_page(found[place], path.parent)
        write_file(path, text)
        print(f"wrote {path}", file=sys.stderr)


def compare(
    first: Annotated[Path, typer.Argument(help="A run folder or a sweep's.")],
    second: Annotated[Path, typer.Argument(help="The one that may be better.")],
    as_json: Json = False,
) -> None:
    """Compare two results: quality and speed, paired over the seeds that both have.

    Examples:

      uneven bench compare runs/before runs/after

      uneven bench compare runs/lenet/cpu-async/seed-0 runs/lenet/cpu-cadence/seed-0
    """
    from uneven.bench.report.compare import compare as differences
    from uneven.bench.undisturbed import FOOTNOTE, mark

    found = differences(first, second)
    if as_json:
        print_json(found)
        return
    for row in found:
        half = "" if row.quality_half == float("inf") else f" +- {row.quality_half:.4f}"
        speed_half = "" if row.speed_half == float("inf") else f" +- {row.speed_half:.3f}"
        pairs = f"{row.pairs} pair{'s' * (row.pairs > 1)}"
        speed = mark(f"x{row.speed:.3f}{speed_half}", row.is_disturbed)
        print(f"{row.model} {row.mode}: quality {row.quality:+.4f}{half}, speed {speed} ({pairs}); {row.verdict}")
    if any(row.is_disturbed for row in found):
        print(FOOTNOTE)


def pack(
    runs: Annotated[Path, typer.Argument(help="A folder of runs.")] = Path("runs"),
    out: Annotated[Path, typer.Option(help="Folder; a run becomes MODEL/MODE/seed-S.json below it.")] = Path("results"),
    as_json: Json = False,
) -> None:
    """Write finished runs as small files to publish: settings, history, times, versions; no weights.

    `report`, `compare` and `check` read them like runs.

    Examples:

      uneven bench pack runs --out results
    """
    from uneven.bench.report.pack import pack as pack_runs

    files = pack_runs(runs, out)
    size = sum(path.stat().st_size for path in files)
    if as_json:
        print_json(Packed([str(path) for path in files], size))
    else:
        print(f"wrote {len(files)} files, {size / 1e3:,.0f} kB, in {out}")


def check(
    runs: Annotated[Path, typer.Argument(help="A folder of runs, packed or not, or of several sweeps.")] = Path("runs"),
    baseline: Annotated[Path | None, typer.Option(help="Compare the runs with this baseline instead.")] = None,
    save: Annotated[Path | None, typer.Option(help="Write these runs as a baseline instead.")] = None,
    as_json: Json = False,
) -> None:
    """Fail (exit code 1) if a model and mode is worse than published, than one device alone, or than a baseline.

    Without --baseline, quality is compared with the published figure, with one device alone (or PyTorch's DDP at the
    same batch), and at equal time; packed results also with their checksums. Runs of less than a tenth of their
    recipe's epochs are "short": their quality is not checked. With --baseline, quality and efficiency are compared with
    those of other runs.

    Examples:

      uneven bench check runs

      uneven bench check runs --save baseline.json

      uneven bench check runs --baseline baseline.json
    """
    from uneven.bench.report.check import check_baseline, write_baseline

    if baseline is not None and save is not None:
        raise InputError("pass either --baseline FILE, to check, or --save FILE, to make one")
    if save is not None:
        write_baseline(runs, save)
        print(f"wrote {save}", file=sys.stderr)
        if as_json:
            print_json(Checked([], baseline=str(save)))
        return
    if baseline is None:
        _check_references(runs, as_json)
        return
    faults = check_baseline(runs, baseline)
    if as_json:
        print_json(Checked(faults))
    elif not faults:
        print("no worse than the baseline")
    if faults:
        raise RankError("worse than the baseline:\n" + "\n".join(f"  {fault}" for fault in faults))


def _check_references(runs: Path, as_json: bool) -> None:
    """Every mode against what was published and one device alone, as a table; of several sweeps one each."""
    from uneven.bench.report.check import compare_with_references
    from uneven.bench.single.folders import sweeps_in

    places = sweeps_in(runs)
    found = {place: compare_with_references(place) for place in places}
    faults, documents = [], []
    for place, (rows, broken) in found.items():
        sweep = place.name if len(places) > 1 else None
        before = f"{sweep}: " if sweep else ""
        faults += [f"{before}{fault}" for fault in broken]
        faults += [f"{before}{row.model} {row.mode}: {fault}" for row in rows for fault in row.faults]
        documents += [replace(row, sweep=sweep) for row in rows]
    if as_json:
        print_json(Checked(faults, documents))
    else:
        for place, (rows, _) in found.items():
            _print_judged(rows, str(place) if len(places) > 1 else None)
    if faults:
        raise RankError("does not hold:\n" + "\n".join(f"  {fault}" for fault in faults))


def _print_judged(rows: "list[Judged]", title: str | None) -> None:
    headings = ("", "model", "mode", "seeds", "quality", "at worst", "reference", "timed")
    left = ("model", "mode", "reference", "")
    table = new_table(*headings, left=left, no_wrap=True, title=title, title_justify="left", title_style="bold")
    for row in rows:
        published = "" if row.published is None else f"{row.published:g}"
        other = "" if row.reference_quality is None else f"{row.reference} {row.reference_quality:.4g}"
        equal = "" if row.equal_time is None or row.mode.startswith("solo-") else f"{row.equal_time:.4g}"
        verdict = "fails" if row.faults else "short" if row.is_short else "holds"
        table.add_row(verdict, row.model, row.mode, str(row.seeds), f"{row.quality:.4g}", published, other, equal)
    print_whole(new_console(), table)
