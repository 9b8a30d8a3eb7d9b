"""`uneven run`: a script of the user's on every device named."""

from pathlib import Path
from typing import Annotated, Any

import typer

from uneven.cli.numbers import numbers


def run(
    script: Annotated[Path, typer.Argument(help="The Python script to run, once per device.")],
    args: Annotated[list[str] | None, typer.Argument(help="The script's own arguments; its options after --.")] = None,
    devices: Annotated[str | None, typer.Option(help="As in cpu,cpu@0.4 or auto, the default.")] = None,
    policy: Annotated[str | None, typer.Option(help="sync, balanced, cadence or async.")] = None,
    backend: Annotated[str | None, typer.Option(help="auto, cpu or nccl.")] = None,
    batch_size: Annotated[int | None, typer.Option(help="Samples per device and step.")] = None,
    global_batch_size: Annotated[int | None, typer.Option(help="Samples per step of all devices.")] = None,
    epochs: Annotated[int | None, typer.Option(help="Passes over the data.")] = None,
    seed: Annotated[int | None, typer.Option(help="Of weights, order and augmentation.")] = None,
    accumulate: Annotated[int | None, typer.Option(help="Micro-batches per step.")] = None,
    shares: Annotated[str | None, typer.Option(help="Fixed shares, one per device, as in 5,2.")] = None,
    strategy: Annotated[
        str | None, typer.Option(help="Who holds what: ddp-bucketed, zero1, zero2, fsdp, tensor, ...")
    ] = None,
    memory_shares: Annotated[str | None, typer.Option(help="How a strategy cuts its bytes, as in 15,6.")] = None,
    memory_cap: Annotated[
        str | None, typer.Option(help="Samples a device may hold at once; one for all, or 64,16.")
    ] = None,
    sync_batchnorm: Annotated[bool | None, typer.Option(help="BatchNorm over all devices.")] = None,
    max_grad_norm: Annotated[float | None, typer.Option(help="Clip the global gradient norm.")] = None,
    lr_scale: Annotated[str | None, typer.Option(help="A number, linear, sqrt or auto.")] = None,
    anchor: Annotated[int | None, typer.Option(help="Local policies: the slowest device's batches a window.")] = None,
    max_anchor: Annotated[int | None, typer.Option(help="Local policies: how far the anchor may grow.")] = None,
    overhead_target: Annotated[float | None, typer.Option(help="Local policies: what rounds may cost.")] = None,
    divergence_threshold: Annotated[float | None, typer.Option(help="Local policies: where the guard looks.")] = None,
    max_staleness: Annotated[int | None, typer.Option(help="async: batches ahead of an average on its way.")] = None,
    optimizer_state: Annotated[str | None, typer.Option(help="Local policies: keep or average.")] = None,
    verify: Annotated[bool | None, typer.Option(help="Local policies: checksums along every average.")] = None,
    precision: Annotated[str | None, typer.Option(help="fp32, bf16, fp16 or auto.")] = None,
    compile: Annotated[str | None, typer.Option(help="off, default or graph.")] = None,
    num_workers: Annotated[int | None, typer.Option(help="Loader processes per device.")] = None,
    replay: Annotated[str | None, typer.Option(help="Folder of a finished run: repeat it by its log.")] = None,
    checkpoint_every: Annotated[int | None, typer.Option(help="In epochs; needs --out.")] = None,
    out: Annotated[str | None, typer.Option(help="Folder for state and timeline.")] = None,
    progress: Annotated[str | None, typer.Option(help="auto, bar, lines or off.")] = None,
) -> None:
    """Run a script that uses uneven, on one process per device. Options given here stand above those in the script.

    Examples:

      uneven run train.py --devices cpu,cpu@0.4

      uneven run train.py --epochs 3 -- --option-of-the-script 5
    """
    given: dict[str, Any] = {
        name: value for name, value in locals().items() if name not in ("script", "args") and value is not None
    }
    if shares is not None:
        given["shares"] = numbers("--shares", shares)
    if memory_shares is not None:
        given["memory_shares"] = numbers("--memory-shares", memory_shares)
    if memory_cap is not None:
        caps = tuple(int(cap) if cap.is_integer() else cap for cap in numbers("--memory-cap", memory_cap))
        given["memory_cap"] = caps if len(caps) > 1 else caps[0]
    if lr_scale is not None:
        given["lr_scale"] = number_or_word(lr_scale)
    from uneven.launch.script import run_script

    run_script(script, args or [], given)


def number_or_word(text: str) -> float | str:
    try:
        return float(text)
    except ValueError:
        return text
