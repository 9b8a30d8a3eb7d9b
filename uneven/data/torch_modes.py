"""What a script has set for all of torch in its process, such as the default dtype, for processes that do not run it.

The ranks of `fit` and the loader processes of a rank are started anew, where a plain script, and loader processes that
are forked, would have these values: without them a model made in float64 was trained in float32, without a word.
Read where a process is described (launch/payload.py, data/keyed_dataset.py), set in it before anything is made.
"""

from typing import NamedTuple

import torch


class TorchModes(NamedTuple):
    """Seeds, threads and the default device are not among them: each rank has its own."""

    default_dtype: torch.dtype
    is_deterministic: bool
    only_warns: bool  # where something has no deterministic form
    has_deterministic_cudnn: bool
    detects_anomalies: bool
    checks_nan: bool  # in doing so

    @classmethod
    def read(cls) -> "TorchModes":
        return cls(
            torch.get_default_dtype(),
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
            bool(torch.backends.cudnn.deterministic),
            torch.is_anomaly_enabled(),
            torch.is_anomaly_check_nan_enabled(),
        )

    def set(self) -> None:
        """What differs and nothing else: use_deterministic_algorithms imports torch's compiler, which takes seconds."""
        now = TorchModes.read()
        if self.default_dtype != now.default_dtype:
            torch.set_default_dtype(self.default_dtype)
        if (self.is_deterministic, self.only_warns) != (now.is_deterministic, now.only_warns):
            torch.use_deterministic_algorithms(self.is_deterministic, warn_only=self.only_warns)
        if self.has_deterministic_cudnn != now.has_deterministic_cudnn:
            torch.backends.cudnn.deterministic = self.has_deterministic_cudnn
        if (self.detects_anomalies, self.checks_nan) != (now.detects_anomalies, now.checks_nan):
            torch.autograd.set_detect_anomaly(self.detects_anomalies, self.checks_nan)
