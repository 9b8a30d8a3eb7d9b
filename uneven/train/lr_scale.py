"""The factor on the learning rates of a local policy, which follows the measured speeds (policy/scale.py)."""

from uneven.policy.recorded import RecordedWindows
from uneven.policy.scale import CHANGE
from uneven.policy.windows import Windows
from uneven.train.engine import Engine

NO_RATE = (
    "  the optimizer has no learning rate to scale (lr=None); averaging params over devices damps each one's steps"
)


class LocalScale:
    """`value` is the factor; `update` at the start, until it is known, and after every epoch."""

    def __init__(self, engine: Engine, windows: Windows | RecordedWindows) -> None:
        self._engine, self._windows = engine, windows
        self.value = 1.0
        self.is_known = False

    def update(self) -> list[str]:
        """Follow the speeds; a replay takes the factor from the log. Returns lines to print."""
        if isinstance(self._windows, RecordedWindows):
            self.value = self._windows.scale
            return []
        if not self._windows.is_measured:
            return []
        if not self._engine.schedule.rates:
            lines, self.is_known = [] if self.is_known else [NO_RATE], True
            return lines
        wanted = self._engine.lr_scale("auto", self._windows.speeds)
        if abs(wanted / self.value - 1.0) <= CHANGE and self.is_known:
            return []
        self.is_known, self.value = True, wanted
        self._engine.recorder.event("lr_scale", scale=wanted)
        lr, rule = self._engine.schedule.plain[0], self._engine.config.lr_scale or "auto"
        return [] if wanted == 1.0 else [describe_lr_scale(lr, wanted, rule)]


def describe_lr_scale(lr: float, scale: float, rule: float | str) -> str:
    return (
        f"  learning rate {lr:g} -> {scale * lr:g} (x{scale:.2f}, lr_scale={rule!r}): averaging params "
        "over devices makes steps smaller; lr_scale=1.0 turns this off"
    )
