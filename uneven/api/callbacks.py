"""Two callbacks for `fit(callbacks=[...])`: stop when a metric no longer improves, and keep the best params.

Both decide by an evaluated metric, which is the same on all ranks; so all ranks decide alike.
"""

import math
from typing import Any, Literal

from uneven.errors import InputError
from uneven.train.callbacks import Callback, CallbackInfo

MODES = ("min", "max")


class _Improvement(Callback):
    """Whether a metric improved at an evaluation; `best` is its best value. A value that is not a number is none."""

    needs_evaluation = True

    def __init__(self, metric: str, mode: Literal["min", "max"], min_delta: float) -> None:
        name = type(self).__name__
        if not isinstance(metric, str) or not metric:
            raise InputError(f"{name}(metric={metric!r}): pass the name of a metric of the evaluation, as in 'loss'")
        if mode not in MODES:
            raise InputError(f"{name}(mode={mode!r}) must be one of {', '.join(MODES)}")
        if not isinstance(min_delta, int | float) or not 0 <= min_delta < math.inf:
            raise InputError(f"{name}(min_delta={min_delta!r}) must be a number of at least 0")
        self.metric = metric
        self.mode = mode
        self.min_delta = float(min_delta)
        self.best: float | None = None
        self._is_loaded = False  # and on_start has not been called since

    def on_start(self, info: CallbackInfo) -> None:
        del info
        if not self._is_loaded:
            self.reset()
        self._is_loaded = False

    def reset(self) -> None:
        self.best = None

    def state_dict(self) -> dict[str, Any]:
        best = self.best if self.best is None or math.isfinite(self.best) else str(self.best)  # JSON has no infinity
        return {"metric": self.metric, "mode": self.mode, "best": best}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The best value so far counts, unless it is of another metric."""
        if (state["metric"], state["mode"]) == (self.metric, self.mode):
            self.best = None if state["best"] is None else float(state["best"])
            self._is_loaded = True

    def improved(self, info: CallbackInfo) -> bool:
        """Whether this evaluation is the best one so far."""
        self._is_loaded = False  # also in the middle of a run, which does not call on_start again
        if self.metric not in info.metrics:
            known = ", ".join(sorted(info.metrics))
            raise InputError(f"{type(self).__name__}(metric={self.metric!r}): the evaluation has {known}")
        value = info.metrics[self.metric]
        sign = 1.0 if self.mode == "min" else -1.0
        if math.isnan(value) or (self.best is not None and not sign * value < sign * self.best - self.min_delta):
            return False
        self.best = value
        return True


class EarlyStopping(_Improvement):
    """Stop after `patience` evaluations in a row without an improvement of the metric by more than `min_delta`.

    `metric` is a name that the eval step returns, or "train_loss". The state then has `finished=False`, and its
    `stopped` says why.
    """

    def __init__(
        self, metric: str = "loss", patience: int = 3, mode: Literal["min", "max"] = "min", min_delta: float = 0.0
    ) -> None:
        super().__init__(metric, mode, min_delta)
        if not isinstance(patience, int) or isinstance(patience, bool) or patience < 1:
            raise InputError(f"EarlyStopping(patience={patience!r}) must be a whole number of at least 1")
        self.patience = patience
        self.waited = 0  # evaluations since the last improvement

    def reset(self) -> None:
        super().reset()
        self.waited = 0

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "waited": self.waited}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        if self._is_loaded:
            self.waited = state["waited"]

    def on_eval(self, info: CallbackInfo) -> None:
        self.waited = 0 if self.improved(info) else self.waited + 1
        if self.waited >= self.patience:
            best = "" if self.best is None else f"; the best was {self.best:.4g}"
            info.stop(f"{self.metric} has not improved in {self.waited} evaluations{best}")


class KeepBest(_Improvement):
    """The run's result has the params, buffers and optimizer state of the evaluation with the best metric.

    With every policy and strategy. `state.best` is that evaluation's entry of the history; `state.history`, `slot` and
    the timeline tell of the whole run. A copy is held in host memory on every rank.
    """

    def __init__(self, metric: str = "loss", mode: Literal["min", "max"] = "min", min_delta: float = 0.0) -> None:
        super().__init__(metric, mode, min_delta)

    def on_eval(self, info: CallbackInfo) -> None:
        if self.improved(info):
            info.keep_state()
