"""Train one PyTorch model on devices of different speed.

The public names are imported on first use, so that `import uneven` costs no torch import.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from uneven.version import __version__ as __version__

_HOMES = {
    "Callback": "uneven.train.callbacks",
    "CallbackInfo": "uneven.train.callbacks",
    "Ddp": "uneven.api.fit",
    "EarlyStopping": "uneven.api.callbacks",
    "FlowBuilder": "uneven.graph.flow",
    "KeepBest": "uneven.api.callbacks",
    "fit": "uneven.api.fit",
    "Run": "uneven.launch.run",
    "TrainedState": "uneven.results.state",
    "TensorData": "uneven.data.tensors",
    "MuonAdamW": "uneven.parallel.muon_adamw",
    "InputError": "uneven.errors",
    "MachineError": "uneven.errors",
    "NotFiniteError": "uneven.errors",
    "RankError": "uneven.errors",
    "StreamSource": "uneven.data.source",
}
__all__ = [
    "Callback",
    "CallbackInfo",
    "Ddp",
    "EarlyStopping",
    "FlowBuilder",
    "InputError",
    "KeepBest",
    "MachineError",
    "MuonAdamW",
    "NotFiniteError",
    "RankError",
    "Run",
    "StreamSource",
    "TensorData",
    "TrainedState",
    "fit",
]

if TYPE_CHECKING:
    from uneven.api.callbacks import EarlyStopping, KeepBest
    from uneven.api.fit import Ddp, fit
    from uneven.data.source import StreamSource
    from uneven.data.tensors import TensorData
    from uneven.errors import InputError, MachineError, NotFiniteError, RankError
    from uneven.graph.flow import FlowBuilder
    from uneven.launch.run import Run
    from uneven.parallel.muon_adamw import MuonAdamW
    from uneven.results.state import TrainedState
    from uneven.train.callbacks import Callback, CallbackInfo


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'uneven' has no attribute {name!r}")
    try:
        return getattr(import_module(_HOMES[name]), name)
    except ModuleNotFoundError as error:
        from uneven.hardware.torchbuild import raise_if_missing

        raise_if_missing(error)
        raise


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
