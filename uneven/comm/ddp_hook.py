"""A call before the last sum of torch's DistributedDataParallel: a rank's own gradients are complete then.

DDP sums its buckets in order while backward is still under way. uneven/core.py stops a rank's clock here, before the
rank waits for others.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch.distributed import GradBucket  # type: ignore[attr-defined]  # exported, but not by name
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

# As DistributedDataParallel.register_comm_hook takes it: (state, bucket) -> a future of the summed bucket.
CommHook = Callable[[Any, GradBucket], torch.futures.Future[torch.Tensor]]


def call_before_last_sum(
    ddp: DistributedDataParallel, call: Callable[[], None], hook: CommHook | None = None, state: Any = None
) -> None:
    """Sum by `hook` with its `state`, or as DDP itself does; a DDP takes one hook."""
    if hook is None:
        hook, state = allreduce_hook, ddp.process_group

    def call_and_sum(state: Any, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        if bucket.is_last():
            call()
        return hook(state, bucket)

    ddp.register_comm_hook(state, call_and_sum)
