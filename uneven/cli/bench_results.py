"""`uneven bench report` and `check`: what finished runs say. cli/bench.py makes them."""

import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from uneven.cli.output import Json, new_table, print_json, print_whole
from uneven.errors import InputError, RankError

if TYPE_CHECKING:
    from uneven.bench.report.check import Judged


@dataclass(frozen=True)
class Checked:
    """What check --json prints."""

    faults: list[str]
    rows: list["Judged"]


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


def check(
    runs: Annotated[Path, typer.Argument(help="A folder of runs, or of several sweeps.")] = Path("runs"),
    as_json: Json = False,
) -> None:
    """Fail (exit code 1) if a model and mode is worse than published, or than one device alone.

    Quality is compared with the published figure, with one device alone (or PyTorch's DDP at the same batch), and at
    equal time; published files also with their checksums. Runs of less than a tenth of their recipe's epochs are
    "short": their quality is not checked.

    Example: uneven bench check runs
    """
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
    print_whole(table)
