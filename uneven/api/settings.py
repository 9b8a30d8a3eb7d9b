"""The settings as users type them: `Settings` for the keywords of `fit`, `SettingMethods` for the builder.

Written by tools/settings.py from the fields of RunConfig; edit those instead. Values are checked when the run starts.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypedDict, TypeVar

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

T = TypeVar("T")
B = TypeVar("B", bound="SettingMethods")


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


class Method(Generic[T]):
    """A method of a single setting, as in `builder.epochs(5)`: notes the value and returns the builder."""

    def __init__(self, setting: str = "") -> None:
        """`setting`: where it is not named like the method."""
        self._setting = setting

    def __set_name__(self, owner: type, name: str) -> None:
        self._setting = self._setting or name

    def __get__(self, builder: B, owner: Any = None) -> Callable[[T], B]:
        def note(value: T) -> B:
            settings: dict[str, Any] = {self._setting: value}
            return builder.settings(**settings)

        return note


class Switch(Method[bool]):
    """As in `builder.verify()` or `builder.shuffle(False)`."""

    def __get__(self, builder: B, owner: Any = None) -> Callable[..., B]:
        note = super().__get__(builder, owner)
        return lambda value=True: note(value)


class SettingMethods:
    """The builder's methods of single settings, as in `.batch_size(64).epochs(5)`; docs/settings.md describes each."""

    def __init__(self) -> None:
        self._settings: Settings = {}

    def settings(self, **settings: "Unpack[Settings]") -> "Self":
        """Several settings at once, under the names of `fit`."""
        self._settings.update(settings)
        return self

    batch_size: Method[int] = Method()
    epochs: Method[int] = Method()
    num_epochs: Method[int] = Method("epochs")
    max_steps: Method[int | None] = Method()
    policy: Method[PolicySetting] = Method()
    devices: Method[str] = Method()
    backend: Method[Backend] = Method()
    seed: Method[int] = Method()
    accumulate: Method[int] = Method()
    global_batch_size: Method[int | Auto | None] = Method()
    max_global_batch_size: Method[int | None] = Method()
    shares: Method[Sequence[float] | None] = Method()
    strategy: Method[Strategy | None] = Method()
    memory_shares: Method[Sequence[float] | None] = Method()
    redundancy: Method[int] = Method()
    memory_cap: Method[int | Sequence[int] | None] = Method()
    bucket_mb: Method[float | None] = Method()
    activations: Method[Activations] = Method()
    sync_batchnorm: Switch = Switch()
    check_loss: Switch = Switch()
    max_grad_norm: Method[float | None] = Method()
    max_grad_value: Method[float | None] = Method()
    max_bad_steps: Method[int] = Method()
    lr_scale: Method[float | LRScale | None] = Method()
    scheduler_interval: Method[SchedulerInterval | None] = Method()
    anchor: Method[int | None] = Method()
    max_anchor: Method[int | None] = Method()
    overhead_target: Method[float | None] = Method()
    divergence_threshold: Method[float | None] = Method()
    max_staleness: Method[int | None] = Method()
    optimizer_state: Method[OptimizerState | None] = Method()
    verify: Switch = Switch()
    precision: Method[Precision] = Method()
    compile: Method[Compile] = Method()
    shuffle: Switch = Switch()
    drop_last: Switch = Switch()
    num_workers: Method[int] = Method()
    eval_every: Method[int | str | None] = Method()
    monitor: Method[str | None] = Method()
    monitor_mode: Method[MonitorMode] = Method()
    save_every: Method[int | str | None] = Method()
    keep_last: Method[int | None] = Method()
    keep_best: Method[int | None] = Method()
    checkpoint_copies: Method[int] = Method()
    resume: Method[str | Path | None] = Method()
    out: Method[str | Path | None] = Method()
    overwrite: Switch = Switch()
    replay: Method[str | Path | None] = Method()
    skip: Method[str | None] = Method()
    deadline: Method[float | Auto | None] = Method()
    on_fault: Method[OnFault] = Method()
    min_ranks: Method[int] = Method()
    restarts: Method[int] = Method()
    grace: Method[float] = Method()
    progress: Method[Progress] = Method()
