"""`uneven bench scaling`: throughput against the number of ranks."""

import sys
from typing import TYPE_CHECKING, Annotated

import typer

from uneven.cli import options
from uneven.cli.output import Json, new_console, new_table, print_json, print_whole
from uneven.errors import InputError

if TYPE_CHECKING:
    from uneven.bench.scaling import Scaling


def scaling(
    model: options.Model = "lenet",
    data: options.Data = None,
    device: Annotated[str, typer.Option(help="cpu (cores shared out) or cuda (one GPU per rank).")] = "cpu",
    ranks: Annotated[str, typer.Option(help="Numbers of ranks, with 1 among them.")] = "1,2",
    policy: options.Policy = "balanced",
    samples: Annotated[int, typer.Option(min=1, help="Of each run.")] = 4096,
    batch_size: Annotated[int | None, typer.Option(min=1, help="Per rank; default: the model's own.")] = None,
    repeats: Annotated[int, typer.Option(min=1, help="Runs of each number of ranks, in turn.")] = 3,
    compiles: Annotated[
        str | None, typer.Option(help="Also the cold start, as in off,default,graph.", show_default="none")
    ] = None,
    as_json: Json = False,
) -> None:
    """Samples/s of 1, 2, ... ranks and the law Speedup = N / (1 + alpha (N - 1)) that fits them.

    Beside the fitted alpha stands the one that each run's timeline tells: communication and waiting over computation.

    Examples:

      uneven bench scaling --model lenet --data mnist-mini --ranks 1,2

      uneven bench scaling --model gpt-nano --samples 512 --compiles off,default
    """
    from uneven.bench.scaling import ScalingOrder, measure_scaling

    try:
        numbers = tuple(sorted({int(number) for number in ranks.split(",")}))
    except ValueError:
        raise InputError(f"--ranks {ranks!r} must be numbers with commas between them, as in 1,2,4") from None
    order = ScalingOrder(
        model=model,
        data=data,
        device=device,
        ranks=numbers,
        policy=policy,
        samples=samples,
        batch_size=batch_size,
        repeats=repeats,
        compiles=tuple(compiles.split(",")) if compiles else (),
    )
    found = measure_scaling(order, lambda line: None if as_json else print(line, file=sys.stderr))
    if as_json:
        print_json(found)
    else:
        _print(found)


def _print(found: "Scaling") -> None:
    from uneven.bench.undisturbed import FOOTNOTE, mark

    console = new_console()
    headings = ("ranks", f"{found.unit}/s", "speed-up", "predicted", "off by")
    table = new_table(*headings, "comm / compute", "alpha", "by timeline")
    for point in found.points:
        half = "" if point.half_width == float("inf") else f" +- {point.half_width:,.0f}"
        predicted, off = "-", "-"
        if point.predicted is not None and not point.is_disturbed:
            predicted, off = f"{point.predicted:.2f}", f"{point.speedup / point.predicted - 1.0:+.1%}"
        figures = (f"{point.per_s:,.0f}{half}", f"{point.speedup:.2f}")
        told = (point.overhead, point.alpha, point.by_timeline)
        cells = ["-" if one is None else f"{one:.{digits}f}" for one, digits in zip(told, (3, 3, 2), strict=True)]
        marked = (mark(figure, point.is_disturbed) for figure in figures)
        table.add_row(f"{point.ranks}", *marked, predicted, off, *cells)
    print_whole(console, table)
    if any(point.is_disturbed for point in found.points) or any(row.is_disturbed for row in found.cold_starts):
        console.print(f"\n{FOOTNOTE}")
    if found.alpha is not None:
        console.print(f"\nSpeedup = N / (1 + {found.alpha:.3f} (N - 1))")
    if found.cold_starts:
        headings = ("compile", "before the first step, s", "first step, ms", "a step, ms", "pays after steps")
        starts = new_table(*headings, left=("compile",))
        for row in found.cold_starts:
            even = "-" if row.break_even_steps is None else f"{row.break_even_steps:,.0f}"
            times = (f"{row.before_s:.1f}", f"{row.first_ms:.1f}", f"{row.step_ms:.1f}")
            starts.add_row(row.compile, *(mark(time, row.is_disturbed) for time in times), even)
        console.print()
        print_whole(console, starts)
