"""Options that several verbs of `uneven bench` have, with what the shell offers as their values."""

from typing import Annotated

import typer

from uneven.cli.complete import MODELS, devices, one_of
from uneven.config.names import POLICIES

Model = Annotated[str, typer.Option(help="Which model; see 'uneven bench list'.", autocompletion=one_of(MODELS))]
Precision = Annotated[
    str, typer.Option(help="fp32, bf16, fp16 or auto.", autocompletion=one_of(("fp32", "bf16", "fp16", "auto")))
]
Compile = Annotated[
    str,
    typer.Option(
        help="off, default (torch.compile) or graph (CUDA graph).", autocompletion=one_of(("off", "default", "graph"))
    ),
]
Backend = Annotated[
    str,
    typer.Option(help="auto, nccl, cpu, shm or gloo.", autocompletion=one_of(("auto", "nccl", "cpu", "shm", "gloo"))),
]
Several = Annotated[str, typer.Option(help="Two or more, as in cpu,cpu@0.4.", autocompletion=devices)]
PolicyOrDdp = Annotated[
    str,
    typer.Option(
        help="sync, balanced, cadence, async, or torch-ddp (PyTorch's).",
        autocompletion=one_of((*POLICIES, "torch-ddp")),
    ),
]
Policy = Annotated[str, typer.Option(help="sync, balanced, cadence or async.", autocompletion=one_of(POLICIES))]
