"""What attaching to a framework's loop may choose, and what it leaves as it is; the same for all frameworks."""

from collections.abc import Sequence
from typing import Literal

from uneven.errors import InputError

Policy = Literal["balanced", "sync"]
# Of a DataLoader, besides what says which samples are in a batch.
KEPT = (
    *("collate_fn", "num_workers", "pin_memory", "timeout", "worker_init_fn", "multiprocessing_context"),
    *("generator", "prefetch_factor", "persistent_workers", "in_order"),
)


def chosen_shares(policy: str, shares: Sequence[float] | None) -> Policy | tuple[float, ...]:
    """What StepShares is given; InputError where one of the two would be ignored, or needs more than DDP."""
    if policy == "balanced":
        return "balanced" if shares is None else tuple(shares)
    if policy != "sync":
        raise InputError(
            f"policy={policy!r}: a framework's loop steps all ranks together, with 'balanced' or 'sync'; fit and "
            "Ddp.setup train with local policies"
        )
    if shares is not None:
        raise InputError(f"shares={tuple(shares)} and policy='sync': give one of them")
    return "sync"
