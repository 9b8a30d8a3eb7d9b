"""Who holds what: strategies and optimizers over ranks, for `fit` and for loops with a process group of their own.

Its names are imported on first use: most users need one of them. docs/parallel.md has an example of each.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from uneven.parallel.ddp import DDPBucketed, DDPFlat, Zero1, Zero2
    from uneven.parallel.fsdp import FSDP
    from uneven.parallel.muon_adamw import MuonAdamW
    from uneven.parallel.sharded_optimizer import ShardedOptimizer
    from uneven.parallel.strategy import FullState, Strategy
    from uneven.parallel.tensor_parallel import Columns, Places, Rows, SequenceParallel, TensorParallel, Words

_HOMES = {
    "ddp": ("DDPBucketed", "DDPFlat", "Zero1", "Zero2"),
    "fsdp": ("FSDP",),
    "muon_adamw": ("MuonAdamW",),
    "sharded_optimizer": ("ShardedOptimizer",),
    "strategy": ("FullState", "Strategy"),
    "tensor_parallel": ("Columns", "Places", "Rows", "SequenceParallel", "TensorParallel", "Words"),
}
__all__ = [
    "FSDP",
    "Columns",
    "DDPBucketed",
    "DDPFlat",
    "FullState",
    "MuonAdamW",
    "Places",
    "Rows",
    "SequenceParallel",
    "ShardedOptimizer",
    "Strategy",
    "TensorParallel",
    "Words",
    "Zero1",
    "Zero2",
]


def __getattr__(name: str) -> Any:
    for home, names in _HOMES.items():
        if name in names:
            return getattr(import_module(f"uneven.parallel.{home}"), name)
    raise AttributeError(f"module 'uneven.parallel' has no attribute {name!r}")
