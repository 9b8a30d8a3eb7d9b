"""Refuses an `optimizer.step()` in the script's own loop: `ddp.step(loss)` steps the optimizer.

A call that was left over when a script was converted would apply every gradient twice, the same on all ranks, so that
nothing else could notice it. Used by api/batch_steps.py; held by tests/api/test_script_steps.py.
"""

from collections.abc import Callable
from typing import Any

from torch.optim import Optimizer

from uneven.errors import InputError
from uneven.step.several import OptimizerGroup
from uneven.train.worker import Worker


def refuse_script_steps(worker: Worker) -> Callable[[], None]:
    """From now on, until the function that is returned is called: afterwards the optimizer is the script's again."""
    engine = worker.engine

    def check(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        del args, kwargs
        if engine.eager.is_applying:
            return
        if any(param.grad is not None for group in optimizer.param_groups for param in group["params"]):
            raise InputError(
                "optimizer.step() was called by the script: ddp.step(loss) runs backward, sums the gradients over the "
                "devices and steps the optimizer, so take that call out of the loop"
            )

    made = engine.optimizer
    members = made.members.values() if isinstance(made, OptimizerGroup) else [made]
    handles = [optimizer.register_step_pre_hook(check) for optimizer in members]

    def allow() -> None:
        for handle in handles:
            handle.remove()

    return allow
