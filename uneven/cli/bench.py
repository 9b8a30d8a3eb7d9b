"""`uneven bench`: run a benchmark model, list what there is."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from uneven.cli import options
from uneven.cli.bench_results import check, report
from uneven.cli.complete import devices as devices_here
from uneven.cli.output import Json, new_console, new_table, print_json, print_whole
from uneven.cli.scaling import scaling
from uneven.cli.strategies import strategies
from uneven.cli.sweep import policies, sweep

if TYPE_CHECKING:
    from uneven.bench.single.run import PrintedSummary

app = typer.Typer(
    no_args_is_help=True,
    help="Train the benchmark models and measure them.",
    epilog="Example: uneven bench list",
)

Mode = Annotated[
    str,
    typer.Option(
        help="solo-N, sync (Ddp.setup and a loop of its own), cpu-POLICY, nccl-POLICY (sync, balanced, cadence, async) "
        "or torch-ddp."
    ),
]
Devices = Annotated[
    str | None,
    typer.Option(
        "--devices",
        "--device",
        help="cuda:1, cpu@0.4, or several: cpu,cpu@0.4. Default: the mode's own.",
        autocompletion=devices_here,
    ),
]
Repeat = Annotated[
    bool, typer.Option("--repeat/--no-repeat", help="Make a disturbed run of up to a minute again, once.")
]


@dataclass(frozen=True)
class ModelRow:
    """One benchmark model."""

    name: str
    title: str
    data: str
    params: int
    batch_size: int
    epochs: int
    metric: str
    published: float | None
    source: str | None  # of the published figure


@dataclass(frozen=True)
class Listed:
    """What list --json prints."""

    models: list[ModelRow]
    modes: tuple[str, ...]


@app.command("list")
def list_models(as_json: Json = False) -> None:
    """The benchmark models and modes.

    Example: uneven bench list
    """
    from uneven.bench import models
    from uneven.bench.single.modes import NAMES

    recipes = [models.get(name) for name in models.NAMES + models.LARGE]
    rows = [
        ModelRow(
            name=one.name,
            title=one.title,
            data=one.data,
            params=one.num_params,
            batch_size=one.batch_size,
            epochs=one.epochs,
            metric=one.metric,
            published=one.published.value if one.published else None,
            source=one.published.source if one.published else None,
        )
        for one in recipes
    ]
    if as_json:
        print_json(Listed(rows, NAMES))
        return
    headings = ("model", "data", "params", "batch", "epochs", "metric", "published")
    table = new_table(*headings, left=("model", "data", "metric", "published"))
    for row in rows:
        published = "-" if row.published is None else f"{row.published:g}"
        sizes = (f"{row.params:,}", f"{row.batch_size}", f"{row.epochs}")
        table.add_row(row.name, row.data, *sizes, row.metric, published)
    console = new_console()
    print_whole(console, table)
    console.print(f"\nmodes: {', '.join(NAMES)} (see --devices)")
    console.print("next:  uneven bench run --model lenet --data mnist-mini")


@app.command("run")
def run(
    model: options.Model,
    mode: Mode = "solo-0",
    devices: Devices = None,
    data: options.Data = None,
    global_batch_size: Annotated[int | None, typer.Option(help="Of all devices together; exact modes.")] = None,
    epochs: Annotated[int | None, typer.Option(help="Default: the model's own.")] = None,
    batch_size: Annotated[int | None, typer.Option(help="Default: the model's own.")] = None,
    samples: Annotated[int | None, typer.Option(help="Train on the first N samples of the set only.")] = None,
    eval_samples: Annotated[int | None, typer.Option(help="Evaluate on the first N test samples only.")] = None,
    seed: Annotated[int, typer.Option(help="Of weights, order and augmentation.")] = 0,
    precision: options.Precision = "fp32",
    compile: options.Compile = "off",
    lr_scale: Annotated[str | None, typer.Option(help="A number, linear, sqrt or auto; default: the policy's.")] = None,
    eval_every: Annotated[int | None, typer.Option(help="Evaluate every N epochs; default: 1.")] = None,
    out: Annotated[Path, typer.Option(help="Folder; the run goes into MODEL/MODE/seed-S below it.")] = Path("runs"),
    repeat: Repeat = True,
    as_json: Json = False,
) -> None:
    """Train one model in one mode and write its folder.

    Exit codes: 0 done, 1 a rank failed, 2 bad input, 3 this machine cannot, 130 stopped and saved. Examples:

      uneven bench run --model lenet --data mnist-mini

      uneven bench run --model lenet --data mnist-mini --mode cpu-balanced --devices cpu,cpu@0.4

      uneven bench run --model resnet-graph --mode sync --devices cpu,cpu@0.4 --samples 512 --epochs 1

      uneven bench run --model resnet-20 --devices cuda:0 --compile graph --seed 1
    """
    from uneven.bench.single.modes import limit_threads, resolve_mode
    from uneven.config.text import number_or_word

    limit_threads(len(resolve_mode(mode, devices).cores))  # before torch is loaded
    from uneven.bench.single.run import Order, run_single
    from uneven.bench.undisturbed import REPEAT_LIMIT_S

    order = Order(
        model=model,
        mode=mode,
        devices=devices,
        data=data,
        batch_size=batch_size,
        global_batch_size=global_batch_size,
        epochs=epochs,
        samples=samples,
        eval_samples=eval_samples,
        seed=seed,
        precision=precision,
        compile=compile,
        lr_scale=None if lr_scale is None else number_or_word(lr_scale),
        eval_every=eval_every,
        out=out,
        progress="off" if as_json else "auto",
        repeat_limit_s=REPEAT_LIMIT_S if repeat else 0.0,
    )
    summary = run_single(order)
    if as_json:
        print_json(summary)
    else:
        print(result_line(summary))


@app.command("efficiency")
def efficiency(
    model: options.Model,
    policy: options.PolicyOrDdp = "balanced",
    devices: options.Several = "cpu,cpu@0.4",
    data: options.Data = None,
    batch_size: Annotated[int | None, typer.Option(help="Per device; default: the model's own.")] = None,
    precision: Annotated[str, typer.Option(help="fp32, bf16 or fp16.")] = "fp32",
    compile: options.Compile = "off",
    backend: options.Backend = "auto",
    seconds: Annotated[float, typer.Option(min=0.01, help="Length of a segment, at least.")] = 1.5,
    pairs: Annotated[int, typer.Option(min=1, help="Pairs of segments, at least.")] = 30,
    most_pairs: Annotated[int, typer.Option(min=1, help="Pairs of segments, at most.")] = 200,
    half_width: Annotated[float, typer.Option(min=0.0, help="Add pairs until the interval is this narrow.")] = 0.03,
    against_ddp: Annotated[
        bool, typer.Option("--against-ddp", help="Compare with PyTorch's DDP, not with solo.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Joint speed over the sum of the devices' solo speeds, by alternating segments; a minute or more.

    Examples:

      uneven bench efficiency --model lenet --batch-size 256 --data mnist-mini

      uneven bench efficiency --model lenet --policy torch-ddp --devices cpu,cpu@0.4

      uneven bench efficiency --model resnet-20 --policy async --devices cuda:0%60,cuda:0%24 --compile graph
    """
    from uneven.bench.efficiency import EfficiencyOrder, PairsReporter, measure_efficiency, sentences

    order = EfficiencyOrder(
        model=model,
        policy=policy,
        devices=devices,
        data=data,
        batch_size=batch_size,
        precision=precision,
        compile=compile,
        backend=backend,
        seconds=seconds,
        least_pairs=pairs,
        most_pairs=max(pairs, most_pairs),
        half_width=half_width,
        against_ddp=against_ddp,
    )
    reporter = PairsReporter("off" if as_json else "lines")
    try:
        result = measure_efficiency(order, reporter)
    finally:
        reporter.close()
    if as_json:
        print_json(result)
    else:
        print("\n".join(sentences(result)))


def result_line(summary: "PrintedSummary") -> str:
    """The outcome of one run; a second line where its time is disturbed."""
    from uneven.bench.undisturbed import FOOTNOTE, is_disturbed, mark

    value = summary["quality"][summary["metric"]]
    published = f" (published {summary['published']:g})" if summary["published"] else ""
    seconds = mark(f"{summary['train_seconds']:.1f} s", is_disturbed(summary))
    line = (
        f"{summary['model']} {summary['mode']} on {', '.join(summary['devices'])}, {summary['data']}: "
        f"{summary['metric']} {value:.4f}{published} in {seconds}"
    )
    return f"{line}\n{FOOTNOTE}" if is_disturbed(summary) else line


for verb in (sweep, report, check, policies, scaling, strategies):
    app.command(verb.__name__)(verb)
