"""What each benchmark may be asked for: its settings with their defaults, and how they are typed on the command line.

cli/options.py makes a verb's options of an order, and the order of what was typed. A field without a `Typed` is set by
the verb itself. Nothing here loads torch, since `uneven bench --help` reads it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, NamedTuple

from uneven.bench.modes import PAIR, run_folder
from uneven.bench.undisturbed import REPEAT_LIMIT_S
from uneven.config import POLICIES
from uneven.config.text import number_or_word


class Typed(NamedTuple):
    """An option: its help, its flags where they are not the field's name, its bounds, and the default as shown."""

    help: str
    flags: str | None = None
    least: float | None = None
    shown: str | None = None
    most: float | None = None
    read: Callable[[str], object] | None = None  # of what was typed, for a value of several types


Model = Annotated[str, Typed("Which model; see 'uneven bench list'.")]
Data = Annotated[str | None, Typed("Another data set, such as mnist-mini.")]
Precision = Annotated[str, Typed("fp32, bf16, fp16 or auto.")]
Compile = Annotated[str, Typed("off, default (torch.compile) or graph (CUDA graph).")]
Several = Annotated[str, Typed("Two or more, as in cpu,cpu@0.4.")]


@dataclass(frozen=True, kw_only=True)
class Order:
    """A run; None means the recipe's value."""

    model: Model
    mode: Annotated[
        str,
        Typed(
            "solo-N, sync (Ddp.setup and a loop of its own), cpu-POLICY, nccl-POLICY (sync, balanced, cadence, async) "
            "or torch-ddp."
        ),
    ] = "solo-0"
    devices: Annotated[
        str | None,
        Typed("cuda:1, cpu@0.4, or several: cpu,cpu@0.4. Default: the mode's own.", "--devices --device"),
    ] = None
    data: Data = None
    global_batch_size: Annotated[int | None, Typed("Of all devices together; exact modes.")] = None
    epochs: Annotated[int | None, Typed("Default: the model's own.")] = None
    batch_size: Annotated[int | None, Typed("Default: the model's own.")] = None
    samples: Annotated[int | None, Typed("Train on the first N samples of the set only.")] = None
    eval_samples: Annotated[int | None, Typed("Evaluate on the first N test samples only.")] = None
    seed: Annotated[int, Typed("Of weights, order and augmentation.")] = 0
    precision: Precision = "fp32"
    compile: Compile = "off"
    lr_scale: Annotated[
        float | str | None, Typed("A number, linear, sqrt or auto; default: the policy's.", read=number_or_word)
    ] = None
    eval_every: Annotated[int | None, Typed("Evaluate every N epochs; default: 1.")] = None
    out: Annotated[Path, Typed("Folder; the run goes into MODEL/MODE/seed-S below it.")] = Path("runs")
    repeat: Annotated[bool, Typed("Make a disturbed run of up to a minute again, once.", "--repeat/--no-repeat")] = True
    progress: str = "auto"
    time_limit_s: float | None = None  # StoppedError if the run is not finished by then

    @property
    def repeat_limit_s(self) -> float:
        return REPEAT_LIMIT_S if self.repeat else 0.0

    @property
    def folder(self) -> Path:
        """Where the run's results go."""
        return run_folder(self.out, self.model, self.mode, self.seed)


@dataclass(frozen=True, kw_only=True)
class EfficiencyOrder:
    """Segments last at least `seconds`; pairs are added until the interval is at most `half_width` wide each way."""

    model: Model
    policy: Annotated[str, Typed("sync, balanced, cadence, async, or torch-ddp (PyTorch's).")] = "balanced"
    devices: Several = PAIR
    data: Data = None
    batch_size: Annotated[int | None, Typed("Per device; default: the model's own.")] = None
    precision: Annotated[str, Typed("fp32, bf16 or fp16.")] = "fp32"
    compile: Compile = "off"
    backend: Annotated[str, Typed("auto, nccl, cpu, shm or gloo.")] = "auto"
    seconds: Annotated[float, Typed("Length of a segment, at least.", least=0.01)] = 1.5
    least_pairs: Annotated[int, Typed("Pairs of segments, at least.", "--pairs", 1)] = 30
    most_pairs: Annotated[int, Typed("Pairs of segments, at most.", least=1)] = 200
    half_width: Annotated[float, Typed("Add pairs until the interval is this narrow.", least=0.0)] = 0.03
    against_ddp: Annotated[bool, Typed("Compare with PyTorch's DDP, not with solo.")] = False


@dataclass(frozen=True, kw_only=True)
class SweepOrder:
    """None means all models, all modes, and each model's own data, batch size and epochs."""

    models: Annotated[tuple[str, ...] | None, Typed("Only these, as in lenet,mlp.", shown="all")] = None
    modes: Annotated[tuple[str, ...] | None, Typed("Only these, as in solo-0,cpu-async.", shown="all")] = None
    seeds: Annotated[int | None, Typed("Runs of each mode; default: 5, 1 with --quick.", least=1)] = None
    is_quick: Annotated[bool, Typed("LeNet and gpt-nano, a few samples, one seed.", "--quick")] = False
    devices: Annotated[str, Typed("Two or more, as in cuda:0,cuda:1.")] = PAIR
    data: Annotated[str | None, Typed("In place of mnist, such as mnist-mini.")] = None
    samples: Annotated[int | None, Typed("Train on the first N samples only.", least=1)] = None
    epochs: Annotated[int | None, Typed("Default: each model's own; 2 with --quick.", least=1)] = None
    batch_size: Annotated[int | None, Typed("Per device; default: each model's own.", least=1)] = None
    global_batch_size: Annotated[int | None, Typed("Of a step of the exact modes and DDP.", least=1)] = None
    lr_scale: Annotated[float | None, Typed("Multiplies the lr of the exact modes and DDP.")] = None
    precision: Precision = "fp32"
    compile: Compile = "off"
    has_efficiency: Annotated[bool, Typed("Also measure efficiency by pairs; takes minutes each.", "--efficiency")] = (
        False
    )
    has_equal_time: Annotated[
        bool, Typed("Also runs with as many epochs as fit the best single device's time.", "--equal-time")
    ] = False
    out: Annotated[Path, Typed("Folder; a run goes into MODEL/MODE/seed-S below it.")] = Path("runs")
    is_forced: Annotated[bool, Typed("Repeat finished runs.", "--force")] = False
    jobs: Annotated[int, Typed("On GPUs: seeds after the first run N at a time, for their quality only.", least=1)] = 1
    command: str = ""  # as it was typed, for the report


@dataclass(frozen=True, kw_only=True)
class PoliciesOrder:
    """The user's own script under each policy."""

    devices: Annotated[str, Typed("As in cpu,cpu@0.4 or auto.")] = "auto"
    epochs: Annotated[int, Typed("Passes over the data, in each policy.", least=1)] = 3
    policies: Annotated[tuple[str, ...], Typed("Only these, as in balanced,async.", shown="all")] = POLICIES
    seed: Annotated[int, Typed("The same for all.", least=0)] = 0
    out: Annotated[Path, Typed("Folder; a run goes into POLICY below it.")] = Path("runs") / "policies"


@dataclass(frozen=True, kw_only=True)
class ScalingOrder:
    """Throughput of 1, 2, ... ranks."""

    model: Model = "lenet"
    data: Data = None
    device: Annotated[str, Typed("cpu (cores shared out) or cuda (one GPU per rank).")] = "cpu"
    ranks: Annotated[tuple[int, ...], Typed("Numbers of ranks, with 1 among them.")] = (1, 2)
    policy: Annotated[str, Typed("sync, balanced, cadence or async.")] = "balanced"
    samples: Annotated[int, Typed("Of each run.", least=1)] = 4096
    batch_size: Annotated[int | None, Typed("Per rank; default: the model's own.", least=1)] = None
    repeats: Annotated[int, Typed("Runs of each number of ranks, in turn.", least=1)] = 3


@dataclass(frozen=True, kw_only=True)
class StrategiesOrder:
    """Memory, traffic and time of every strategy; `paired`: speed against PyTorch's alone. `resolved` has no None."""

    is_quick: Annotated[bool, Typed("A small model, 2 ranks, few steps; about a minute.", "--quick")] = False
    ranks: Annotated[int | None, Typed("Ranks.", "--nproc", 1, "4, or one per share")] = None
    model: Annotated[
        str | None, Typed("gpt (25 M params), gpt-medium (5 M), gpt-small (1 M) or gpt-tiny.", shown="gpt")
    ] = None
    device: Annotated[str, Typed("cpu, or one GPU that all ranks share, as in cuda:0.")] = "cpu"
    shares: Annotated[tuple[float, ...] | None, Typed("Of memory, one per rank, as in 15,6.", shown="equal")] = None
    redundancy: Annotated[int, Typed("Copies of a shard; zero1, zero2 and fsdp.", least=0, most=1)] = 0
    steps: Annotated[int | None, Typed("Of each row; with --paired, of a segment.", shown="6, paired 3")] = None
    only: Annotated[tuple[str, ...] | None, Typed("Rows, as in fsdp,torch-fsdp.", shown="all")] = None
    is_paired: Annotated[bool, Typed("Instead: speed against PyTorch's, in turn, on 2 ranks.", "--paired")] = False
    pairs: Annotated[int, Typed("With --paired: pairs of segments.", least=2)] = 30


@dataclass(frozen=True, kw_only=True)
class DemoOrder:
    """`modes` None means all that these devices allow."""

    devices: Annotated[str, Typed("Two or more; @0.4 makes one slower by sleeping.")] = PAIR
    modes: Annotated[tuple[str, ...] | None, Typed("Only these, as in solo-0,solo-1,cpu-async.", shown="all")] = None
    samples: Annotated[int | None, Typed("Train on the first N digits only.", least=1, shown="all")] = None
    minutes: Annotated[float, Typed("Time budget: a slow machine trains fewer digits in each mode.", least=0.1)] = 4.0
    out: Annotated[Path, Typed("Folder; a run goes into lenet/MODE/seed-0 below it.")] = Path("runs") / "demo"
    epochs: int = 3
    progress: str = "auto"
