"""The settings as users type them: `Settings` for the keywords of `fit`, `SettingMethods` for the builder.

Written by tools/settings.py from the fields of RunConfig; edit those instead. Values are checked when the run starts.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypedDict

from uneven.config.names import (
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

if TYPE_CHECKING:
    from typing_extensions import Self, Unpack


class Settings(TypedDict, total=False):
    """How to train; all have defaults but batch_size and epochs (or max_steps). See docs/settings.md."""

    batch_size: int
    epochs: int
    num_epochs: int
    max_steps: int | None
    policy: PolicySetting
    devices: str
    backend: Backend
    seed: int
    accumulate: int
    global_batch_size: int | Auto | None
    max_global_batch_size: int | None
    shares: Sequence[float] | None
    strategy: Strategy | None
    memory_shares: Sequence[float] | None
    redundancy: int
    memory_cap: int | Sequence[int] | None
    bucket_mb: float | None
    activations: Activations
    sync_batchnorm: bool
    check_loss: bool
    max_grad_norm: float | None
    max_grad_value: float | None
    max_bad_steps: int
    lr_scale: float | LRScale | None
    scheduler_interval: SchedulerInterval | None
    anchor: int | None
    max_anchor: int | None
    overhead_target: float | None
    divergence_threshold: float | None
    max_staleness: int | None
    optimizer_state: OptimizerState | None
    verify: bool
    precision: Precision
    compile: Compile
    shuffle: bool
    drop_last: bool
    num_workers: int
    eval_every: int | str | None
    monitor: str | None
    monitor_mode: MonitorMode
    save_every: int | str | None
    keep_last: int | None
    keep_best: int | None
    checkpoint_copies: int
    resume: str | Path | None
    out: str | Path | None
    overwrite: bool
    replay: str | Path | None
    skip: str | None
    deadline: float | Auto | None
    on_fault: OnFault
    min_ranks: int
    restarts: int
    grace: float
    progress: Progress


class SettingMethods:
    """The builder's methods of single settings. Each notes its value and returns the builder."""

    def __init__(self) -> None:
        self._settings: Settings = {}

    def settings(self, **settings: "Unpack[Settings]") -> "Self":
        """Several settings at once, under the names of `fit`."""
        self._settings.update(settings)
        return self

    def batch_size(self, batch_size: int) -> "Self":
        """Samples per device and micro-batch."""
        return self.settings(batch_size=batch_size)

    def epochs(self, epochs: int) -> "Self":
        """Passes over the data; each trains every sample exactly once."""
        return self.settings(epochs=epochs)

    def num_epochs(self, num_epochs: int) -> "Self":
        """The same as `epochs`."""
        return self.settings(epochs=num_epochs)

    def max_steps(self, max_steps: int | None) -> "Self":
        """End the run after this many steps, if its epochs have not ended before."""
        return self.settings(max_steps=max_steps)

    def policy(self, policy: PolicySetting) -> "Self":
        """Sum gradients (sync, balanced), average params (cadence, async), or as planned (auto)."""
        return self.settings(policy=policy)

    def devices(self, devices: str) -> "Self":
        """Where to train, as in cuda:0,cpu or cpu,cpu@0.4; auto: every usable CUDA device, else the CPU."""
        return self.settings(devices=devices)

    def backend(self, backend: Backend) -> "Self":
        """How ranks communicate: NCCL, or through host memory (cpu), which is shared (shm) or sent over Gloo."""
        return self.settings(backend=backend)

    def seed(self, seed: int) -> "Self":
        """Seed of weights, sample order, augmentation and dropout."""
        return self.settings(seed=seed)

    def accumulate(self, accumulate: int) -> "Self":
        """Micro-batches per optimizer step."""
        return self.settings(accumulate=accumulate)

    def global_batch_size(self, global_batch_size: int | Auto | None) -> "Self":
        """Samples per optimizer step of all devices together; auto: balanced chooses it if gradient sums take long."""
        return self.settings(global_batch_size=global_batch_size)

    def max_global_batch_size(self, max_global_batch_size: int | None) -> "Self":
        """The most that global_batch_size='auto' may choose."""
        return self.settings(max_global_batch_size=max_global_batch_size)

    def shares(self, shares: Sequence[float] | None) -> "Self":
        """Fixed shares of the samples, one number per device, as in 5,2 (balanced, cadence)."""
        return self.settings(shares=shares)

    def strategy(self, strategy: Strategy | None) -> "Self":
        """What a device holds: everything (ddp-flat, ddp-bucketed), or shards of state, gradients, params, layers."""
        return self.settings(strategy=strategy)

    def memory_shares(self, memory_shares: Sequence[float] | None) -> "Self":
        """How a strategy divides what it shards, one number per device, as in 15,6."""
        return self.settings(memory_shares=memory_shares)

    def redundancy(self, redundancy: int) -> "Self":
        """Copies of every shard on another device: with 1 any device may be lost."""
        return self.settings(redundancy=redundancy)

    def memory_cap(self, memory_cap: int | Sequence[int] | None) -> "Self":
        """Samples a device may hold at once: one number for all devices, or one per device, as in 64,16."""
        return self.settings(memory_cap=memory_cap)

    def bucket_mb(self, bucket_mb: float | None) -> "Self":
        """Size of a gradient bucket in MB."""
        return self.settings(bucket_mb=bucket_mb)

    def activations(self, activations: Activations) -> "Self":
        """What forward keeps for backward: all, none (recompute), all on the host (offload); auto: by memory."""
        return self.settings(activations=activations)

    def sync_batchnorm(self, sync_batchnorm: bool = True) -> "Self":
        """Normalize BatchNorm over the samples of all devices (sync, balanced)."""
        return self.settings(sync_batchnorm=sync_batchnorm)

    def check_loss(self, check_loss: bool = True) -> "Self":
        """Refuse a loss that is a mean over tokens where batches are weighted by samples."""
        return self.settings(check_loss=check_loss)

    def max_grad_norm(self, max_grad_norm: float | None) -> "Self":
        """Clip the gradient norm: of the sum with sync and balanced, of each device with cadence and async."""
        return self.settings(max_grad_norm=max_grad_norm)

    def max_grad_value(self, max_grad_value: float | None) -> "Self":
        """Clip every element of the same gradients to this size, before max_grad_norm."""
        return self.settings(max_grad_value=max_grad_value)

    def max_bad_steps(self, max_bad_steps: int) -> "Self":
        """End the run after this many steps in a row with NaN or infinite loss or gradients; each is skipped."""
        return self.settings(max_bad_steps=max_bad_steps)

    def lr_scale(self, lr_scale: float | LRScale | None) -> "Self":
        """Multiply every learning rate by a number, or by the effective number of devices (auto: linear)."""
        return self.settings(lr_scale=lr_scale)

    def scheduler_interval(self, scheduler_interval: SchedulerInterval | None) -> "Self":
        """Step the scheduler after every step of the run, or after every epoch."""
        return self.settings(scheduler_interval=scheduler_interval)

    def anchor(self, anchor: int | None) -> "Self":
        """Batches of the slowest device between two averages, at the start."""
        return self.settings(anchor=anchor)

    def max_anchor(self, max_anchor: int | None) -> "Self":
        """Upper limit of the anchor, which grows until rounds cost at most overhead_target."""
        return self.settings(max_anchor=max_anchor)

    def overhead_target(self, overhead_target: float | None) -> "Self":
        """Fraction of the time that rounds may cost."""
        return self.settings(overhead_target=overhead_target)

    def divergence_threshold(self, divergence_threshold: float | None) -> "Self":
        """Relative distance of a replica from the average above which the anchor stops growing."""
        return self.settings(divergence_threshold=divergence_threshold)

    def max_staleness(self, max_staleness: int | None) -> "Self":
        """Batches a device may train while an average is under way."""
        return self.settings(max_staleness=max_staleness)

    def optimizer_state(self, optimizer_state: OptimizerState | None) -> "Self":
        """Keep each device's own optimizer state, or average it with the params."""
        return self.settings(optimizer_state=optimizer_state)

    def verify(self, verify: bool = True) -> "Self":
        """Compare checksums at every stage of an average, and replicas at the end."""
        return self.settings(verify=verify)

    def precision(self, precision: Precision) -> "Self":
        """Number format of forward and backward; auto: one that all devices compute natively."""
        return self.settings(precision=precision)

    def compile(self, compile: Compile) -> "Self":
        """Use torch.compile (default), one CUDA graph per step (graph), or neither (off)."""
        return self.settings(compile=compile)

    def shuffle(self, shuffle: bool = True) -> "Self":
        """Draw a new order of the samples for every epoch, or use that of the data set."""
        return self.settings(shuffle=shuffle)

    def drop_last(self, drop_last: bool = True) -> "Self":
        """Leave out the last step of an epoch if it would have fewer samples."""
        return self.settings(drop_last=drop_last)

    def num_workers(self, num_workers: int) -> "Self":
        """DataLoader processes per device, for data sets that are not tensors."""
        return self.settings(num_workers=num_workers)

    def eval_every(self, eval_every: int | str | None) -> "Self":
        """Evaluate every N epochs, or as in '500 steps' or '10 min', and always at the end of the run."""
        return self.settings(eval_every=eval_every)

    def monitor(self, monitor: str | None) -> "Self":
        """The evaluated metric that ReduceLROnPlateau and keep_best use."""
        return self.settings(monitor=monitor)

    def monitor_mode(self, monitor_mode: MonitorMode) -> "Self":
        """Which value of monitor is best; auto: min if its name has loss, error, perplexity, mse or mae, else max."""
        return self.settings(monitor_mode=monitor_mode)

    def save_every(self, save_every: int | str | None) -> "Self":
        """Save a checkpoint in out every N epochs, or as in '500 steps' or '10 min', and at the end."""
        return self.settings(save_every=save_every)

    def keep_last(self, keep_last: int | None) -> "Self":
        """Keep this many of the newest checkpoints."""
        return self.settings(keep_last=keep_last)

    def keep_best(self, keep_best: int | None) -> "Self":
        """Keep this many checkpoints with the best value of monitor, in addition to keep_last."""
        return self.settings(keep_best=keep_best)

    def checkpoint_copies(self, checkpoint_copies: int) -> "Self":
        """Machines that keep every checkpoint."""
        return self.settings(checkpoint_copies=checkpoint_copies)

    def resume(self, resume: str | Path | None) -> "Self":
        """Continue from a checkpoint: a run's folder, one checkpoint in it, or auto: the newest whole one in out."""
        return self.settings(resume=resume)

    def out(self, out: str | Path | None) -> "Self":
        """Folder for results: new, empty, or of an earlier run, whose files are then moved to FOLDER.1."""
        return self.settings(out=out)

    def overwrite(self, overwrite: bool = True) -> "Self":
        """Replace the files of an earlier run in out, or write beside other files."""
        return self.settings(overwrite=overwrite)

    def replay(self, replay: str | Path | None) -> "Self":
        """Folder of a finished run to repeat from its log."""
        return self.settings(replay=replay)

    def skip(self, skip: str | None) -> "Self":
        """Checks between machines to leave out, as in data or data,clock; docs/preflight.md lists them."""
        return self.settings(skip=skip)

    def deadline(self, deadline: float | Auto | None) -> "Self":
        """Seconds without a step until a device counts as lost; auto: 30 s or 10 steps; none: never."""
        return self.settings(deadline=deadline)

    def on_fault(self, on_fault: OnFault) -> "Self":
        """If a device is lost: the others train its samples (go-on), or the run ends (end)."""
        return self.settings(on_fault=on_fault)

    def min_ranks(self, min_ranks: int) -> "Self":
        """End the run if fewer devices than this remain."""
        return self.settings(min_ranks=min_ranks)

    def restarts(self, restarts: int) -> "Self":
        """How many times lost ranks are started again in a run."""
        return self.settings(restarts=restarts)

    def grace(self, grace: float) -> "Self":
        """Seconds that a run may take to save after SIGTERM or Ctrl-C before it is ended."""
        return self.settings(grace=grace)

    def progress(self, progress: Progress) -> "Self":
        """Progress on stderr: a bar, a line per epoch, or none; auto: a bar on a terminal, else lines."""
        return self.settings(progress=progress)
