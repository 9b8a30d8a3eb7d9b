"""The second half of an exact step as a CUDA graph: division by the count, clipping and the optimizer.

The first half (captured.py) ends with this rank's gradients in the reducer's buckets. Between the two the host waits
for the other ranks, decides whether the step is finite, and sums the buckets; so a graph holds no collective, and only
addresses of this rank's own memory: the group may be replaced without capturing again.
"""

from collections.abc import Hashable

import torch
from torch import Tensor

from uneven.errors import InputError
from uneven.parallel.buckets import Bucket
from uneven.step.capture import Capture
from uneven.step.eager import EagerStep
from uneven.step.optimizer_capture import CapturedSettings, prepare_optimizer


class CapturedUpdate:
    """Stands in for `EagerStep.update`, by gradients that are known to be finite.

    There is one graph for each set of params with a gradient and each state of the optimizer's constants. What is seen
    for the first time runs eagerly: optimizer state must exist before it is captured.
    """

    def __init__(self, eager: EagerStep, device: torch.device) -> None:
        prepare_optimizer(eager)
        self.optimizer = eager.optimizer
        self._eager = eager
        self._settings = CapturedSettings(eager.optimizer, device)
        self._count = torch.ones((), dtype=torch.float64, device=device)
        self._constants: Hashable = None  # of the settings, where `read_settings` has read them for this step
        self._seen: Hashable = None
        self._graphs: dict[Hashable, Capture] = {}
        self._buckets: list[Bucket] | None = None  # whose addresses the graphs hold

    def read_settings(self) -> None:
        """What the next call needs to know of the optimizer, while the device computes; when the rates are set."""
        self._constants = self._settings.constants()
        self._settings.write_rates()

    def __call__(self, counts: Tensor | None) -> None:
        key = self._key(counts)
        self._constants = None
        if key not in self._graphs:
            if key != self._seen:  # a scheduler that changes momentum in every step is never captured
                self._seen = key
                self._eager.update(counts)
                return
            self.record(counts)
        self._settings.write_rates()
        if counts is not None:
            self._count.fill_(float(counts))
        self._graphs[key].replay([])
        self._eager.end_update()

    def record(self, counts: Tensor | None) -> None:
        """Capture the update for the gradients as they are now; nothing is computed."""
        capture, count = Capture([]), None if counts is None else self._count
        with self._settings.rates_in_tensors():
            capture.record(lambda _: self._eager.update(count))
        self._graphs[self._key(counts)] = capture

    def clear(self) -> None:
        """Forget all graphs: optimizer state or buckets are about to be replaced."""
        self._graphs.clear()
        self._seen = None

    def _key(self, counts: Tensor | None) -> Hashable:
        reducer = self._eager.reducer
        assert reducer is not None, "captured only where gradients are summed over ranks"
        if reducer.buckets is not self._buckets:
            self.clear()
            self._buckets = reducer.buckets
        constants = self._settings.constants() if self._constants is None else self._constants
        return counts is not None, reducer.unused, constants


def make_captured_update(eager: EagerStep, device: torch.device) -> CapturedUpdate | None:
    """None where the update must stay eager: the user's own function, a loss scaler, or an optimizer that cannot."""
    if eager.before_step is not None or eager.precision.scaler.is_enabled():
        return None
    try:
        return CapturedUpdate(eager, device)
    except InputError:
        return None
