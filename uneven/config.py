"""What a run was asked to do, checked before anything starts, printed once and saved with the run.

`Settings` is the one list of options: `fit`, `Ddp.builder` and `Ddp.setup` take the same names. A value that cannot
work is an InputError here, not a surprise in the middle of training. What was given to `uneven run` stands above what
the script says.
"""

import difflib
from collections.abc import Callable, Mapping, Sequence, Sized
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict

from uneven.errors import InputError

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

EXACT_POLICIES = ("sync", "balanced")
LOCAL_POLICIES = ("cadence", "async")
POLICIES = EXACT_POLICIES + LOCAL_POLICIES
LOCAL_SETTINGS = (
    *("anchor", "max_anchor", "overhead_target", "divergence_threshold", "max_staleness", "optimizer_state", "verify"),
)
SCALES = ("auto", "linear", "sqrt")
REPLICATED = ("ddp-flat", "ddp-bucketed", "zero1")  # strategies with the whole model on every device
MODEL_PARALLEL = ("tensor", "sequence")  # strategies whose devices work on the same samples
SHARDED = ("zero1", "zero2", "fsdp", *MODEL_PARALLEL)  # strategies in which devices hold a piece of something
STRATEGIES = (*REPLICATED, "zero2", "fsdp", *MODEL_PARALLEL)
CHOICES = {
    "policy": POLICIES,
    "backend": ("auto", "nccl", "cpu"),
    "strategy": STRATEGIES,
    "precision": ("fp32", "bf16", "fp16", "auto"),
    "compile": ("off", "default", "graph"),
    "optimizer_state": ("keep", "average"),
    "activations": ("keep", "recompute", "offload", "auto"),
    "progress": ("auto", "bar", "lines", "off"),
}
MAYBE_NONE = ("strategy", "optimizer_state")

TrainStep = Callable[["nn.Module", Any], Any]
EvalStep = Callable[["nn.Module", Any], tuple[Mapping[str, Any], int]]


@dataclass(frozen=True)
class Evaluation:
    """`eval_step(model, batch)` gives sums and a count; a metric is the total sum over the total count."""

    dataset: Any
    eval_step: EvalStep
    every: int = 1  # epochs; the last epoch is always evaluated
    batch_size: int | None = None


@dataclass(frozen=True)
class Task:
    """What to train: the user's factories and data. One call of each factory per rank."""

    make_model: Callable[[], "nn.Module"]
    make_optimizer: Callable[[Any], "Optimizer"]
    train_step: TrainStep
    dataset: Any
    make_scheduler: Callable[..., Any] | None = None
    evaluation: Evaluation | None = None


class Settings(TypedDict, total=False):
    """How to train it; every key has a default but batch_size and epochs. See docs/settings.md."""

    batch_size: int
    epochs: int
    policy: str
    backend: str
    devices: str
    seed: int
    accumulate: int
    global_batch_size: int | None
    shares: Sequence[float] | None
    strategy: str | None
    memory_shares: Sequence[float] | None
    bucket_mb: float | None
    activations: str
    memory_cap: int | Sequence[int] | None
    sync_batchnorm: bool
    max_grad_norm: float | None
    lr_scale: float | str | None
    anchor: int | None
    max_anchor: int | None
    overhead_target: float | None
    divergence_threshold: float | None
    max_staleness: int | None
    optimizer_state: str | None
    verify: bool
    precision: str
    compile: str
    num_workers: int
    checkpoint_every: int | None
    out: str | Path | None
    replay: str | Path | None
    progress: str


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """The checked settings of one run."""

    batch_size: int
    epochs: int
    policy: str = "balanced"
    backend: str = "auto"
    devices: str = "auto"
    seed: int = 0
    accumulate: int = 1
    global_batch_size: int | None = None
    shares: tuple[float, ...] | None = None
    strategy: str | None = None
    memory_shares: tuple[float, ...] | None = None
    bucket_mb: float | None = None
    activations: str = "keep"
    memory_cap: int | tuple[int, ...] | None = None
    sync_batchnorm: bool = False
    max_grad_norm: float | None = None
    lr_scale: float | str | None = None
    anchor: int | None = None
    max_anchor: int | None = None
    overhead_target: float | None = None
    divergence_threshold: float | None = None
    max_staleness: int | None = None
    optimizer_state: str | None = None
    verify: bool = False
    precision: str = "fp32"
    compile: str = "off"
    num_workers: int = 0
    checkpoint_every: int | None = None
    out: Path | None = None
    replay: Path | None = None
    progress: str = "auto"

    def __post_init__(self) -> None:
        _check_choices(vars(self))
        for name in ("batch_size", "epochs", "accumulate"):
            _check_count(name, getattr(self, name), least=1)
        _check_count("num_workers", self.num_workers, least=0)
        _check_count("seed", self.seed, least=0)
        if self.global_batch_size is not None:
            _check_count("global_batch_size", self.global_batch_size, least=1)
        for name in ("shares", "memory_shares"):
            given = getattr(self, name)
            if given is not None and (min(given, default=-1) < 0 or sum(given) <= 0):
                raise InputError(f"{name}={given!r} must be numbers of at least 0, one per device, not all 0")
        self._check_caps()
        self._check_strategy()
        self._check_activations()
        if self.replay is not None and self.shares is not None:
            raise InputError("replay=... with shares=...: a replay takes its shares from the log; leave shares out")
        if self.checkpoint_every is not None:
            _check_count("checkpoint_every", self.checkpoint_every, least=1)
            if self.out is None:
                raise InputError("checkpoint_every needs a folder to write to: add out='runs/my-run'")
        norm = self.max_grad_norm
        if norm is not None and not _is_above_zero(norm):
            raise InputError(f"max_grad_norm={norm!r} must be a number above 0, or None for no clipping")
        if self.lr_scale is not None and not _is_above_zero(self.lr_scale) and self.lr_scale not in SCALES:
            raise InputError(f"lr_scale={self.lr_scale!r} must be a number above 0 or one of {', '.join(SCALES)}")
        self._check_windows()

    def _check_caps(self) -> None:
        given = self.memory_cap
        if given is None:
            return
        if given == () or not all(_is_count(cap, 1) for cap in (given if isinstance(given, tuple) else (given,))):
            raise InputError(
                f"memory_cap={given!r} must be a whole number of samples of at least 1, or one such number per device"
            )
        if self.is_local:
            raise InputError(
                f"memory_cap={given!r} with policy={self.policy!r}: there every device holds batch_size samples at "
                "once, whatever its speed, and the cap would be ignored; leave it out and make batch_size smaller"
            )

    def _check_strategy(self) -> None:
        """Who holds what goes with the exact policies: the local ones have a whole replica on every device."""
        name, bytes_by = self.strategy, self.memory_shares
        if bytes_by is not None and name not in SHARDED:
            raise InputError(
                f"memory_shares={bytes_by!r} says how a strategy cuts its bytes, and "
                f"strategy={name!r} cuts nothing; use one of {', '.join(SHARDED)}, or leave it out"
            )
        if name is None:
            return
        if self.is_local:
            raise InputError(
                f"strategy={name!r} with policy={self.policy!r}: there every device trains a replica of its own; use "
                "policy='balanced' or 'sync', or leave the strategy out"
            )
        if self.compile == "graph" and name in SHARDED:
            raise InputError(f"compile='graph' with strategy={name!r}: a captured step has whole params; use 'off'")
        if not self.is_replicated:
            self._check_cut(name)

    def _check_activations(self) -> None:
        if self.bucket_mb is not None and (self.is_local or self.strategy in ("ddp-flat", *MODEL_PARALLEL)):
            what = f"policy={self.policy!r}" if self.is_local else f"strategy={self.strategy!r}"
            raise InputError(f"bucket_mb={self.bucket_mb!r} with {what}: it sends no buckets; leave bucket_mb out")
        if self.bucket_mb is not None and self.bucket_mb != 0 and not _is_above_zero(self.bucket_mb):
            raise InputError(f"bucket_mb={self.bucket_mb!r} must be a number of megabytes of at least 0")
        if self.activations == "keep":
            return
        given = f"activations={self.activations!r}"
        if self.compile != "off":
            raise InputError(f"{given} with compile={self.compile!r}: use compile='off', or activations='keep'")
        if self.sync_batchnorm and self.activations != "offload":
            raise InputError(f"{given} with sync_batchnorm=True: a recomputed layer would wait for ranks that do not")
        if self.activations == "auto" and self.is_model_parallel:
            raise InputError(f"{given} with strategy={self.strategy!r}: all devices must choose alike; use 'recompute'")

    def _check_cut(self, name: str) -> None:
        """What does not go with a model that is in pieces."""
        same_samples = "devices train the same samples together; leave it out"
        ways_out = {
            "precision": (self.precision == "fp16", "gradients are not where the scaler looks for them; use 'bf16'"),
            "sync_batchnorm": (self.sync_batchnorm, "use 'zero1', or a norm that sees single samples"),
            "compile": (self.compile != "off", "params come and go while the model computes; use 'off'"),
            "shares": (self.is_model_parallel and self.shares is not None, same_samples),
            "memory_cap": (self.is_model_parallel and self.memory_cap is not None, same_samples),
        }
        for setting, (is_given, why) in ways_out.items():
            if is_given:
                raise InputError(f"{setting}={getattr(self, setting)!r} with strategy={name!r}: {why}")

    def _check_windows(self) -> None:
        """The settings of the local policies, which the exact ones must not be given: they would be ignored."""
        for name in ("anchor", "max_anchor", "max_staleness"):
            if getattr(self, name) is not None:
                _check_count(name, getattr(self, name), least=1)
        for name in ("overhead_target", "divergence_threshold"):
            value = getattr(self, name)
            if value is not None and not _is_above_zero(value):
                raise InputError(f"{name}={value!r} must be a number above 0")
        if self.overhead_target is not None and self.overhead_target >= 1:
            raise InputError(f"overhead_target={self.overhead_target!r} is a share of the time and must be below 1")
        if self.max_anchor is not None and self.anchor is not None and self.anchor > self.max_anchor:
            raise InputError(f"anchor={self.anchor} is above max_anchor={self.max_anchor}, which bounds it")
        if self.is_local:
            if self.global_batch_size is not None:
                raise InputError(
                    f"global_batch_size={self.global_batch_size!r} with policy={self.policy!r}: there every device "
                    "steps by itself on batch_size samples; leave it out, or use policy='balanced'"
                )
            if self.max_staleness is not None and self.policy != "async":
                raise InputError(
                    f"max_staleness={self.max_staleness} belongs to policy='async': cadence waits for every average"
                )
            return
        given = [name for name in LOCAL_SETTINGS if getattr(self, name) not in (None, False)]
        if given:
            raise InputError(
                f"{given[0]}={getattr(self, given[0])!r} belongs to the policies {' and '.join(LOCAL_POLICIES)}; with "
                f"policy={self.policy!r} it would be ignored: leave it out"
            )

    def slot_size(self, ranks: int) -> int:
        """Samples per optimizer step: of all ranks together, or in the local policies of each rank."""
        each = self.batch_size * self.accumulate
        return each if self.is_local else self.global_batch_size or each * ranks

    def caps(self, ranks: int) -> tuple[float, ...]:
        """How many samples each rank may hold at once, as far as the user has said."""
        given = self.memory_cap
        if given is None or isinstance(given, int):
            return (float("inf") if given is None else given,) * ranks
        if len(given) != ranks:
            raise InputError(f"memory_cap={given!r} has {len(given)} entries for {ranks} devices; pass one per device")
        return given

    @property
    def is_local(self) -> bool:
        """Whether ranks train by themselves and average params now and then, instead of summing gradients."""
        return self.policy in LOCAL_POLICIES

    @property
    def is_replicated(self) -> bool:
        """Whether every device holds the whole model."""
        return self.strategy is None or self.strategy in REPLICATED

    @property
    def is_model_parallel(self) -> bool:
        """Whether all devices train the same samples, each its part of the layers."""
        return self.strategy in MODEL_PARALLEL

    def evaluates(self, epoch: int, every: int) -> bool:
        """Whether an evaluation every so many epochs falls on the end of this one; the last always counts."""
        return epoch + 1 == self.epochs or (epoch + 1) % every == 0

    def checkpoints(self, epoch: int) -> bool:
        """Whether the state is saved after this epoch; after the last it is the result."""
        every = self.checkpoint_every
        return every is not None and epoch + 1 != self.epochs and (epoch + 1) % every == 0

    @property
    def has_fixed_shares(self) -> bool:
        """Whether the shares are known beforehand, so that nothing has to be measured."""
        return self.shares is not None or self.replay is not None

    def to_json(self) -> dict[str, Any]:
        paths = {"out": self.out, "replay": self.replay}
        texts = {name: None if path is None else str(path) for name, path in paths.items()}
        cap = self.memory_cap
        # A list, as it is read back from a file, so that the two compare.
        return {**asdict(self), **texts, "memory_cap": list(cap) if isinstance(cap, tuple) else cap}


def override(settings: Mapping[str, Any]) -> None:
    """From now on `resolve` takes these above what it is given: the command line of `uneven run`, in this process.

    What is wrong by itself is refused here, before a rank starts; what depends on the script, in the ranks.
    """
    _check_names(settings)
    _check_choices(settings)
    _overrides.update(settings)


def resolve(settings: Mapping[str, Any]) -> RunConfig:
    """Settings as the user typed them -> a checked RunConfig."""
    given = {("epochs" if name == "num_epochs" else name): value for name, value in settings.items()}
    _check_names(given)
    given |= _overrides
    for name in ("batch_size", "epochs"):
        if name not in given:
            raise InputError(f"{name} is missing: pass {name}=... (it has no default)")
    for name in ("shares", "memory_shares"):
        if given.get(name) is not None:
            given[name] = tuple(float(share) for share in given[name])
    if isinstance(given.get("memory_cap"), Sequence) and not isinstance(given["memory_cap"], str):
        given["memory_cap"] = tuple(given["memory_cap"])
    for name in ("out", "replay"):
        if given.get(name) is not None:
            given[name] = Path(given[name])
    return RunConfig(**given)


def check_task(task: Task) -> None:
    """Refuse what cannot be trained, naming the argument and the way out."""
    is_built = not isinstance(task.make_model, type) and hasattr(task.make_model, "named_parameters")
    if not callable(task.make_model) or is_built:
        raise InputError(
            f"model must be a function that makes the model, got {type(task.make_model).__name__}: "
            "each device builds its own, so pass model=lambda: Net() (or the class itself)"
        )
    for name, value in (("optimizer", task.make_optimizer), ("step", task.train_step)):
        if not callable(value):
            raise InputError(f"{name} must be a function, got {type(value).__name__}")
    if not isinstance(task.dataset, Sized) or not hasattr(task.dataset, "__getitem__"):
        raise InputError(
            f"dataset must be map-style, with len() and indexing, got {type(task.dataset).__name__}; "
            "an iterable data set cannot be shared out exactly once"
        )
    if len(task.dataset) == 0:
        raise InputError("dataset is empty: there is nothing to train on")


_overrides: dict[str, Any] = {}


def _check_names(settings: Mapping[str, Any]) -> None:
    known = [f.name for f in fields(RunConfig)]
    for name in settings:
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1)
            hint = f"; did you mean {close[0]!r}?" if close else f"; the settings are {', '.join(known)}"
            raise InputError(f"unknown setting {name!r}{hint}")


def _check_count(name: str, value: Any, least: int) -> None:
    if not _is_count(value, least):
        raise InputError(f"{name}={value!r} must be a whole number of at least {least}")


def _is_count(value: Any, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def _is_above_zero(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < float("inf")


def _check_choices(given: Mapping[str, Any]) -> None:
    for name, allowed in CHOICES.items():
        if name not in given or (given[name] is None and name in MAYBE_NONE):
            continue
        if given[name] not in allowed:
            raise InputError(f"{name}={given[name]!r} must be one of {', '.join(allowed)}")
