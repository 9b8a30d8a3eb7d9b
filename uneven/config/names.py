"""The words that settings take as choices, policies and strategies that behave alike, and the keys of the history."""

from collections.abc import Mapping
from typing import Any, Literal, get_args

Policy = Literal["sync", "balanced", "cadence", "async"]
PolicySetting = Literal["sync", "balanced", "cadence", "async", "auto"]  # auto: the one that uneven.plan chooses
Strategy = Literal["ddp-flat", "ddp-bucketed", "zero1", "zero1-flat", "zero2", "fsdp", "tensor", "sequence"]
Backend = Literal["auto", "nccl", "cpu", "shm", "gloo"]  # cpu: through host memory, shm where it is possible
Precision = Literal["fp32", "bf16", "fp16", "auto"]
Compile = Literal["off", "default", "graph"]
Activations = Literal["keep", "recompute", "offload", "auto"]
LRScale = Literal["auto", "linear", "sqrt"]
OptimizerState = Literal["keep", "average"]
Progress = Literal["auto", "bar", "lines", "off"]
OnFault = Literal["go-on", "end"]  # when a rank is lost
MonitorMode = Literal["auto", "min", "max"]
SchedulerInterval = Literal["step", "epoch"]
Auto = Literal["auto"]  # of settings that are numbers otherwise

POLICIES: tuple[Policy, ...] = get_args(Policy)
EXACT_POLICIES: tuple[Policy, ...] = ("sync", "balanced")  # sum gradients in every step: one device's params
LOCAL_POLICIES: tuple[Policy, ...] = ("cadence", "async")  # step by themselves and average params in rounds
STRATEGIES: tuple[Strategy, ...] = get_args(Strategy)
REPLICATED: tuple[Strategy, ...] = ("ddp-flat", "ddp-bucketed", "zero1", "zero1-flat")  # the whole model everywhere
MODEL_PARALLEL: tuple[Strategy, ...] = ("tensor", "sequence")  # all devices work on the same samples
SHARDED: tuple[Strategy, ...] = ("zero1", "zero1-flat", "zero2", "fsdp", *MODEL_PARALLEL)  # shards of something

# What the run itself writes into an entry of the history; every other key is a metric of the user's.
ENTRY_KEYS = (
    *("epoch", "epochs", "step", "is_inside_epoch", "samples", "skipped", "dropped"),
    *("train_loss", "lr", "train_seconds", "samples_per_s"),
)


def results_of(entry: Mapping[str, Any]) -> dict[str, Any]:
    """The results in an entry of the history: its train_loss and every metric."""
    return {name: value for name, value in entry.items() if name == "train_loss" or name not in ENTRY_KEYS}
