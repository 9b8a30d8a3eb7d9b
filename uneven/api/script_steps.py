"""What a converted script may have left over in its loop: `ddp.step(loss)` runs backward and steps the optimizer.

An `optimizer.step()` beside it is refused: it would apply every gradient twice, the same on all ranks, so that nothing
else could notice it. A `loss.backward()` fails in torch, with a message that does not help here.
Used by api/batch_steps.py; held by tests/api/test_script_steps.py.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch.optim import Optimizer

from uneven.errors import InputError
from uneven.parallel.elementwise import changes_nothing
from uneven.step.several import OptimizerGroup
from uneven.train.worker import Worker


def refuse_script_steps(worker: Worker) -> Callable[[], None]:
    """From now on, until the function that is returned is called: afterwards the optimizer is the script's again."""
    engine = worker.engine

    @changes_nothing
    def check(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        del args, kwargs
        if engine.eager.precision.is_stepping:
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


@contextmanager
def name_second_backward() -> Iterator[None]:
    """Around a backward of ours."""
    try:
        yield
    except RuntimeError as error:
        if "backward through the graph a second time" not in str(error):
            raise
        raise InputError(
            "backward has run through this loss's graph already: ddp.step(loss) and ddp.backward(loss) run backward "
            "themselves, so take loss.backward() out of the loop; losses that share a graph are added up first"
        ) from error
