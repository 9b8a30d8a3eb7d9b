"""`uneven demo`: LeNet on the embedded digits, in a minute, with no network."""

import json
from pathlib import Path
from typing import Annotated

import typer


def demo(
    out: Annotated[Path, typer.Option(help="Folder for the results.")] = Path("runs") / "demo",
    epochs: Annotated[int, typer.Option(help="Passes over the 10,000 digits.")] = 8,
    device: Annotated[str, typer.Option(help="cpu, cuda:0, ...; default: the best there is.")] = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="Print the summary as JSON; no progress.")] = False,
) -> None:
    """Train LeNet on mnist-mini (10,000 real digits, inside the package) and say where everything is.

    Example: uneven demo
    """
    from uneven.bench.single import Order, run_single

    summary = run_single(
        Order(
            model="lenet",
            data="mnist-mini",
            devices=None if device == "auto" else device,
            epochs=epochs,
            out=out,
            progress="off" if as_json else "auto",
        )
    )
    folder = out / "lenet" / "solo-0" / "seed-0"
    if as_json:
        print(json.dumps({**summary, "folder": str(folder)}, indent=1))
        return
    quality = summary["quality"]["accuracy"]
    print(
        f"\nLeNet on {', '.join(summary['devices'])}: {100 * quality:.2f} % of 2,000 test digits right, "
        f"{summary['train_seconds']:.1f} s of training, {summary['samples_per_s']:,.0f} samples/s.\n"
        f"Trained state, metrics and timeline: {folder}\n"
        "Next: uneven devices --measure   what this machine has, and what it could do together\n"
        "      uneven bench list          the other models"
    )
