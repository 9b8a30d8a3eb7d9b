"""The settings of a run: one frozen dataclass, checked before anything starts, printed once and saved with the run.

`sources.resolve` makes it from what the user wrote (`fit`, `Ddp.builder`, `Ddp.setup`) and what the command line of
`uneven run` was given, which takes precedence. Invariant: a RunConfig that exists can be run; a value that cannot
work, or a setting that would be ignored, is an InputError here and not a surprise in the middle of training.
Each field is the only place where its setting is declared: see [Note: one list of settings] in setting.py.
"""

# ruff: noqa: RUF009  # `setting` makes a field
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from uneven.config.conflicts import conflicts
from uneven.config.names import (
    EXACT_POLICIES,
    LOCAL_POLICIES,
    MODEL_PARALLEL,
    REPLICATED,
    Activations,
    Auto,
    Backend,
    Compile,
    LRScale,
    MonitorMode,
    OnFault,
    OptimizerState,
    PolicySetting,
    Precision,
    Progress,
    SchedulerInterval,
    Strategy,
)
from uneven.config.setting import about, setting, settings_of
from uneven.config.text import INTERVAL, SKIPPABLE, is_interval, is_skip, read_skip
from uneven.errors import InputError


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """The checked settings of one run. Immutable; `dataclasses.replace` checks again."""

    batch_size: int = field(metadata=about("Samples per device and micro-batch.", least=1))
    epochs: int = field(
        metadata=about(
            "Passes over the data; each trains every sample exactly once.",
            least=1,
            alias="num_epochs",
            none="required, unless max_steps is given",
        )
    )
    max_steps: int | None = setting(
        None, "End the run after this many steps, if its epochs have not ended before.", least=1, none="no limit"
    )
    policy: PolicySetting = setting(
        "balanced", "Sum gradients (sync, balanced), average params (cadence, async), or as planned (auto)."
    )
    devices: str = setting(
        "auto", "Where to train, as in cuda:0,cpu or cpu,cpu@0.4; auto: every usable CUDA device, else the CPU."
    )
    backend: Backend = setting(
        "auto", "How ranks communicate: NCCL, or through host memory (cpu), which is shared (shm) or sent over Gloo."
    )
    seed: int = setting(0, "Seed of weights, sample order, augmentation and dropout.", least=0, most=2**63 - 1)
    accumulate: int = setting(1, "Micro-batches per optimizer step.", least=1)
    global_batch_size: int | Auto | None = setting(
        None,
        "Samples per optimizer step of all devices together; auto: balanced chooses it if gradient sums take long.",
        least=1,
        policies=EXACT_POLICIES,
        why_not="there every device steps by itself on batch_size samples; leave it out, or use policy='balanced'",
        none="batch_size x accumulate x devices",
    )
    max_global_batch_size: int | None = setting(
        None,
        "The most that global_batch_size='auto' may choose.",
        least=1,
        policies=("balanced",),
        none="4 x batch_size x accumulate x devices",
    )
    shares: tuple[float, ...] | None = setting(
        None,
        "Fixed shares of the samples, one number per device, as in 5,2 (balanced, cadence).",
        none="by measured speed",
    )
    strategy: Strategy | None = setting(
        None,
        "What a device holds: everything (ddp-flat, ddp-bucketed), or shards of state, gradients, params, layers.",
        policies=EXACT_POLICIES,
        why_not="there every device trains a replica of its own; use policy='balanced' or 'sync', or leave the "
        "strategy out",
        none="as ddp-bucketed",
    )
    memory_shares: tuple[float, ...] | None = setting(
        None,
        "How a strategy divides what it shards, one number per device, as in 15,6.",
        policies=EXACT_POLICIES,
        none="by the devices' memory",
    )
    redundancy: int = setting(
        0, "Copies of every shard on another device: with 1 any device may be lost.", least=0, most=1
    )
    memory_cap: int | tuple[int, ...] | None = setting(
        None,
        "Samples a device may hold at once: one number for all devices, or one per device, as in 64,16.",
        least=1,
        policies=EXACT_POLICIES,
        why_not="there every device holds batch_size samples at once, whatever its speed, and the cap would be "
        "ignored; leave it out and make batch_size smaller",
        none="balanced probes CUDA devices",
    )
    bucket_mb: float | None = setting(
        None, "Size of a gradient bucket in MB.", policies=EXACT_POLICIES, none="chosen by the strategy"
    )
    activations: Activations = setting(
        "keep", "What forward keeps for backward: all, none (recompute), all on the host (offload); auto: by memory."
    )
    sync_batchnorm: bool = setting(False, "Normalize BatchNorm over the samples of all devices (sync, balanced).")
    check_loss: bool = setting(True, "Refuse a loss that is a mean over tokens where batches are weighted by samples.")
    max_grad_norm: float | None = setting(
        None,
        "Clip the gradient norm: of the sum with sync and balanced, of each device with cadence and async.",
        none="no clipping",
    )
    max_grad_value: float | None = setting(
        None, "Clip every element of the same gradients to this size, before max_grad_norm.", none="no clipping"
    )
    max_bad_steps: int = setting(
        3,
        "End the run after this many steps in a row with NaN or infinite loss or gradients; each is skipped.",
        least=1,
    )
    lr_scale: float | LRScale | None = setting(
        None,
        "Multiply every learning rate by a number, or by the effective number of devices (auto: linear).",
        none="1, with cadence and async auto",
    )
    scheduler_interval: SchedulerInterval | None = setting(
        None, "Step the scheduler after every step of the run, or after every epoch.", none="every step"
    )
    anchor: int | None = setting(
        None,
        "Batches of the slowest device between two averages, at the start.",
        least=1,
        policies=LOCAL_POLICIES,
        none="10",
    )
    max_anchor: int | None = setting(
        None,
        "Upper limit of the anchor, which grows until rounds cost at most overhead_target.",
        least=1,
        policies=LOCAL_POLICIES,
        none="200",
    )
    overhead_target: float | None = setting(
        None, "Fraction of the time that rounds may cost.", below=1, policies=LOCAL_POLICIES, none="0.03"
    )
    divergence_threshold: float | None = setting(
        None,
        "Relative distance of a replica from the average above which the anchor stops growing.",
        policies=LOCAL_POLICIES,
        none="0.05",
    )
    max_staleness: int | None = setting(
        None,
        "Batches a device may train while an average is under way.",
        least=1,
        policies=("async",),
        none="twice its batches per window",
    )
    optimizer_state: OptimizerState | None = setting(
        None,
        "Keep each device's own optimizer state, or average it with the params.",
        policies=LOCAL_POLICIES,
        none="keep",
    )
    verify: bool = setting(
        False, "Compare checksums at every stage of an average, and replicas at the end.", policies=LOCAL_POLICIES
    )
    precision: Precision = setting(
        "fp32", "Number format of forward and backward; auto: one that all devices compute natively."
    )
    compile: Compile = setting("off", "Use torch.compile (default), one CUDA graph per step (graph), or neither (off).")
    shuffle: bool = setting(True, "Draw a new order of the samples for every epoch, or use that of the data set.")
    drop_last: bool = setting(False, "Leave out the last step of an epoch if it would have fewer samples.")
    num_workers: int = setting(0, "DataLoader processes per device, for data sets that are not tensors.", least=0)
    eval_every: int | str | None = setting(
        None,
        "Evaluate every N epochs, or as in '500 steps' or '10 min', and always at the end of the run.",
        accepts=is_interval,
        allowed_text=INTERVAL,
        none="every epoch",
    )
    monitor: str | None = setting(
        None,
        "The evaluated metric that ReduceLROnPlateau and keep_best use.",
        allowed_text="the name of a metric, as in 'loss'",
        none="'loss', or the only metric",
    )
    monitor_mode: MonitorMode = setting(
        "auto",
        "Which value of monitor is best; auto: min if its name has loss, error, perplexity, mse or mae, else max.",
    )
    save_every: int | str | None = setting(
        None,
        "Save a checkpoint in out every N epochs, or as in '500 steps' or '10 min', and at the end.",
        accepts=is_interval,
        allowed_text=INTERVAL,
        none="the result alone",
    )
    keep_last: int | None = setting(None, "Keep this many of the newest checkpoints.", least=1, none="all of them")
    keep_best: int | None = setting(
        None,
        "Keep this many checkpoints with the best value of monitor, in addition to keep_last.",
        least=1,
        none="none beside keep_last",
    )
    checkpoint_copies: int = setting(1, "Machines that keep every checkpoint.", least=1, most=2)
    resume: Path | None = setting(
        None,
        "Continue from a checkpoint: a run's folder, one checkpoint in it, or auto: the newest whole one in out.",
        none="a new run",
    )
    out: Path | None = setting(
        None,
        "Folder for results: new, empty, or of an earlier run, whose files are then moved to FOLDER.1.",
        none="nothing is written",
    )
    overwrite: bool = setting(False, "Replace the files of an earlier run in out, or write beside other files.")
    replay: Path | None = setting(None, "Folder of a finished run to repeat from its log.", none="no replay")
    skip: str | None = setting(
        None,
        "Checks between machines to leave out, as in data or data,clock; docs/preflight.md lists them.",
        accepts=is_skip,
        allowed_text=f"one or more of {', '.join(SKIPPABLE)}, separated by commas",
        none="all checks are made",
    )
    deadline: float | Auto | None = setting(
        "auto", "Seconds without a step until a device counts as lost; auto: 30 s or 10 steps; none: never."
    )
    on_fault: OnFault = setting(
        "go-on", "If a device is lost: the others train its samples (go-on), or the run ends (end)."
    )
    min_ranks: int = setting(1, "End the run if fewer devices than this remain.", least=1)
    restarts: int = setting(0, "How many times lost ranks are started again in a run.", least=0)
    grace: float = setting(
        30.0, "Seconds that a run may take to save after SIGTERM or Ctrl-C before it is ended.", least=0
    )
    progress: Progress = setting(
        "auto", "Progress on stderr: a bar, a line per epoch, or none; auto: a bar on a terminal, else lines."
    )

    def __post_init__(self) -> None:
        for name, one in settings_of(RunConfig).items():
            one.check(getattr(self, name))
        for message in conflicts(self, settings_of(RunConfig)):
            raise InputError(message)

    @classmethod
    def unchecked(cls, **settings: Any) -> "RunConfig":
        """Of settings that may contradict each other, which `conflicts` tells; nothing can be run by it."""
        config = object.__new__(cls)
        for name, one in settings_of(RunConfig).items():
            object.__setattr__(config, name, settings.get(name, one.default))
        return config

    def slot_size(self, ranks: int) -> int:
        """Samples per optimizer step: of all ranks together, or in the local policies of each rank."""
        per_rank, size = self.batch_size * self.accumulate, self.global_batch_size
        # With "auto" the plain size, until the ranks have chosen: train/policies.py.
        return per_rank if self.is_local else size if isinstance(size, int) else per_rank * ranks

    def caps(self, ranks: int) -> tuple[float, ...]:
        """How many samples each rank may hold at once, as far as memory_cap limits it."""
        cap = self.memory_cap
        if cap is None or isinstance(cap, int):
            return (float("inf") if cap is None else cap,) * ranks
        if len(cap) != ranks:
            raise InputError(f"memory_cap={cap!r} has {len(cap)} entries for {ranks} devices; pass one per device")
        return cap

    @property
    def is_local(self) -> bool:
        """Whether ranks step by themselves and average params in rounds, instead of summing gradients."""
        return self.policy in LOCAL_POLICIES

    @property
    def is_replicated(self) -> bool:
        """Whether every device holds the whole model."""
        return self.strategy is None or self.strategy in REPLICATED

    @property
    def is_model_parallel(self) -> bool:
        """Whether all devices train the same samples, each its part of the layers."""
        return self.strategy in MODEL_PARALLEL

    @property
    def resumes_newest(self) -> bool:
        """Whether the run goes on from the newest whole checkpoint in `out`, where there is one."""
        return self.resume == Path("auto")

    @property
    def has_fixed_shares(self) -> bool:
        """Whether the shares are known beforehand, so that nothing has to be measured."""
        return self.shares is not None or self.replay is not None

    @property
    def skipped_checks(self) -> tuple[str, ...]:
        """The checks between machines that this run does not make."""
        return read_skip(self.skip)

    @property
    def keeps_rows(self) -> bool:
        """Whether a device trains the same rows of every step, so that a state may be carried from batch to batch."""
        return self.policy == "sync" or (self.policy == "balanced" and self.shares is not None)

    def to_json(self) -> dict[str, Any]:
        values = {name: str(value) if isinstance(value, Path) else value for name, value in asdict(self).items()}
        cap = self.memory_cap
        # A list, as it is read back from a file, so that the two compare.
        return {**values, "memory_cap": list(cap) if isinstance(cap, tuple) else cap}
