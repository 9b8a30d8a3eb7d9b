"""The params that a run trains are fixed when its group has formed; what is unfrozen or added later is refused.

The reducers and averages of all policies list the params once: their buffers have one layout for the whole run. A param
beside them would be trained by each rank for itself, and the replicas would drift apart without a word.
"""

from torch import nn
from torch.optim import Optimizer

from uneven.errors import InputError


class TrainedParams:
    """Life cycle: made with the group, `check` before every step. Freezing a param later is allowed: it is unused."""

    def __init__(self, model: nn.Module, optimizer: Optimizer) -> None:
        self._frozen = [(name, param) for name, param in model.named_parameters() if not param.requires_grad]
        self._known = set(model.parameters())
        self._count = _count(optimizer)

    def check(self, optimizer: Optimizer) -> None:
        """InputError where another param would be trained than those that the ranks have in common."""
        for name, param in self._frozen:
            if param.requires_grad:
                raise InputError(
                    f"{name} was unfrozen while the run is on: its gradients are not summed over the ranks; set "
                    "requires_grad before the run begins (with a param group of lr=0 for what is to learn later), or "
                    "train the second stage in a run of its own"
                )
        if (count := _count(optimizer)) != self._count:
            for param in (param for settings in optimizer.param_groups for param in settings["params"]):
                if param not in self._known:
                    raise InputError(
                        f"a param of shape {tuple(param.shape)} was added to the optimizer while the run is on: its "
                        "gradients are not summed over the ranks; add it to model and optimizer before the run begins"
                    )
            self._count = count


def _count(optimizer: Optimizer) -> int:
    return sum(len(settings["params"]) for settings in optimizer.param_groups)
